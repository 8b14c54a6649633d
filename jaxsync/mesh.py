"""Meshes: named axes of devices, of which some carry the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxsync.errors import DeviceCountError, MeshError

AnyMesh = Mesh | AbstractMesh


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A device mesh with Auto axes.

    Args:
        axes: Axis name -> size, slowest axis first.
        devices: The devices to use; by default the first of `jax.devices()`.

    Raises:
        MeshError: No axis, or a size that is no positive int.
        DeviceCountError: There are fewer devices than the product of the sizes.

    >>> format_mesh(make_mesh({"data": 4, "model": 2}))
    'data=4, model=2'
    """
    problems = [
        f"axis {name!r} has size {size!r}: wanted an int of 1 or more"
        for name, size in axes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]
    if problems or not axes:
        raise MeshError(mesh=str(dict(axes)), problems=tuple(problems or ["it has no axis"]))
    found = jax.devices() if devices is None else list(devices)
    asked = math.prod(axes.values())
    if asked > len(found):
        platform = found[0].platform if found else "no"
        raise DeviceCountError(asked=asked, found=len(found), platform=f"platform {platform}")
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=found[:asked]
    )


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Axis name -> size, in mesh order."""
    return dict(mesh.shape)


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
        raise MeshError(mesh=format_mesh(mesh), problems=problems)
