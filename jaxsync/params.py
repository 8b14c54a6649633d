"""A parameter pytree as a table: path, shape, dtype, spec and reduce axes of every leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsync.errors import RegistrationError, SpecError
from jaxsync.mesh import AnyMesh, axis_sizes
from jaxsync.prefix import is_spec, misplaced_specs

Kind = Literal["float", "complex", "integer", "bool", "key", "float0", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf of a registered tree.

    Attributes:
        path: `jax.tree_util.keystr` of its key path; its identity.
        shape: Its global shape.
        local_shape: The shape one device holds.
        whole_shape: The shape one device holds of it gathered over the data axes; that of its local gradient.
        dtype: The name of its dtype.
        kind: `"float"` and `"complex"` leaves are synced; all others pass through untouched.
        spec: How it is sharded over the mesh.
        reduce_axes: The data axes its gradient is summed over.
        scatter_dims: The dims that are sharded over data axes, each with these axes: its gradient is
            reduce-scattered along them.
    """

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    dtype: str
    kind: Kind
    spec: PartitionSpec
    reduce_axes: tuple[str, ...]
    scatter_dims: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @property
    def scatter_axes(self) -> tuple[str, ...]:
        """The data axes it is sharded over, in the order of its dims."""
        return tuple(axis for _, axes in self.scatter_dims for axis in axes)

    @property
    def is_synced(self) -> bool:
        """Whether the gradient of this leaf is reduced."""
        return self.kind in ("float", "complex")

    @property
    def spec_axes(self) -> tuple[str, ...]:
        """The mesh axes this leaf is sharded over, in the order of its dims."""
        return spec_axes(self.spec)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis a spec names, in the order of the dims.

    >>> spec_axes(PartitionSpec("model", None, ("x", "y")))
    ('model', 'x', 'y')
    """
    return tuple(axis for entry in spec for axis in _entry_axes(entry))


def _entry_axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def leaf_kind(shape: Sequence[int], dtype: Any) -> Kind:
    """Which rule of sync applies to an array of this shape and dtype."""
    if dtype == jax.dtypes.float0:
        return "float0"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return "bool" if dtype == np.bool_ else "integer"
    if math.prod(shape) == 0:
        return "empty"
    return "complex" if jnp.issubdtype(dtype, jnp.complexfloating) else "float"


def make_leaves(
    params: Any, mesh: AnyMesh, specs: Any, data_axes: Sequence[str]
) -> tuple[tuple[Leaf, ...], jax.tree_util.PyTreeDef]:
    """The table of a parameter tree, and its treedef.

    Raises:
        RegistrationError: A leaf is no array.
        SpecError: A spec does not fit its leaf, the mesh, or the tree.
    """
    try:
        with_path, treedef = jax.tree_util.tree_flatten_with_path(params)
    except ValueError as error:  # a dict with keys that have no order
        raise RegistrationError(leaves=(("", f"tree that JAX cannot flatten: {error}"),)) from error
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in with_path]
    no_arrays = [(path, _describe(leaf)) for path, leaf in named if not _is_array(leaf)]
    if no_arrays:
        raise RegistrationError(leaves=tuple(no_arrays))
    sizes = axis_sizes(mesh)
    leaf_specs = _leaf_specs(params, named, specs, mesh)
    bad = [
        (path, str(tuple(leaf.shape)), str(spec), reason)
        for (path, leaf), spec in zip(named, leaf_specs, strict=True)
        if (reason := _spec_problem(leaf, spec, sizes, data_axes))
    ]
    if bad:
        raise SpecError(leaves=tuple(bad))
    leaves = [
        _make_leaf(path, leaf, spec, sizes, data_axes)
        for (path, leaf), spec in zip(with_path, leaf_specs, strict=True)
    ]
    return tuple(leaves), treedef


def _is_array(leaf: Any) -> bool:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return False
    dtype = leaf.dtype
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    # A NumPy array may hold objects, strings, dates, structs, 128-bit floats or bytes in another order.
    is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > (16 if dtype.kind == "c" else 8)
    return bool(is_number and dtype.isnative and not is_wide)


def _describe(leaf: Any) -> str:
    kind = type(leaf).__name__
    return f"{kind} of {leaf.dtype}" if hasattr(leaf, "dtype") else kind


def canonical_dtype(array: Any) -> str:
    """The name of the dtype an array has on a device: without x64, NumPy's 64 bits become 32."""
    if isinstance(array, jax.Array):
        return str(array.dtype)
    return str(jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True))


def _make_leaf(
    path: tuple[Any, ...], array: Any, spec: PartitionSpec, sizes: Mapping[str, int], data_axes: Sequence[str]
) -> Leaf:
    shape = tuple(array.shape)
    model_axes = [axis for axis in spec_axes(spec) if axis not in data_axes]
    scatter_dims = [
        (dim, tuple(axis for axis in _entry_axes(entry) if axis in data_axes))
        for dim, entry in enumerate(spec)
        if set(_entry_axes(entry)) & set(data_axes)
    ]
    return Leaf(
        path=jax.tree_util.keystr(path),
        shape=shape,
        local_shape=local_shape(shape, spec, sizes),
        whole_shape=local_shape(shape, spec, sizes, model_axes),
        dtype=canonical_dtype(array),
        kind=leaf_kind(shape, array.dtype),
        spec=spec,
        reduce_axes=tuple(axis for axis in data_axes if axis not in spec_axes(spec)),
        scatter_dims=tuple(scatter_dims),
    )


def local_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int], axes: Sequence[str] | None = None
) -> tuple[int, ...]:
    """The shape of one shard; with `axes`, of a shard over those axes alone.

    >>> local_shape((8, 6), PartitionSpec("model"), {"data": 4, "model": 2})
    (4, 6)
    """
    factors = [
        math.prod(sizes[axis] for axis in _entry_axes(entry) if axes is None or axis in axes)
        for entry in spec
    ]
    factors += [1] * (len(shape) - len(factors))
    return tuple(dim // factor for dim, factor in zip(shape, factors, strict=True))


def _leaf_specs(
    params: Any, named: Sequence[tuple[str, Any]], specs: Any, mesh: AnyMesh
) -> list[PartitionSpec]:
    """One spec a leaf: from the prefix tree `specs`, or else as the arrays are placed on this mesh."""
    if specs is None:
        return [_placed_spec(leaf, mesh) for _, leaf in named]

    try:
        full = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise SpecError(leaves=misplaced_specs(specs, params)) from error
    flat = jax.tree.leaves(full, is_leaf=is_spec)
    if len(flat) != len(named):  # None leaves of params broadcast a spec of their own
        flat = _drop_none_leaves(full, params)
    wrong = [
        (path, "", repr(spec), "wanted a PartitionSpec")
        for (path, _), spec in zip(named, flat, strict=True)
        if not is_spec(spec)
    ]
    if wrong:
        raise SpecError(leaves=tuple(wrong))
    return [PartitionSpec() if spec is None else spec for spec in flat]


def _drop_none_leaves(full: Any, params: Any) -> list[Any]:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: node is None)
    flat = jax.tree.leaves(full, is_leaf=is_spec)
    return [spec for spec, leaf in zip(flat, leaves, strict=True) if leaf is not None]


def _placed_spec(leaf: Any, mesh: AnyMesh) -> PartitionSpec:
    # A tracer has no placement to read; what the caller sees of it is a whole array.
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return sharding.spec
    return PartitionSpec()


def _spec_problem(
    array: Any, spec: PartitionSpec, sizes: Mapping[str, int], data_axes: Sequence[str]
) -> str | None:
    shape = tuple(array.shape)
    if spec.unreduced or spec.reduced:
        return "unreduced and reduced axes are for gradients, not for parameters"
    if len(spec) > len(shape):
        return f"the spec has {len(spec)} entries for {len(shape)} dims"
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        return "UNCONSTRAINED leaves the sharding open"
    odd = [entry for entry in spec if not (entry is None or isinstance(entry, str | tuple))]
    if odd:
        return f"{odd[0]!r} is no axis name"
    axes = spec_axes(spec)
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        return f"the mesh has no axis {unknown[0]!r}"
    if len(set(axes)) != len(axes):
        return "an axis is used twice"
    if set(axes) & set(data_axes) and leaf_kind(shape, array.dtype) not in ("float", "complex"):
        return "only float and complex leaves, which have gradients, can be sharded over a data axis"
    for entry in spec:
        is_data = [axis in data_axes for axis in _entry_axes(entry)]
        if is_data != sorted(is_data):  # gathered over the data axes, a shard would not be contiguous
            return f"{entry!r} must have its data axes after the others"
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        factor = math.prod(sizes[axis] for axis in _entry_axes(entry))
        if size % factor:
            return f"dim {dim} of size {size} does not divide over {factor} devices"
    return None
