from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from jaxsync import make_mesh
from jaxsync.errors import ArgumentError, DeviceCountError, MeshError


def test_axes_are_auto_and_in_order() -> None:
    mesh = make_mesh({"data": 4, "model": 2})
    assert list(mesh.shape.items()) == [("data", 4), ("model", 2)]
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_a_small_mesh_takes_the_first_devices() -> None:
    assert list(make_mesh({"data": 2}).devices.flat) == jax.devices()[:2]


def test_given_devices_are_used() -> None:
    chosen = jax.devices()[4:6]
    assert list(make_mesh({"data": 2}, devices=chosen).devices.flat) == chosen


def test_sizes_of_numpy_are_ints_too() -> None:
    import numpy as np

    assert make_mesh({"data": np.int64(4)}).size == 4


@pytest.mark.parametrize("axes", [8, [("data", 8)], None])
def test_what_is_no_mapping_is_refused(axes: object) -> None:
    with pytest.raises(ArgumentError, match="wanted a mapping of axis names to sizes"):
        make_mesh(axes)  # type: ignore[arg-type]


def test_a_device_stands_once() -> None:
    with pytest.raises(MeshError, match="a device is given twice"):
        make_mesh({"data": 2}, devices=jax.devices()[:1] * 2)


@pytest.mark.parametrize(
    ("platform", "problem"),
    [
        ("cuda", "a platform that is asked for is not there"),
        ("no_such_platform", "Unable to initialize backend 'no_such_platform'"),
    ],
)
def test_a_platform_that_cannot_start_is_named(run_python, platform: str, problem: str) -> None:
    code = """
        import jaxsync
        jaxsync.simulate_devices(8)
        try:
            jaxsync.make_mesh({"data": 8})
        except jaxsync.errors.DeviceCountError as error:
            print(error.asked, error.found, error.__cause__ is not None)
            print(error)
    """
    facts, what, *places, fix = run_python(code, JAX_PLATFORMS=platform).stdout.splitlines()
    assert facts == "8 0 True"
    assert what.startswith(f"The mesh needs 8 devices; JAX cannot start: {problem}")
    assert places == [f"  - JAX_PLATFORMS is {platform!r}: unset it, or make it 'cpu'"]
    assert fix.endswith("For simulated devices: JAX_PLATFORMS=cpu, and jaxsync.simulate_devices(8).")


def test_too_few_devices_are_counted() -> None:
    with pytest.raises(DeviceCountError) as caught:
        make_mesh({"data": 8, "model": 2})
    assert (caught.value.asked, caught.value.found, caught.value.simulated) == (16, 8, 8)
    with pytest.raises(DeviceCountError) as caught:
        make_mesh({"data": 8}, devices=jax.devices()[:4])
    assert (caught.value.found, caught.value.simulated) == (4, 0)


@pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": -1}, {"data": True}, {"data": 2.0}])
def test_what_is_no_mesh_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(MeshError):
        make_mesh(axes)
