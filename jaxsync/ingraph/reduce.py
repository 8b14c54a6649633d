"""Packing gradients into buckets, and the only call of a collective on gradients.

All arithmetic that is the same for every gradient (casts, weights, the division by the number of devices,
the finite check) is done on buckets, so that it costs an operation a bucket and not one a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxsync.buckets import Bucket
from jaxsync.ingraph.packed import join, split
from jaxsync.ingraph.shards import Cut, reduce_scatter, spec_cuts, split_parts
from jaxsync.ingraph.transport import is_routed, sum_arrays
from jaxsync.plan import SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What one operand of the all-reduce carries: one leaf as it is, or several, flattened."""

    bucket: Bucket
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


def make_manifest(plan: SyncPlan, leaves: Sequence[jax.Array | None]) -> tuple[Cargo, ...]:
    """How these gradients fill the plan's buckets. Leaves that are None are left out.

    A bucket is split where its leaves cannot be one flat array: they are in different states over a reduce
    axis (varying and unreduced), or sharded over an axis that is not manual here, where flattening would
    move data between devices.
    """
    return tuple(
        Cargo(bucket=bucket, leaves=group, shapes=tuple(_shape(leaves[i]) for i in group))
        for bucket in plan.buckets
        for group in _groups(plan, bucket, leaves)
    )


def _shape(leaf: jax.Array | None) -> tuple[int, ...]:
    return () if leaf is None else leaf.shape


def _groups(plan: SyncPlan, bucket: Bucket, leaves: Sequence[jax.Array | None]) -> list[tuple[int, ...]]:
    groups: dict[object, list[int]] = {}
    for i in bucket.leaves:
        if (leaf := leaves[i]) is not None:
            is_local = leaf.shape == plan.leaves[i].whole_shape
            groups.setdefault(jax.typeof(leaf).manual_axis_type if is_local else i, []).append(i)
    return [tuple(group) for group in groups.values()]


def pack(manifest: Sequence[Cargo], leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """One array a cargo, in its bucket's wire dtype."""
    return [_pack_one(cargo, leaves) for cargo in manifest]


def _pack_one(cargo: Cargo, leaves: Sequence[jax.Array]) -> jax.Array:
    packed: jax.Array = join([leaves[i] for i in cargo.leaves]).astype(cargo.bucket.dtype)
    if jnp.issubdtype(packed.dtype, jnp.complexfloating):
        # XLA ends the process when it simplifies the all-reduce of a complex constant, such as the zero
        # gradient of a parameter that the loss does not use (jaxlib 0.10.2 and 0.12.0). It cannot see through
        # this.
        packed = lax.optimization_barrier(packed)
    return packed


def unpack(
    manifest: Sequence[Cargo],
    packed: Sequence[jax.Array],
    cuts: Sequence[Sequence[Cut]],
    leaves: Sequence[jax.Array],
) -> list[jax.Array]:
    """`leaves` with every packed leaf replaced, by its part if it is cut; what is in no cargo stays."""
    result = list(leaves)
    for cargo, array, own in zip(manifest, packed, cuts, strict=True):
        for cut, part in zip(own, split_parts(array, own), strict=True):
            result[cut.slot[0]] = part
        if own:
            continue
        for i, leaf in zip(cargo.leaves, split(array, cargo.shapes), strict=True):
            result[i] = leaf
    return result


def all_reduce(plan: SyncPlan, manifest: Sequence[Cargo], packed: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums over devices of packed gradients.

    Collectives: one all-reduce for each set of axes and dtype: operands of one call with the same axes and
    dtype leave XLA as one instruction. With `inner_axis` and `wire_dtype`: see `transport.sum_arrays`.
    """
    return _sum(plan, packed, [cargo.bucket.reduce_axes for cargo in manifest])


def all_reduce_with(
    plan: SyncPlan,
    manifest: Sequence[Cargo],
    packed: Sequence[jax.Array],
    rider: jax.Array,
    rider_axes: Sequence[str],
) -> tuple[list[jax.Array], jax.Array]:
    """The sums over devices of packed gradients, and of a small vector that rides along.

    The vector joins a bucket where one is like it, since on CPU one operand more costs as much as a bucket.

    Collectives: those of `all_reduce`, and one more if no gradient has the axes and the dtype of the rider.
    """
    operands, axes_of = list(packed), [cargo.bucket.reduce_axes for cargo in manifest]
    host = _host_of(plan, manifest, packed, rider, rider_axes)
    if host is None:
        *summed, rider = _sum(plan, [*operands, rider], [*axes_of, tuple(rider_axes)], num_exact=1)
        return summed, rider
    operands[host] = jnp.concatenate([packed[host], rider])
    summed = _sum(plan, operands, axes_of)
    summed[host], rider = jnp.split(summed[host], [packed[host].size])
    return summed, rider


def group_cuts(manifest: Sequence[Cargo], cuts: Sequence[Cut]) -> list[tuple[Cut, ...]]:
    """The cuts of what each cargo holds: of all its leaves, or none."""
    cut_of = {cut.slot[0]: cut for cut in cuts}
    return [tuple(cut_of[i] for i in cargo.leaves if i in cut_of) for cargo in manifest]


def scatter(plan: SyncPlan, manifest: Sequence[Cargo], packed: Sequence[jax.Array]) -> list[jax.Array]:
    """Packed gradients; of leaves sharded over data axes, this device's parts of the sums over these.

    Collectives: one reduce-scatter for each array of such leaves.
    """
    cuts = group_cuts(manifest, spec_cuts(plan))
    return [reduce_scatter(array, own) if own else array for array, own in zip(packed, cuts, strict=True)]


def reduce_all(
    plan: SyncPlan,
    manifest: Sequence[Cargo],
    packed: Sequence[jax.Array],
    cuts: Sequence[Sequence[Cut]],
    rider: jax.Array | None = None,
    rider_axes: Sequence[str] = (),
    *,
    is_scattered: bool = False,
) -> tuple[list[jax.Array], jax.Array | None]:
    """The sums over devices of packed gradients (of those with cuts, this device's parts), and of a rider.

    Args:
        plan: The plan.
        manifest: What each array carries.
        packed: The arrays.
        cuts: How each is cut, if it is.
        rider: A small vector to sum along.
        rider_axes: Over which axes.
        is_scattered: Whether arrays whose leaves are sharded over data axes went through `scatter`.

    Collectives: one reduce-scatter for each array with cuts, and one all-reduce of its parts if not all data
    axes are cut; those of `all_reduce_with` for the others.
    """
    found: dict[int, jax.Array] = {}
    for k, own in enumerate(cuts):
        if own:
            is_done = is_scattered and bool(own[0].dims)
            parts = packed[k] if is_done else reduce_scatter(packed[k], own)
            others = tuple(axis for axis in plan.data_axes if axis not in own[0].axes)
            [found[k]] = sum_arrays([parts], others, plan) if others else [parts]
    whole = [k for k, own in enumerate(cuts) if not own]
    cargoes, arrays = [manifest[k] for k in whole], [packed[k] for k in whole]
    if rider is None:
        summed = all_reduce(plan, cargoes, arrays)
    else:
        summed, rider = all_reduce_with(plan, cargoes, arrays, rider, rider_axes)
    found |= dict(zip(whole, summed, strict=True))
    return [found[k] for k in range(len(packed))], rider


def _sum(
    plan: SyncPlan, operands: Sequence[jax.Array], axes_of: Sequence[tuple[str, ...]], num_exact: int = 0
) -> list[jax.Array]:
    """The sums of operands, each over its own axes; the last `num_exact` of them travel as they are."""
    summed = list(operands)
    for axes in dict.fromkeys(axes_of):
        chosen = [k for k, own in enumerate(axes_of) if own == axes]
        exact = sum(k >= len(operands) - num_exact for k in chosen)
        found = sum_arrays([operands[k] for k in chosen], axes, plan, exact)
        for k, value in zip(chosen, found, strict=True):
            summed[k] = value
    return summed


def _host_of(
    plan: SyncPlan,
    manifest: Sequence[Cargo],
    packed: Sequence[jax.Array],
    rider: jax.Array,
    axes: Sequence[str],
) -> int | None:
    """The smallest fused bucket that a rider can join: of its dtype, axes and state."""
    fits = [
        (array.size, k)
        for k, (cargo, array) in enumerate(zip(manifest, packed, strict=True))
        if len(cargo.leaves) > 1
        and not is_routed(array, axes, plan)  # a loss is not rounded
        and cargo.bucket.reduce_axes == tuple(axes)
        and array.dtype == rider.dtype
        and jax.typeof(array).manual_axis_type == jax.typeof(rider).manual_axis_type
    ]
    return min(fits)[1] if fits else None


def scale_before(plan: SyncPlan, manifest: Sequence[Cargo], packed: Sequence[jax.Array]) -> list[jax.Array]:
    """Packed gradients that a sum over all devices cannot overflow by their number alone.

    Only what travels as float16 needs it: the largest float16 is 65,504, a few gradients away.
    """
    scale = 1 / plan.num_replicas
    return [
        array * array.dtype.type(scale) if cargo.bucket.dtype == "float16" else array
        for cargo, array in zip(manifest, packed, strict=True)
    ]


def finish(
    plan: SyncPlan, manifest: Sequence[Cargo], summed: Sequence[jax.Array], divisor: jax.Array | int
) -> list[jax.Array]:
    """Sums over devices divided by `divisor`, in their leaves' own dtype."""
    return [_finish_one(plan, cargo, array, divisor) for cargo, array in zip(manifest, summed, strict=True)]


def _finish_one(plan: SyncPlan, cargo: Cargo, array: jax.Array, divisor: jax.Array | int) -> jax.Array:
    if cargo.bucket.dtype == "float16":  # undoes scale_before
        factor = jnp.asarray(plan.num_replicas / divisor)
        array = array * factor.astype(array.dtype)
    elif not isinstance(divisor, int):
        array = array / divisor.astype(array.dtype)
    elif divisor != 1:
        array = array / array.dtype.type(divisor)
    return array.astype(cargo.bucket.leaf_dtype)


def agree(flag: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Whether `flag` holds on every device along `axes`.

    Collectives: one all-reduce of one element if there are axes, else none.
    """
    return lax.pmin(flag.astype(jnp.int32), tuple(axes)) == 1 if axes else flag


def sum_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of `x` over devices along `axes`.

    Collectives: one all-reduce if there are axes, else none.
    """
    return lax.psum(x, tuple(axes)) if axes else x
