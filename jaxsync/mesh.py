"""Meshes: named axes of devices, of which some carry the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxsync.devices import all_devices, num_simulated
from jaxsync.errors import ArgumentError, DeviceCountError, MeshError

AnyMesh = Mesh | AbstractMesh


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A device mesh with Auto axes.

    Args:
        axes: Axis name -> size, slowest axis first.
        devices: The devices to use; by default the first of `jax.devices()`.

    Raises:
        ArgumentError: `axes` is no mapping.
        MeshError: No axis, a size that is no positive int, or a device that is given twice.
        DeviceCountError: There are fewer devices than the product of the sizes; or JAX cannot start.

    >>> format_mesh(make_mesh({"data": 4, "model": 2}))
    'data=4, model=2'
    """
    if not isinstance(axes, Mapping):
        wanted = 'a mapping of axis names to sizes, such as {"data": 8}'
        raise ArgumentError(function="make_mesh", argument="axes", got=repr(axes), wanted=wanted)
    problems = [
        f"axis {name!r} has size {size!r}: wanted an int of 1 or more"
        for name, size in axes.items()
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
    ]
    if problems or not axes:
        raise MeshError(mesh=str(dict(axes)), problems=tuple(problems or ["it has no axis"]))
    sizes = tuple(int(size) for size in axes.values())
    asked = math.prod(sizes)
    found = all_devices(asked) if devices is None else list(devices)
    if len(set(found)) < len(found):
        raise MeshError(mesh=str(dict(axes)), problems=("a device is given twice",))
    if asked > len(found):
        platform = found[0].platform if found else "no"
        simulated = num_simulated() if devices is None else 0
        raise DeviceCountError(
            asked=asked, found=len(found), platform=f"platform {platform}", simulated=simulated
        )
    return jax.make_mesh(sizes, tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=found[:asked])


def flatten_mesh(mesh: AnyMesh) -> tuple[Any, ...]:
    """What a mesh is, without its devices, which no pickle can hold: `unflatten_mesh` makes it again.

    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> unflatten_mesh(*flatten_mesh(mesh)) == mesh
    True
    """
    if not isinstance(mesh, Mesh):
        return (mesh,)
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    return ids, tuple(mesh.axis_names), tuple(mesh.axis_types)


def unflatten_mesh(ids: Any, *axes: Any) -> AnyMesh:
    """The mesh of what `flatten_mesh` returned, on the devices of this process's JAX with the same numbers.

    Raises:
        DeviceCountError: JAX has not all of them here; or cannot start.
    """
    if isinstance(ids, AbstractMesh):
        return ids
    found = {device.id: device for device in all_devices(ids.size)}
    if missing := set(ids.flat) - found.keys():
        problem = f"it has no device of number {min(missing)}"
        platform = f"platform {next(iter(found.values())).platform}; {problem}"
        raise DeviceCountError(asked=ids.size, found=len(found), platform=platform, simulated=num_simulated())
    names, types = axes
    return Mesh(np.vectorize(found.get, otypes=[object])(ids), names, axis_types=types)


def uses_gloo(mesh: AnyMesh) -> bool:
    """Whether collectives over the mesh go through gloo: CPU devices of several processes."""
    if not isinstance(mesh, Mesh):
        return False
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Axis name -> size, in mesh order."""
    return dict(mesh.shape)


def num_devices(mesh: AnyMesh, axes: Sequence[str]) -> int:
    """How many devices lie along these axes: the product of their sizes."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for axis in axes)


def format_mesh(mesh: AnyMesh) -> str:
    """The axes and sizes of a mesh, as `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in axis_sizes(mesh).items())


def check_axes(mesh: AnyMesh, axes: Sequence[str]) -> None:
    """Refuses data axes that the mesh does not have.

    Raises:
        MeshError: Names each axis that is missing.
    """
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        problems = tuple(f"SyncConfig.axis names {axis!r}, which the mesh does not have" for axis in missing)
        names = tuple(map(str, mesh.axis_names))
        raise MeshError(mesh=format_mesh(mesh), problems=problems, axes=names, missing=tuple(missing))
