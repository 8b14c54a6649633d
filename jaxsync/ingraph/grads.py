"""Synced gradients: of a loss function, or of gradients that are there already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsync.buckets import wide_dtype
from jaxsync.errors import LossError
from jaxsync.ingraph import reduce
from jaxsync.ingraph.axes import (
    check_axes_bound,
    check_not_declared_synced,
    check_not_reduced,
    check_typed_communication,
    make_varying,
)
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.packed import Layout, join
from jaxsync.ingraph.shards import Cut, all_gather, spec_cuts, split_parts
from jaxsync.plan import SyncPlan

LossFn = Callable[..., Any]


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
    summed, _ = reduce.reduce_all(manifest, packed, cuts)
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

    def fn(params: Any, *args: Any) -> tuple[Any, Any]:
        check_axes_bound(plan, "value_and_grad")
        whole = gather_params(params, plan)
        local, aux = local_gradients(loss_fn, plan, whole, args, has_aux=has_aux, weighted=weighted)
        synced = sync_local(local, plan)
        return ((synced.loss, aux) if has_aux else synced.loss), local.rebuild(synced.leaves)

    return fn


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one device adds to a sync, still unreduced.

    Attributes:
        manifest: What each packed array carries.
        packed: sum over microbatches of weight * gradient.
        losses: The loss of each microbatch.
        weights: The weight of each microbatch; None stands for ones.
        passed: The gradients of the leaves that pass through, by plan index.
        rebuild: Leaves in plan order -> the tree of gradients.
    """

    manifest: tuple[reduce.Cargo, ...]
    packed: list[jax.Array]
    losses: jax.Array
    weights: jax.Array | None
    passed: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


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


def gather_params(params: Any, plan: SyncPlan) -> Any:
    """Parameters that are whole along the data axes, from those that each device holds.

    Collectives: one all-gather for each bucket of leaves that are sharded over a data axis.
    """
    cuts = spec_cuts(plan)
    if not cuts:
        return params
    leaves, rebuild = match_tree(params, plan, "params")
    cut_of = {cut.slot[0]: cut for cut in cuts}
    for bucket in plan.buckets:
        own = [cut_of[i] for i in bucket.leaves if i in cut_of]
        if own:
            for i, whole in zip(
                bucket.leaves, all_gather([leaves[i] for i in bucket.leaves], own), strict=True
            ):
                leaves[i] = whole
    return rebuild(leaves)


def local_gradients(
    loss_fn: LossFn, plan: SyncPlan, params: Any, args: Sequence[Any], *, has_aux: bool, weighted: bool
) -> tuple[Local, Any]:
    """The gradients of this device's rows, packed, as one microbatch; and the aux of `loss_fn`."""
    leaves, rebuild = match_tree(params, plan, "params", is_whole=True)
    chosen = [index for index, leaf in enumerate(plan.leaves) if leaf.is_synced]
    own = make_varying([leaves[index] for index in chosen], plan.data_axes)

    def run(values: Sequence[jax.Array]) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        merged = list(leaves)
        for index, value in zip(chosen, values, strict=True):
            merged[index] = value
        loss, weight, aux = _split(loss_fn(rebuild(merged), *args), has_aux, weighted)
        # A loss that was reduced inside loss_fn is each device's own term of the mean all the same.
        [loss] = make_varying([loss], plan.data_axes)
        return loss, (loss, weight, aux)

    check_typed_communication(run, own, plan)
    found, (loss, weight, aux) = jax.grad(run, has_aux=True)(own)
    grads = [_no_gradient(value) for value in leaves]
    passed = list(grads)
    for index, value in zip(chosen, found, strict=True):
        grads[index], passed[index] = value, None
    manifest = reduce.make_manifest(plan, grads)
    packed = reduce.pack(manifest, grads)
    loss = loss.astype(wide_dtype(str(loss.dtype)))
    if weight is not None:
        [weight] = make_varying([jnp.asarray(weight, loss.dtype)], plan.data_axes)
        # What is no weight must not be taken for 0: it makes everything NaN, which is seen.
        weight = jnp.where(weight >= 0, weight, jnp.full((), jnp.nan, weight.dtype))
        packed = [weigh(array, weight) for array in packed]
    local = Local(
        manifest=manifest,
        packed=packed,
        losses=loss[None],
        weights=None if weight is None else weight[None],
        passed=passed,
        rebuild=rebuild,
    )
    return local, aux


def weigh(array: jax.Array, weight: jax.Array | None) -> jax.Array:
    """`weight * array`, and 0 where the weight is 0 whatever the array holds."""
    if weight is None:
        return array
    # Not a product alone: 0 * nan is nan, and a device without rows often has 0 / 0 for a loss.
    return jnp.where(weight == 0, jnp.zeros((), array.dtype), array * weight.astype(array.dtype))


def _no_gradient(value: Any) -> Any:
    if value is None:
        return None
    return np.zeros(
        value.shape, value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else jax.dtypes.float0
    )


def _split(returned: Any, has_aux: bool, weighted: bool) -> tuple[jax.Array, Any, Any]:
    aux = None
    loss, weight = returned, None
    if has_aux:
        loss, aux = _pair(loss, "(loss, aux)")
    if weighted:
        loss, weight = _pair(loss, "(loss, weight)")
    _check_scalar(loss, "a real float scalar loss", jnp.floating)
    if weighted:
        _check_scalar(weight, "a real scalar weight", jnp.floating, jnp.integer)
    return jnp.asarray(loss), weight, aux


def _pair(value: Any, wanted: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise LossError(got=_describe(value), wanted=f"the pair {wanted}")
    return value[0], value[1]


def _check_scalar(value: Any, wanted: str, *kinds: Any) -> None:
    is_number = isinstance(value, jax.Array | np.ndarray | np.generic | float | int)
    is_kind = is_number and any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)
    if not is_kind or jnp.shape(value) != ():
        raise LossError(got=_describe(value), wanted=wanted)


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def accumulate(
    local_fn: Callable[[Any], tuple[Local, Any]], microbatches: Any, num_microbatches: int
) -> tuple[Local, Any]:
    """`local_fn` over each microbatch in turn, summed. No collective inside the loop.

    Args:
        local_fn: microbatch -> (`Local`, aux).
        microbatches: A tree whose leaves have `num_microbatches` as leading dim.
        num_microbatches: 1 or more; 1 makes no loop.

    Returns:
        The sum, and aux with the microbatches as leading dim.
    """
    first = jax.tree.map(lambda x: x[0], microbatches)
    if num_microbatches == 1:
        local, aux = local_fn(first)
        return local, jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
    static: list[tuple[Any, Any, Any]] = []  # the same for each microbatch, and free of the loop's tracers

    def body(sums: list[jax.Array], microbatch: Any) -> tuple[list[jax.Array], Any]:
        local, aux = local_fn(microbatch)
        static.append((local.manifest, local.passed, local.rebuild))
        weight = None if local.weights is None else local.weights[0]
        return [a + b for a, b in zip(sums, local.packed, strict=True)], (local.losses[0], weight, aux)

    zeros = [_zeros(x) for x in jax.eval_shape(lambda batch: local_fn(batch)[0].packed, first)]
    packed, (losses, weights, auxes) = lax.scan(body, zeros, microbatches)
    manifest, passed, rebuild = static[-1]
    total = Local(
        manifest=manifest, packed=packed, losses=losses, weights=weights, passed=passed, rebuild=rebuild
    )
    return total, auxes


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    # A scan's carry keeps its type, so the first sum must vary over the axes its terms vary over.
    zeros = jnp.zeros(x.shape, x.dtype)
    state = getattr(x, "manual_axis_type", None)
    return lax.pcast(zeros, tuple(state.varying), to="varying") if state and state.varying else zeros


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
    packed = reduce.scale_before(plan, local.manifest, local.packed)
    groups = reduce.group_cuts(local.manifest, (*spec_cuts(plan), *cuts))
    summed, total = reduce.reduce_all(local.manifest, packed, groups, rider, plan.data_axes)
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
