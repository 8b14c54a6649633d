"""The pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "how-to" / "ci.md"
LIMIT_S = 240


def test_the_plugin_is_an_entry_point_of_the_distribution() -> None:
    [found] = importlib.metadata.entry_points(group="pytest11", name="jaxsync")
    assert found.value == "jaxsync_pytest"


def test_a_project_that_asks_for_nothing_imports_neither_jax_nor_jaxsync(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others, too, import what they like
    pytester.makepyfile(
        """
        import sys

        def test_imports():
            assert "jaxsync_pytest" in sys.modules
            for name in ("jax", "jaxlib", "numpy", "jaxsync"):
                assert name not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess("-p", "jaxsync", timeout=LIMIT_S)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("jaxsync:*")


def test_the_plugin_can_be_turned_off(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-p", "no:jaxsync", "--jaxsync-devices=2", timeout=LIMIT_S)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*unrecognized arguments: --jaxsync-devices=2")


@pytest.mark.parametrize(("option", "got"), [((), "many"), (("--jaxsync-devices=0",), "0")])
def test_what_is_no_number_is_refused(pytester: pytest.Pytester, option: tuple[str, ...], got: str) -> None:
    pytester.makeini("[pytest]\njaxsync_devices = many\n")
    result = pytester.runpytest_subprocess(*option, timeout=LIMIT_S)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        f"ERROR: --jaxsync-devices (jaxsync_devices) is {got!r}: wanted a number such as 8"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[tool.pytest.ini_options]\njaxsync_devices = "3"\n'),
        ("pyproject.toml", "[tool.pytest.ini_options]\njaxsync_devices = 3\n"),
        ("pyproject.toml", '[tool.pytest]\njaxsync_devices = "3"\n'),
        ("pyproject.toml", "[tool.pytest]\njaxsync_devices = 3\n"),
        ("pytest.ini", '[pytest]\njaxsync_devices = "3"\n'),
    ],
)
def test_every_file_of_pytest_takes_the_number_of_devices(
    pytester: pytest.Pytester, name: str, text: str
) -> None:
    (pytester.path / name).write_text(text)
    result = pytester.runpytest_subprocess("--collect-only", timeout=LIMIT_S)
    result.stdout.fnmatch_lines("jaxsync: 3 simulated devices, jax *")


MARKS_AND_FIXTURES = """
import gc, sys, threading
import jax, jax.numpy as jnp, numpy as np, pytest
import jaxsync

KEPT, RUNS = [], threading.Event()


def sync(client, devices):
    client.register_sync_parameters({"w": jnp.zeros(2)})
    for device in devices:
        grad = jax.device_put(jnp.ones(2), client.mesh.devices.flat[device])
        client.submit_gradient_sync(device, {"w": grad})
    return [client.submit_sync_collective(device) for device in devices]


def test_all_devices(sync_mesh):
    assert sync_mesh.shape == {"data": 8}
    assert len(jax.devices()) == 8


@pytest.mark.mesh(data=2, model=2)
def test_marked(sync_mesh):
    assert sync_mesh.shape == {"data": 2, "model": 2}


@pytest.fixture
def weights():
    return jnp.ones(5)


class TestClient:
    @pytest.mark.mesh(data=2)
    def test_client(self, sync_client, weights):
        assert jaxsync.start(sync_client.mesh) is sync_client
        self.results = [ticket.wait(60)["w"] for ticket in sync(sync_client, (0, 1))]
        np.testing.assert_array_equal(self.results[1], [1, 1])


@pytest.mark.mesh("of a cow")
def test_mark_of_others():
    pass


@pytest.mark.mesh(data="4")
def test_mark_without_sizes(sync_mesh):
    raise AssertionError("never reached")


@pytest.mark.mesh(data=4, model=4)
def test_too_few():
    raise AssertionError("never reached")


@pytest.mark.mesh(data=2)
def test_lost_ticket(sync_client):
    sync(sync_client, (0,))


def test_lost_thread(sync_client):
    threading.Thread(target=RUNS.wait, name="device-3").start()


def test_lost_array(sync_client):
    RUNS.set()
    KEPT.append(jnp.ones(3))


@pytest.mark.mesh(data=2)
def test_that_fails(sync_client):
    mine = jnp.ones(7)
    sync(sync_client, (0,))
    assert False, "its own fault"
"""


def test_marks_fixtures_and_leaks(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\njaxsync_devices = 8\naddopts = --strict-markers\n")
    pytester.makeconftest("import jax.numpy as jnp\nWEIGHTS = jnp.ones(3)  # starts the backend\n")
    pytester.makepyfile(MARKS_AND_FIXTURES)
    result = pytester.runpytest_subprocess("-rA", timeout=LIMIT_S)
    result.assert_outcomes(passed=7, failed=1, errors=5)
    output = result.stdout.str()
    assert re.search(r"^jaxsync: 8 simulated devices, jax \d+\.\d+", output, re.MULTILINE)
    for line in (
        "The mark mesh(data=4, model=4) needs 16 devices; JAX has 8 (cpu).",
        'To fix it: run pytest --jaxsync-devices=16, or set jaxsync_devices = "16" in pytest\'s *',
        "ERROR test_marks_fixtures_and_leaks.py::test_too_few - *",
        "sync_mesh: got mesh(data='4'); wanted axes and sizes in the mark, such as mesh(data=4, model=2)",
        "The test left 1 thing behind.",
        "  - step 0, in which *0 has synced: *1 has not synced, nor handed over the gradients of [[]'w']",
        "  - thread 'device-3' still runs: wait (threading.py:*)",
        "  - array float32[[]3[]] on *0, held by test_marks_fixtures_and_leaks.KEPT",
        "FAILED test_marks_fixtures_and_leaks.py::test_that_fails - *",
    ):
        result.stdout.fnmatch_lines("*" + line)


def test_too_late_is_refused_in_the_words_of_the_library(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(early="import jax.numpy as jnp\nWEIGHTS = jnp.ones(3)\n")
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("-p", "early", "--jaxsync-devices=4", timeout=LIMIT_S)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: Cannot simulate 4 CPU devices: JAX has already started with 1 cpu device.",
            "  - module 'early' holds the array 'WEIGHTS', made when it was imported or run",
            "To fix it: call jaxsync.simulate_devices(n) once, before anything makes an array*",
        ]
    )


@pytest.mark.parametrize("platform", ["no_such_platform", "cuda"])
def test_another_platform_is_refused_before_a_test_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    pytester.makepyfile("def test_nothing(): raise SystemExit('never reached')")
    result = pytester.runpytest_subprocess("--jaxsync-devices=4", timeout=LIMIT_S)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: Cannot simulate 4 CPU devices: JAX cannot start: *",
            f"  - JAX_PLATFORMS is '{platform}': unset it, or make it 'cpu'",
        ]
    )
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


def test_one_device_without_a_mark_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pytester.makepyfile(
        """
        import pytest

        def test_mesh(sync_mesh):
            raise AssertionError("never reached")

        def test_client(sync_client):
            raise AssertionError("never reached")

        @pytest.mark.mesh(data=1)
        def test_one_is_meant(sync_mesh):
            assert sync_mesh.shape == {"data": 1}
        """
    )
    result = pytester.runpytest_subprocess(timeout=LIMIT_S)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "sync_mesh is on 1 device; wanted 2 or more, and one device shows nothing: *",
            "To fix it: run pytest --jaxsync-devices=8, or set *; or, if *, mark the test with mesh(data=1).",
        ]
    )


FAILURES = """
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import PartitionSpec as P
import jaxsync
from jaxsync import testing

W, ROWS = {"w": np.float32(1)}, np.arange(4, dtype=np.float32)


def loss_fn(params, x):
    return (params["w"] * x).mean()


def test_gradients(sync_mesh):
    reduced = lambda params, x: jax.lax.pmean(jax.grad(loss_fn)(params, x), "data")
    step = jax.shard_map(reduced, mesh=sync_mesh, in_specs=(P(), P("data")), out_specs=P())
    testing.assert_matches_single_device(loss_fn, W, ROWS, step)


def test_collectives():
    testing.assert_collectives(lambda x: x, (ROWS,), all_reduce=1)


def test_replicas(sync_mesh):
    own = lambda: jax.lax.axis_index("data")
    step = jax.shard_map(own, mesh=sync_mesh, in_specs=(), out_specs=P(), check_vma=False)
    testing.assert_replicas_equal(jax.jit(step)())


def test_recompile():
    with testing.no_recompile():
        jax.jit(lambda x: x + 3)(ROWS)


def test_faults(sync_client):
    with testing.inject_faults(sync_client, testing.Drop(device=0, step=0)):
        pass


def test_leaks(sync_mesh):
    with testing.no_leaks(lambda: jaxsync.start(sync_mesh)):
        kept = jnp.ones(3)


def test_loss(sync_mesh):
    testing.assert_matches_single_device(lambda params, x: {}["no such key"], W, ROWS, lambda params, x: W)


@pytest.mark.mesh(4)
def test_mark(sync_mesh):
    raise AssertionError("never reached")
"""


def test_a_failure_shows_the_lines_of_the_test_and_none_of_the_library(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILURES)
    result = pytester.runpytest_subprocess("--jaxsync-devices=2", "--tb=long", timeout=LIMIT_S)
    result.assert_outcomes(failed=7, errors=1)
    output = result.stdout.str()
    places = re.findall(r"^(\S+\.py):\d+: ", output, re.MULTILINE)
    assert len(places) >= 7
    assert not [place for place in places if re.search(r"jaxsync[/_]|contextlib", place)], places
    for source in ("__tracebackhide__", "def assert_", "raise GradientMismatchError", "def make_test_mesh"):
        assert source not in output
    for line in (
        "E * ratio 2 = the number of devices (data=2): reduced twice, or a sum where the mean is meant",
        "E * and pmean of that sum changes nothing. *",
        "E * all_reduce: has 0; wanted 1",
        "E * The replicas of 1 array hold different values.",
        "E * was compiled inside no_recompile().",
        "E * 1 injected fault never struck.",
        "E * The test left 1 thing behind.",
        "E * KeyError: 'no such key'",
        "sync_mesh: got mesh(4); wanted axes and sizes in the mark, such as mesh(data=4, model=2)",
    ):
        result.stdout.fnmatch_lines(line)


def test_every_worker_of_xdist_has_the_devices_and_the_checks(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\njaxsync_leak_checks = threads tickets\n")
    pytester.makepyfile(
        """
        import os, jax, jax.numpy as jnp, jaxsync, pytest

        KEPT = []

        @pytest.fixture
        def sync_config():
            return jaxsync.SyncConfig(axis="batch")

        @pytest.mark.mesh(batch=4)
        @pytest.mark.parametrize("i", range(4))
        def test_devices(sync_client, i):
            assert len(jax.devices()) == 4
            assert os.environ["PYTEST_XDIST_WORKER"] in ("gw0", "gw1")
            assert sync_client.config.axis == "batch"
            KEPT.append(jnp.ones(3))
        """
    )
    result = pytester.runpytest_subprocess("-n", "2", "--jaxsync-devices=4", timeout=LIMIT_S)
    result.assert_outcomes(passed=4)


def test_the_guide_to_ci_works_as_it_stands(pytester: pytest.Pytester) -> None:
    guide = GUIDE.read_text()
    blocks = re.findall(r"```(?:python|toml) title=\"([\w./]+)\"\n(.*?)```", guide, re.DOTALL)
    assert [name for name, _ in blocks] == ["pyproject.toml", "training.py", "test_training.py"]
    for name, text in blocks:
        (pytester.path / name).write_text(text)
    num_tests = len(re.findall(r"^def test_", dict(blocks)["test_training.py"], re.MULTILINE))
    [command] = re.findall(r"^ +- run: (pytest .*)$", guide, re.MULTILINE)
    pytester.syspathinsert()
    result = pytester.runpytest_subprocess(*command.split()[1:], timeout=LIMIT_S)
    result.assert_outcomes(passed=num_tests)
    assert num_tests >= 5


def test_the_workflow_runs_both_ends_of_what_is_supported() -> None:
    [workflow] = re.findall(
        r"```yaml title=\"\.github/workflows/\w+\.yml\"\n(.*?)```", GUIDE.read_text(), re.DOTALL
    )
    assert 'python-version: ["3.11", "3.13"]' in workflow
    assert "cache: pip" in workflow
    assert "\t" not in workflow
