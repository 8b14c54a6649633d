"""The pytest plugin of jaxsync: options, the mesh mark, and fixtures.

A module of its own, since importing anything from the package imports JAX: every pytest run on a machine
with jaxsync installed loads this, and most need neither. See `docs/how-to/ci.md`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxsync import SyncClient, SyncConfig

_COUNT = pytest.StashKey[int]()
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the keys."""
    group = parser.getgroup("jaxsync")
    group.addoption(
        "--jaxsync-devices",
        metavar="N",
        help="Simulate N CPU devices. Overrides jaxsync_devices of the configuration.",
    )
    # A number is a string in every format but that of [tool.pytest], where pytest takes what it is told to.
    kind: Any = int | str if pytest.version_tuple >= (9, 2) else None
    parser.addini(
        "jaxsync_devices", "How many CPU devices to simulate; by default none are.", type=kind, default=""
    )
    parser.addini(
        "jaxsync_leak_checks",
        "What the sync_client fixture looks for: any of threads, tickets and arrays.",
        type="args",
        default=["threads", "tickets", "arrays"],
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Simulates the devices: here, since a conftest.py may make an array when it is imported."""
    given = early_config.known_args_namespace.jaxsync_devices or early_config.getini("jaxsync_devices")
    asked = str(given).strip("\"'")  # an ini file keeps the quotes that a TOML file needs
    if not asked:
        return
    if not asked.isdecimal() or int(asked) < 1:
        raise pytest.UsageError(
            f"--jaxsync-devices (jaxsync_devices) is {asked!r}: wanted a number such as 8"
        )
    from jaxsync import pytest_plugin

    early_config.stash[_COUNT] = int(asked)
    pytest_plugin.simulate(int(asked))


def pytest_configure(config: pytest.Config) -> None:
    """Describes the mark."""
    config.addinivalue_line(
        "markers", "mesh(data=4, model=2): the axes of sync_mesh; too few devices fail the test (jaxsync)"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    """A line about the devices, if any are simulated."""
    if _COUNT not in config.stash:
        return None
    from jaxsync import pytest_plugin

    return pytest_plugin.header(config.stash[_COUNT])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Sees, once all is imported, that JAX really has these devices."""
    if _COUNT in session.config.stash and not _is_worker(session.config):
        from jaxsync import pytest_plugin

        pytest_plugin.check_count(session.config.stash[_COUNT])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a test whose mark asks for more devices than there are, whatever fixtures it uses."""
    mark = item.get_closest_marker("mesh")
    is_counted = _COUNT in item.config.stash and _is_worker(item.config)
    if mark is None and not is_counted:
        return
    from jaxsync import pytest_plugin
    from jaxsync.errors import JaxsyncError

    try:
        if is_counted:
            pytest_plugin.check_count(item.config.stash[_COUNT])
        if (axes := pytest_plugin.mark_axes(mark)) is not None:
            pytest_plugin.check_mark(axes)
    except (JaxsyncError, pytest.UsageError) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is a worker of pytest-xdist, where a usage error is a crash: each test fails instead."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Takes note of a failure: its traceback keeps arrays, and its steps are incomplete."""
    if call.excinfo is not None:
        item.stash[_HAS_FAILED] = True
    return (yield)


@pytest.fixture
def sync_mesh(request: pytest.FixtureRequest) -> Mesh:
    """The mesh of `@pytest.mark.mesh(data=4, model=2)`; without the mark, all devices along "data".

    A single device fails the test, unless its mark says `mesh(data=1)`: there, wrong reductions pass.
    """
    from jaxsync import pytest_plugin
    from jaxsync.errors import JaxsyncError

    try:
        return pytest_plugin.make_test_mesh(request.node.get_closest_marker("mesh"))
    except (JaxsyncError, pytest.UsageError) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.fixture
def sync_config() -> SyncConfig | None:
    """The config of `sync_client`: override it to choose another."""
    return None


@pytest.fixture
def sync_client(
    request: pytest.FixtureRequest, sync_mesh: Mesh, sync_config: SyncConfig | None
) -> Iterator[SyncClient]:
    """The client that `jaxsync.start(sync_mesh, sync_config)` gives, closed and looked after at the end.

    The teardown fails and names what it is if the test leaves a thread, a ticket without an answer, or an
    array behind. A test that has failed is not looked at.
    """
    from jaxsync import pytest_plugin
    from jaxsync.errors import LeakError

    def kept() -> list[Any]:
        """What other fixtures, and the instance of the test's class, hold until after this teardown."""
        own = getattr(getattr(request.node, "instance", None), "__dict__", {})
        return [*getattr(request.node, "funcargs", {}).values(), *own.values()]

    try:
        with pytest_plugin.checked_client(
            sync_mesh,
            sync_config,
            checks=request.config.getini("jaxsync_leak_checks"),
            kept=kept,
            has_failed=lambda: request.node.stash.get(_HAS_FAILED, False),
        ) as client:
            yield client
    except LeakError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
