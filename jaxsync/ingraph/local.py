"""Local gradients: what one device adds to a sync, from its own rows."""

from __future__ import annotations

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
    AxisState,
    axis_state,
    check_typed_communication,
    make_varying,
    typed_axes,
)
from jaxsync.ingraph.gather import gather_leaves, regather
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.shards import spec_cuts
from jaxsync.plan import SyncPlan
from jaxsync.report.text import format_function

LossFn = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one device adds to a sync, still unreduced.

    Attributes:
        manifest: What each packed array carries.
        packed: sum over microbatches of weight * gradient.
        is_scattered: Whether gradients of leaves that are sharded over data axes are this device's parts of
            the sums over those axes, end to end.
        losses: The loss of each microbatch.
        weights: The weight of each microbatch; None stands for ones.
        passed: The gradients of the leaves that pass through, by plan index.
        rebuild: Leaves in plan order -> the tree of gradients.
    """

    manifest: tuple[reduce.Cargo, ...]
    packed: list[jax.Array]
    is_scattered: bool
    losses: jax.Array
    weights: jax.Array | None
    passed: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def local_gradients(
    loss_fn: LossFn, plan: SyncPlan, params: Any, args: Sequence[Any], *, has_aux: bool, weighted: bool
) -> tuple[Local, Any]:
    """The gradients of this device's rows, packed, as one microbatch; and the aux of `loss_fn`.

    Args:
        loss_fn: As for `value_and_grad`.
        plan: The plan.
        params: Whole along the data axes; or, with `reshard_after_forward`, as this device holds them.
        args: Further arguments of `loss_fn`.
        has_aux: As for `value_and_grad`.
        weighted: As for `value_and_grad`.

    Collectives: none; or, with `reshard_after_forward`, two all-gathers and one reduce-scatter for each
    bucket of leaves that are sharded over a data axis.
    """
    regathers = plan.config.reshard_after_forward and bool(spec_cuts(plan))
    held, rebuild = match_tree(params, plan, "params", is_whole=not regathers)
    leaves = gather_leaves(held, plan) if regathers else held
    chosen = [index for index, leaf in enumerate(plan.leaves) if leaf.is_synced]
    own = make_varying([leaves[index] for index in chosen], plan.data_axes)

    def run(values: Sequence[jax.Array]) -> tuple[jax.Array, tuple[Any, Any]]:
        merged = _replaced(leaves, chosen, values)
        returned = loss_fn(rebuild(merged), *args)
        loss, weight, aux = _split(returned, has_aux, weighted, name_loss(loss_fn))
        if plan.config.reduce == "sum":
            _check_own_term(loss, plan, name_loss(loss_fn))
        # A loss that was reduced inside loss_fn is each device's own term of the mean all the same.
        [loss] = make_varying([loss], plan.data_axes)
        return loss, (weight, aux)

    check_typed_communication(run, own, plan)
    loss, backward, (weight, aux) = jax.vjp(run, own, has_aux=True)
    if regathers:
        backward = regather(backward, _replaced(leaves, chosen, own), held, plan, loss)
    [found] = backward(jnp.ones_like(loss))
    passed = _replaced([_no_gradient(value) for value in leaves], chosen, [None] * len(chosen))
    grads = _replaced(passed, chosen, found)
    manifest = reduce.make_manifest(plan, grads)
    packed = reduce.pack(manifest, grads)
    loss = loss.astype(wide_dtype(str(loss.dtype)))
    if weight is not None:
        [weight] = make_varying([jnp.asarray(weight, loss.dtype)], plan.data_axes)
        # What is no weight must not be taken for 0: it makes everything NaN, which is seen.
        weight = jnp.where(weight >= 0, weight, jnp.full((), jnp.nan, weight.dtype))
        packed = [weigh(array, weight) for array in packed]
    packed = reduce.scale_before(plan, manifest, packed)
    local = Local(
        manifest=manifest,
        packed=reduce.scatter(plan, manifest, packed) if regathers else packed,
        is_scattered=regathers,
        losses=loss[None],
        weights=None if weight is None else weight[None],
        passed=passed,
        rebuild=rebuild,
    )
    return local, aux


def _replaced(values: Sequence[Any], indices: Sequence[int], by: Sequence[Any]) -> list[Any]:
    result = list(values)
    for index, value in zip(indices, by, strict=True):
        result[index] = value
    return result


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


def name_loss(loss_fn: LossFn) -> str:
    """What an error calls a loss function: its name and where it is written."""
    return format_function(loss_fn, "loss_fn")


def _split(returned: Any, has_aux: bool, weighted: bool, function: str) -> tuple[jax.Array, Any, Any]:
    aux = None
    loss, weight = returned, None
    if has_aux:
        loss, aux = _pair(loss, "(loss, aux)", function)
    if weighted:
        loss, weight = _pair(loss, "(loss, weight)", function)
    _check_scalar(loss, "a real float scalar loss", function, jnp.floating)
    if weighted:
        _check_scalar(weight, "a real scalar weight", function, jnp.floating, jnp.integer)
    return jnp.asarray(loss), weight, aux


def _check_own_term(loss: jax.Array, plan: SyncPlan, function: str) -> None:
    """Refuses a loss that loss_fn has summed, where the types tell: its sum would count it once a device.

    It is differentiated for parameters that vary, so one that does not was reduced, or is a constant.
    """
    typed = typed_axes(plan.data_axes)
    axes = [axis for axis in typed if axis_state(loss, axis, typed) is AxisState.INVARYING]
    if axes and plan.num_replicas > 1:
        got = f"a loss that is equal along {', '.join(axes)}: it was reduced there already"
        wanted = "this device's own term, since reduce='sum' adds these up: without jax.lax.psum or pmean"
        raise LossError(function=function, got=got, wanted=wanted)


def _pair(value: Any, wanted: str, function: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise LossError(function=function, got=_describe(value), wanted=f"the pair {wanted}")
    return value[0], value[1]


def _check_scalar(value: Any, wanted: str, function: str, *kinds: Any) -> None:
    is_number = isinstance(value, jax.Array | np.ndarray | np.generic | float | int)
    is_kind = is_number and any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)
    if not is_kind or jnp.shape(value) != ():
        raise LossError(function=function, got=_describe(value), wanted=wanted)


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
    static: list[
        tuple[Any, Any, Any, Any]
    ] = []  # the same for each microbatch, and free of the loop's tracers

    def body(sums: list[jax.Array], microbatch: Any) -> tuple[list[jax.Array], Any]:
        local, aux = local_fn(microbatch)
        static.append((local.manifest, local.is_scattered, local.passed, local.rebuild))
        weight = None if local.weights is None else local.weights[0]
        return [a + b for a, b in zip(sums, local.packed, strict=True)], (local.losses[0], weight, aux)

    zeros = [_zeros(x) for x in jax.eval_shape(lambda batch: local_fn(batch)[0].packed, first)]
    packed, (losses, weights, auxes) = lax.scan(body, zeros, microbatches)
    manifest, is_scattered, passed, rebuild = static[-1]
    total = Local(
        manifest=manifest,
        packed=packed,
        is_scattered=is_scattered,
        losses=losses,
        weights=weights,
        passed=passed,
        rebuild=rebuild,
    )
    return total, auxes


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    # A scan's carry keeps its type, so the first sum must vary over the axes its terms vary over.
    zeros = jnp.zeros(x.shape, x.dtype)
    state = getattr(x, "manual_axis_type", None)
    return lax.pcast(zeros, tuple(state.varying), to="varying") if state and state.varying else zeros
