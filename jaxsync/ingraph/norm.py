"""The norm of synced gradients, and clipping by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsync.buckets import wide_dtype
from jaxsync.errors import UnboundAxisError
from jaxsync.ingraph import reduce
from jaxsync.ingraph.axes import bound_axes, check_reduced, is_bound
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.packed import is_packed
from jaxsync.ingraph.shards import is_shard
from jaxsync.plan import SyncPlan


def global_norm(grads: Any, plan: SyncPlan) -> jax.Array:
    """The 2-norm of all synced gradients together, the same number on every device.

    Right for any mix of replicated and model-sharded leaves, inside `shard_map` and `pmap` (each device
    holds shards) and outside (global arrays). Leaves that pass through do not count.

    Args:
        grads: Synced gradients: the tree of the plan.
        plan: From `make_plan`.

    Returns:
        A scalar, float32, or float64 if a leaf has 64-bit parts: `sqrt(sum over leaves of sum |g|**2)`.

    Collectives: one all-reduce of one element for each set of model axes that leaves are sharded over.

    Raises:
        NotReducedError: A gradient still varies over a data axis by its type.
        UnboundAxisError: A leaf is a shard of its global shape, and its mesh axis is not bound here.
        TreeMismatchError: The tree, a shape or a dtype is not the plan's.

    >>> import jax.numpy as jnp, jaxsync
    >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    >>> plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    >>> float(jaxsync.global_norm(grads, plan))
    5.0
    """
    has_64_bit = any(leaf.dtype in ("float64", "complex128") for leaf in plan.leaves if leaf.is_synced)
    dtype = jnp.float64 if has_64_bit else jnp.float32
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for axes, array in _arrays(grads, plan):
        wide = array.astype(wide_dtype(str(array.dtype)))  # the squares of float16 overflow at 256
        squares.setdefault(axes, []).append(jnp.sum(jnp.real(wide * jnp.conj(wide))).astype(dtype))
    if not squares:
        return jnp.zeros((), jnp.float32)
    totals = [reduce.sum_over(sum(parts[1:], parts[0]), axes) for axes, parts in squares.items()]
    return jnp.sqrt(sum(totals[1:], totals[0]))


def _arrays(grads: Any, plan: SyncPlan) -> list[tuple[tuple[str, ...], jax.Array]]:
    """Gradients in few arrays, each with the mesh axes it is a shard over."""
    if is_kept(grads):  # by a train step or a sharded optimizer, which have checked it: global arrays
        return [((), array) for array in jax.tree.leaves(grads)]
    leaves, _ = match_tree(grads, plan, "grads")
    check_reduced(plan.leaves, leaves, "global_norm")
    manifest = reduce.make_manifest(plan, leaves)
    return [
        (_shard_axes(plan, cargo.leaves[0], cargo.shapes[0]), array)
        for cargo, array in zip(manifest, reduce.pack(manifest, leaves), strict=True)
    ]


def _shard_axes(plan: SyncPlan, index: int, shape: tuple[int, ...]) -> tuple[str, ...]:
    leaf = plan.leaves[index]
    if shape == leaf.shape and not any(is_bound(axis) for axis in leaf.spec_axes):
        return ()  # a global array
    unbound = tuple(axis for axis in leaf.spec_axes if not is_bound(axis))
    if unbound and shape == leaf.local_shape:
        raise UnboundAxisError(function="global_norm", axes=unbound, bound=bound_axes())
    return tuple(axis for axis in leaf.spec_axes if axis not in unbound)


def clip(grads: Any, max_norm: float, plan: SyncPlan) -> Any:
    """Synced gradients scaled down together so that their global norm is at most `max_norm`."""
    norm = global_norm(grads, plan)
    factor = jnp.where(norm > max_norm, max_norm / norm, jnp.ones((), norm.dtype))
    if is_kept(grads):
        return jax.tree.map(lambda array: _scale(array, factor), grads)
    leaves, rebuild = match_tree(grads, plan, "grads")
    return rebuild(
        [
            _scale(value, factor) if leaf.is_synced else value
            for leaf, value in zip(plan.leaves, leaves, strict=True)
        ]
    )


def _scale(value: jax.Array, factor: jax.Array) -> jax.Array:
    # In wide floats: a factor below 6e-8 would be 0 as a float16.
    wide = value.astype(wide_dtype(str(value.dtype)))
    return (wide * factor.astype(wide.dtype)).astype(value.dtype)


def is_kept(grads: Any) -> bool:
    """Whether gradients are packed, or parts of them cut."""
    found = jax.tree.leaves(grads, is_leaf=lambda x: is_packed(x) or is_shard(x))
    return any(is_packed(x) or is_shard(x) for x in found)
