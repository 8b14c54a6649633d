"""How a sum over devices travels: which collectives it is made of, and in which dtype they carry it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxsync.mesh import num_devices, uses_gloo
from jaxsync.plan import SyncPlan


def sum_arrays(
    arrays: Sequence[jax.Array], axes: Sequence[str], plan: SyncPlan, num_exact: int = 0
) -> list[jax.Array]:
    """The sum over devices along `axes` of each array, equal bit by bit on all of them.

    The last `num_exact` arrays are small, and travel as they are.

    Collectives: one all-reduce of all arrays. Of those for which `is_routed`: with `inner_axis` one
    reduce-scatter over it (over gloo one all-to-all), one all-reduce over the other axes and one all-gather
    each; with `wire_dtype` one all-to-all and one all-gather in place of the all-reduce.
    """
    num_free = len(arrays) - num_exact
    routed = [k < num_free and is_routed(x, axes, plan) for k, x in enumerate(arrays)]
    direct = lax.psum([x for x, is_own in zip(arrays, routed, strict=True) if not is_own], tuple(axes))
    rest = iter(direct)
    return [
        _sum_routed(x, axes, plan) if is_own else next(rest) for x, is_own in zip(arrays, routed, strict=True)
    ]


def is_routed(x: jax.Array, axes: Sequence[str], plan: SyncPlan) -> bool:
    """Whether the sum of `x` over `axes` is more than one all-reduce."""
    if jax.typeof(x).manual_axis_type.unreduced:  # JAX has no other collective for these
        return False
    return _is_narrowed(x, plan) or bool(_inner_axes(axes, plan))


def scatter_rows(rows: jax.Array, axes: Sequence[str], plan: SyncPlan) -> jax.Array:
    """This device's row of the sum over devices of a matrix with a row for each device along `axes`.

    Over gloo an all-to-all and a local sum stand for the reduce-scatter; so they do with `wire_dtype`, to sum
    in the dtype of `rows` what travels in another.

    Collectives: one reduce-scatter, or one all-to-all.
    """
    if not _is_narrowed(rows, plan):
        return _scatter_rows(rows, axes, plan)
    received = _widen(_send_rows(_narrow(rows), axes), rows.dtype)
    total: jax.Array = received.sum(axis=0)
    return total


def _scatter_rows(rows: jax.Array, axes: Sequence[str], plan: SyncPlan) -> jax.Array:
    """As `scatter_rows`, in the dtype of `rows` always."""
    # Gloo's own reduce-scatter gives up when a device is more than 30 s late, whatever bound is set, and
    # takes over three times as long for large arrays. The mesh decides and not the axes: in a job of several
    # processes XLA on CPU takes gloo for devices of one process, too, with that limit (0.10.2: a device that
    # came 33 s after the other of its process met a "Read timeout"; an all-to-all waited for it).
    if uses_gloo(plan.mesh):
        total: jax.Array = _send_rows(rows, axes).sum(axis=0)
        return total
    part: jax.Array = lax.psum_scatter(rows, tuple(axes), scatter_dimension=0)
    return part


def _send_rows(rows: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Each device's row for this one."""
    received: jax.Array = lax.all_to_all(rows, tuple(axes), split_axis=0, concat_axis=0)
    return received


def _narrow(x: jax.Array) -> jax.Array:
    # As bits: XLA on CPU would widen what a collective carries in bfloat16 to float32 (0.10.2).
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _widen(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)


def _sum_routed(x: jax.Array, axes: Sequence[str], plan: SyncPlan) -> jax.Array:
    flat = x.ravel()
    if inner := _inner_axes(axes, plan):
        outer = tuple(axis for axis in axes if axis not in inner)
        # Each device of a host sums its own share across hosts, so that a host sends an array once.
        share = _scatter_rows(_rows(flat, inner, plan), inner, plan)
        share = _sum_narrowed(share, outer, plan) if _is_narrowed(share, plan) else lax.psum(share, outer)
        total = _gather(share, inner)
    else:
        total = _sum_narrowed(flat, axes, plan)
    return lax.slice(total, (0,), (flat.size,)).reshape(x.shape)


def _sum_narrowed(flat: jax.Array, axes: Sequence[str], plan: SyncPlan) -> jax.Array:
    """A sum that travels in the wire dtype: rounded where it leaves a device, and added in its own."""
    share = scatter_rows(_rows(flat, axes, plan), axes, plan)
    total = _widen(_gather(_narrow(share), axes), flat.dtype)
    return lax.slice(total, (0,), (flat.size,))


def _rows(flat: jax.Array, axes: Sequence[str], plan: SyncPlan) -> jax.Array:
    return pad_to_rows(flat, num_devices(plan.mesh, axes))


def pad_to_rows(flat: jax.Array, num_rows: int) -> jax.Array:
    """A flat array, padded with zeros, as a matrix with so many rows."""
    return jnp.pad(flat, (0, -flat.size % num_rows)).reshape(num_rows, -(-flat.size // num_rows))


def _gather(share: jax.Array, axes: Sequence[str]) -> jax.Array:
    # Typed as equal on all devices, where there are types.
    is_typed = set(axes) <= set(jax.typeof(share).manual_axis_type.varying)
    whole: jax.Array = lax.all_gather(
        share, tuple(axes), tiled=True, to="invarying" if is_typed else "varying"
    )
    return whole


def _is_narrowed(x: jax.Array, plan: SyncPlan) -> bool:
    return plan.config.wire_dtype is not None and x.dtype == jnp.float32


def _inner_axes(axes: Sequence[str], plan: SyncPlan) -> tuple[str, ...]:
    """The axis inside a host, if the sum is over it and over others."""
    return tuple(axis for axis in axes if axis == plan.config.inner_axis) if len(axes) > 1 else ()
