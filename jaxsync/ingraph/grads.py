"""Synced gradients: of a loss function, or of gradients that are there already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.arguments import check_flags
from jaxsync.buckets import wide_dtype
from jaxsync.ingraph import reduce
from jaxsync.ingraph.axes import check_axes_bound, check_not_declared_synced, check_not_reduced
from jaxsync.ingraph.gather import gather_params
from jaxsync.ingraph.local import Local, LossFn, local_gradients, weigh
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.packed import Layout, join
from jaxsync.ingraph.shards import Cut, spec_cuts, split_parts
from jaxsync.plan import SyncPlan


def sync_gradients(grads: Any, plan: SyncPlan) -> Any:
    """Local gradients -> gradients reduced over the plan's data axes, by bucket.

    Call it inside `shard_map` or `pmap`, once, on gradients of this device's own rows. Float and complex
    leaves are reduced; all others pass through untouched. Where values carry no types (`pmap`, `vmap`,
    `check_vma=False`) gradients are taken for local, as `pmap` always did: there a second sync cannot be
    seen.

    Args:
        grads: The tree the plan was made for, with each leaf's local shape and registered dtype.
        plan: From `make_plan`.

    Returns:
        The same structure, shapes and dtypes; equal on all devices along the data axes.

    Collectives: `plan.num_all_reduces` all-reduces.

    Raises:
        AlreadyReducedError: A gradient is the same on all devices by its type: it was summed before.
        TreeMismatchError: The tree, a shape or a dtype is not the plan's.
        UnboundAxisError: A data axis is not bound here.
        MeshError: A data axis has another size here.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> plan = jaxsync.make_plan({"w": jnp.zeros(())}, jaxsync.make_mesh({"data": 4}))
    >>> sync = jax.vmap(lambda g: jaxsync.sync_gradients({"w": g}, plan), axis_name="data")
    >>> sync(jnp.arange(4.0))["w"]
    Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    check_not_declared_synced(plan)
    check_axes_bound(plan, "sync_gradients")
    leaves, rebuild = match_tree(grads, plan, "grads", is_whole=True)
    check_not_reduced(plan.leaves, leaves)
    return rebuild(reduce_leaves(plan, leaves))


def reduce_leaves(plan: SyncPlan, leaves: Sequence[Any]) -> list[Any]:
    """Local gradients in plan order, reduced; those that are None stay None.

    Collectives: one all-reduce for each dtype and set of axes among them.
    """
    manifest = reduce.make_manifest(plan, leaves)
    packed = reduce.scale_before(plan, manifest, reduce.pack(manifest, leaves))
    cuts = reduce.group_cuts(manifest, spec_cuts(plan))
    summed, _ = reduce.reduce_all(plan, manifest, packed, cuts)
    divisor = plan.num_replicas if plan.config.reduce == "mean" else 1
    finished = reduce.finish(plan, manifest, summed, divisor)
    return reduce.unpack(manifest, finished, cuts, [_passed(value) for value in leaves])


def _passed(value: Any) -> Any:
    # An empty array has nothing to reduce; but its type may say varying, and out_specs would refuse it.
    return np.zeros(value.shape, value.dtype) if getattr(value, "size", None) == 0 else value


def value_and_grad(
    loss_fn: LossFn, plan: SyncPlan, has_aux: bool = False, weighted: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the synced loss and the synced gradients of `loss_fn`.

    The result is the gradient of the mean (or sum, as the config says) over devices of what `loss_fn`
    returns on each: the same number under `shard_map` with and without `check_vma`, and under `pmap`.

    Args:
        loss_fn: `loss_fn(params, *args)` -> the mean loss over this device's rows, a real scalar.
            `weighted=True`: `(loss, weight)` with a weight >= 0, such as the number of real rows; the result
            is then `sum(weight * loss) / sum(weight)` and its gradient (with `reduce="sum"`: undivided). A
            device of weight 0 contributes nothing, even NaN; a negative weight makes everything NaN. The
            weight is a constant to the gradient. `has_aux=True`: `(loss, aux)`, or
            `((loss, weight), aux)`.
        plan: From `make_plan`.
        has_aux: Whether `loss_fn` returns auxiliary data. It comes back as it is, each device's own.
        weighted: Whether `loss_fn` returns a weight.

    Returns:
        `fn(params, *args) -> (loss, grads)`, or `((loss, aux), grads)`. Leaves that pass through have
        float0 gradients, as in `jax.grad(allow_int=True)`.

    Collectives: `plan.num_all_reduces` all-reduces, which the loss joins if one of them is of its dtype
    (float32 for losses of lower precision); else one more.

    Raises:
        ArgumentError: `has_aux` or `weighted` is no bool.
        LossError: `loss_fn` returns something else.
        UncheckedModelError: `loss_fn` communicates over a model axis without `check_vma`.
        TreeMismatchError: `params` is not the tree of the plan.
        UnboundAxisError: A data axis is not bound here.
        MeshError: A data axis has another size here.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> plan = jaxsync.make_plan({"w": jnp.zeros(())}, jaxsync.make_mesh({"data": 4}))
    >>> step = jaxsync.value_and_grad(lambda params, x: params["w"] * x, plan)
    >>> run = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    >>> loss, grads = run({"w": jnp.float32(2)}, jnp.arange(4.0))
    >>> float(loss[0]), float(grads["w"][0])
    (3.0, 1.5)
    """
    check_flags("value_and_grad", has_aux=has_aux, weighted=weighted)

    def fn(params: Any, *args: Any) -> tuple[Any, Any]:
        check_axes_bound(plan, "value_and_grad")
        local, aux = local_gradients(
            loss_fn, plan, gather_params(params, plan), args, has_aux=has_aux, weighted=weighted
        )
        synced = sync_local(local, plan)
        return ((synced.loss, aux) if has_aux else synced.loss), local.rebuild(synced.leaves)

    return fn


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The result of a sync, equal on all devices along the data axes.

    Attributes:
        loss: The loss, reduced as the gradients are.
        manifest: What each array carries.
        arrays: The gradients as they travelled, one array a cargo.
        passed: What stands for the leaves that pass through, in plan order.
        cuts: How each array is cut, if it is: then it holds this device's parts, end to end.
        means: The mean over rows of each extra value that rode along.
    """

    loss: jax.Array
    manifest: tuple[reduce.Cargo, ...]
    arrays: list[jax.Array]
    passed: list[Any]
    cuts: list[tuple[Cut, ...]]
    means: list[jax.Array]

    @property
    def leaves(self) -> list[Any]:
        """The gradients in plan order; of a leaf that is cut, this device's part."""
        return reduce.unpack(self.manifest, self.arrays, self.cuts, self.passed)

    def packed(self, layout: Layout) -> tuple[Any, ...]:
        """The gradients as the arrays of a layout, or parts of them; if possible, as they travelled."""
        arrays: dict[tuple[int, ...], Any] = {}
        for cargo, array, cuts in zip(self.manifest, self.arrays, self.cuts, strict=True):
            arrays[cargo.leaves] = array
            arrays |= {cut.slot: part for cut, part in zip(cuts, split_parts(array, cuts), strict=True)}
        if any(slot not in arrays for slot in layout.slots):
            leaves = self.leaves
            arrays = {slot: join([leaves[i] for i in slot]) for slot in layout.slots} | arrays
        return tuple(arrays[slot] for slot in layout.slots)


def sync_local(
    local: Local, plan: SyncPlan, extras: Sequence[jax.Array] = (), cuts: Sequence[Cut] = ()
) -> Synced:
    """The sync of what every device adds.

    Args:
        local: From `local_gradients` or `accumulate`.
        plan: The plan.
        extras: Real float arrays with the microbatches as leading dim, whose mean over all rows is wanted.
        cuts: What of the gradients each device wants only its part of: all leaves of a bucket, or none.

    Collectives: one reduce-scatter for each bucket that is cut, and `plan.num_all_reduces` all-reduces for
    the others, which the scalars join if one is of their dtype.
    """
    wide = [value.astype(wide_dtype(str(value.dtype))) for value in extras]
    parts = [local.losses, *wide] if local.weights is None else [local.losses, local.weights, *wide]
    weights = [None if part is local.weights else local.weights for part in parts]
    riders = [_sum_rows(part, weight) for part, weight in zip(parts, weights, strict=True)]
    dtype = max((value.dtype for value in riders), key=lambda dtype: dtype.itemsize)
    rider = jnp.concatenate([value.ravel().astype(dtype) for value in riders])
    groups = reduce.group_cuts(local.manifest, (*spec_cuts(plan), *cuts))
    summed, total = reduce.reduce_all(
        plan, local.manifest, local.packed, groups, rider, plan.data_axes, is_scattered=local.is_scattered
    )
    rider = rider if total is None else total
    total_weight = _total_weight(local, plan, rider)
    is_mean = plan.config.reduce == "mean"
    divisor = total_weight if is_mean else len(local.losses) if local.weights is None else 1
    arrays = reduce.finish(plan, local.manifest, summed, divisor)
    means, offset = [], 1 if local.weights is None else 2
    for value in extras:
        size = math.prod(value.shape[1:])
        mean = rider[offset : offset + size].reshape(value.shape[1:]) / total_weight
        means.append(mean.astype(value.dtype))
        offset += size
    return Synced(
        loss=rider[0] / divisor,
        manifest=local.manifest,
        arrays=arrays,
        passed=local.passed,
        cuts=groups,
        means=means,
    )


def _sum_rows(values: jax.Array, weights: jax.Array | None) -> jax.Array:
    if weights is None:
        return values.sum(axis=0)
    shape = (-1,) + (1,) * (values.ndim - 1)
    return weigh(values, weights.reshape(shape)).sum(axis=0)


def _total_weight(local: Local, plan: SyncPlan, rider: jax.Array) -> jax.Array | int:
    if local.weights is None:
        return local.losses.shape[0] * plan.num_replicas
    return jnp.where(rider[1] == 0, jnp.ones((), rider.dtype), rider[1])  # no row anywhere: 0, not 0 / 0


def is_finite(synced: Synced, plan: SyncPlan) -> jax.Array:
    """Whether the loss and all synced gradients are finite: one flag, the same on every device.

    Collectives: one all-reduce of one element if a leaf is sharded or a gradient is cut, else none: synced
    gradients are equal on all devices, so each finds the same.
    """
    flag = jnp.isfinite(synced.loss)
    for array in synced.arrays:
        # 0 for finite values, else NaN: as exact as isfinite(array).all(), in half the time on CPU and a
        # third of the time to compile, since XLA cuts a reduction of bools into several loops.
        flag &= jnp.isfinite(jnp.sum(array * jnp.zeros((), array.dtype)))
    used = {axis for leaf in plan.leaves if leaf.is_synced for axis in leaf.spec_axes}
    used |= {axis for own in synced.cuts for cut in own for axis in cut.axes}
    return reduce.agree(flag, [axis for axis in plan.mesh.axis_names if axis in used])
