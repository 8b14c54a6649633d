"""What the pytest plugin does once a test, an option or a mark asks for devices.

The hooks and fixtures are in `jaxsync_pytest`, outside this package, so that a project which never asks
imports neither jaxsync nor JAX.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxsync.client import SyncClient, start
from jaxsync.config import SyncConfig
from jaxsync.devices import all_devices, platform_causes, simulate_devices
from jaxsync.errors import (
    BackendStartedError,
    DeviceCountError,
    JaxsyncError,
    MeshMarkError,
    TooFewDevicesError,
)
from jaxsync.mesh import make_mesh
from jaxsync.testing.leaks import no_leaks


def simulate(count: int) -> None:
    """Simulates devices.

    Raises:
        pytest.UsageError: It is no count, or comes too late: in the words of jaxsync's own error.
    """
    try:
        simulate_devices(count)
    except JaxsyncError as error:
        raise pytest.UsageError(str(error)) from error


def header(count: int) -> str:
    """The line that pytest prints about devices. Starts no backend."""
    return f"jaxsync: {count} simulated device{'s' * (count != 1)}, jax {jax.__version__}"


def check_count(count: int) -> None:
    """Refuses to run tests on fewer devices than asked for, or on others. Starts the backend.

    Raises:
        pytest.UsageError: JAX has other devices, or none: something else chose the platform.
    """
    try:
        found = all_devices(count)
    except DeviceCountError as error:
        raise pytest.UsageError(str(_other_devices(count, f"JAX cannot start: {error.problem}"))) from error
    if len(found) != count or found[0].platform != "cpu":
        text = f"JAX has started with {len(found)} {found[0].platform} device{'s' * (len(found) != 1)}"
        raise pytest.UsageError(str(_other_devices(count, text)))


def _other_devices(count: int, found: str) -> BackendStartedError:
    return BackendStartedError(asked=count, found=found, causes=platform_causes())


def mark_axes(mark: pytest.Mark | None) -> dict[str, int] | None:
    """The axes of a mesh mark; None if there is no mark, or it is one of another plugin's."""
    is_ours = mark is not None and not mark.args and mark.kwargs and all(map(_is_size, mark.kwargs.values()))
    return dict(mark.kwargs) if mark is not None and is_ours else None


def _format_mark(mark: pytest.Mark | None) -> str:
    if mark is None:
        return "no mark"
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"{mark.name}({', '.join(arguments)})"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_mark(axes: Mapping[str, int]) -> None:
    """Fails a test whose mark asks for more devices than there are, rather than skip it.

    Raises:
        MeshMarkError: There are too few: says what to pass.
        DeviceCountError: JAX cannot start.
    """
    asked = math.prod(axes.values())
    devices = all_devices(asked)
    if asked > len(devices):
        mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise MeshMarkError(mesh=mesh, asked=asked, found=len(devices), platform=devices[0].platform)


def make_test_mesh(mark: pytest.Mark | None) -> Mesh:
    """The mesh of a mark; without one, all devices along "data", if that is more than one.

    Raises:
        pytest.UsageError: The mark does not say which axes.
        TooFewDevicesError: There is no mark, and only one device: there, wrong code passes.
        MeshError: The mark has a size below 1.
        DeviceCountError: JAX cannot start.
    """
    axes = {"data": len(all_devices(2))} if mark is None else mark_axes(mark)
    if mark is None and axes == {"data": 1}:
        raise TooFewDevicesError(
            subject="sync_mesh", found=1, wanted=2, allow="mark the test with mesh(data=1)"
        )
    if axes is None:
        wanted = "axes and sizes in the mark, such as mesh(data=4, model=2)"
        raise pytest.UsageError(f"sync_mesh: got {_format_mark(mark)}; wanted {wanted}")
    return make_mesh(axes)


@contextlib.contextmanager
def checked_client(
    mesh: Mesh,
    config: SyncConfig | None,
    *,
    checks: Iterable[str],
    kept: Callable[[], Iterable[Any]],
    has_failed: Callable[[], bool],
) -> Iterator[SyncClient]:
    """The client of the process, which is closed at the end and may leave nothing behind.

    Raises:
        LeakError: It left something behind.
        StartConflictError: An earlier test, or an import, has left one open with other settings.
    """
    with no_leaks(lambda: start(mesh, config), checks=checks, kept=kept, has_failed=has_failed) as client:
        yield client
