"""The factor check: gradients of many devices against those of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxsync.errors import ArgumentError, GradientMismatchError, ReplicaMismatchError, TooFewDevicesError
from jaxsync.fork import check_not_forked
from jaxsync.host.launcher import check_not_deleted
from jaxsync.ingraph.sharded import ShardedOptimizer, shard_optimizer
from jaxsync.mesh import axis_sizes
from jaxsync.placement import check_replicas_equal
from jaxsync.step import TrainStep
from jaxsync.testing.comparison import Values, common_ratio, describe_difference
from jaxsync.testing.truth import SINGLE, SingleDevice, by_path, eps_of, on_host

_MAX_RATIOS = 8


def assert_matches_single_device(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    step: TrainStep | Callable[[Any, Any], Any],
    *,
    then: Callable[[Any], Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    min_devices: int = 2,
) -> None:
    """Asserts that `step` computes the gradients (and the loss) that one device computes.

    The truth is `jax.value_and_grad(loss_fn)(params, batch)` on the first device alone. A wrong reduction
    multiplies gradients by a number of devices, silently; a failure names that number.

    Args:
        loss_fn: `loss_fn(params, batch)` -> the loss of the whole batch, without collectives: a scalar, or a
            tuple that begins with it (and a weight or aux). For a step that sums where others average, it
            is the sum.
        params: The parameters, on the host or on any devices. Leaves that are neither float nor complex are
            left out of the comparison.
        batch: The global batch.
        step: What is tested. A `TrainStep`: the gradients that it hands to its optimizer, and its loss.
            Or a function `step(params, batch)` that returns the gradients, or `(loss, gradients)`: called
            with `params` and `batch` as they are. Gradients have the tree of `params`; with a leading dim of
            devices, as `pmap` returns it, all must be equal.
        then: What `step` does to gradients after the reduction, such as clipping, as a function of a tree of
            gradients: done to those of one device before they are compared.
        rtol: What may differ, as a part of the largest element of the leaf: by default the square root of the
            lowest precision among its dtype, its dtype on the wire, and what the loss computes in (float32:
            3e-4, bfloat16: 0.09). On accelerators that multiply in lower precision, set
            `jax_default_matmul_precision`.
        atol: What may differ in any case: by default the precision of float32, as a part of the largest
            gradient of all. In lower precision also that precision, as a part of the leaf's gradients of
            parts of the batch, which may cancel; and 8 times what one device itself differs by when it
            computes the batch in parts, up to that precision, as a part of the largest gradient.
        min_devices: On how many devices the step must run: those of a `TrainStep`'s mesh, or those that hold
            an array that the function returns. On one device no reduction can be wrong. Pass 1 if that is
            meant, or if the function returns what one of its devices holds. NumPy arrays tell nothing, and
            are compared anyway.

    Raises:
        GradientMismatchError: For each leaf that differs, by which ratio: the same in all elements, or from
            least to largest; or which devices differ from each other.
        TooFewDevicesError: All is right, but on fewer than `min_devices`.
        DeletedArrayError: An array of `params` or `batch` was donated before.
        ArgumentError: `step` is no function.
        ForkedProcessError: The process was forked from one that had started JAX.

    Collectives: those of `step`.

    >>> import jax, jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.ones(3)}
    >>> batch = {"x": jnp.arange(48.0).reshape(16, 3), "y": jnp.ones(16)}
    >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> step = jaxsync.make_train_step(loss_fn, optax.adam(1e-3), plan)
    >>> assert_matches_single_device(loss_fn, params, batch, step)
    """
    __tracebackhide__ = True
    check_not_forked("testing.assert_matches_single_device")
    check_not_deleted(jax.tree.leaves((params, batch)), {"params": params, "batch": batch})
    truth = SingleDevice(loss_fn, params, batch, then)
    result = _run(step, params, batch, truth)
    limits = _limits(truth, result)
    findings = [
        (path, finding)
        for path, want in truth.whole.items()
        if path in result.values
        and (finding := _compare(want, result.values[path], result.axes, _given(limits[path], rtol, atol)))
    ]
    findings += [
        (path, "is missing from what step returned")
        for path in truth.whole
        if path not in result.values and path != "loss"
    ]
    if findings:
        raise GradientMismatchError(leaves=tuple(findings), num_compared=len(result.values))
    if result.num_devices is not None and result.num_devices < min_devices:
        raise TooFewDevicesError(
            subject=result.subject,
            found=result.num_devices,
            wanted=min_devices,
            allow=f"pass min_devices={result.num_devices}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What the step computes.

    Attributes:
        values: The loss, if there is one, and the gradients by path.
        axes: The sizes of the axes of its mesh.
        eps: The precision of what gradients are sent in, by path.
        num_parts: Into how many parts it divides the batch; None if that cannot be told.
        subject: What tells on how many devices it runs.
        num_devices: How many those are; None if it cannot be told.
    """

    values: Mapping[str, Any]
    axes: Mapping[str, int]
    eps: Mapping[str, float]
    num_parts: int | None
    subject: str
    num_devices: int | None


def _run(step: Any, params: Any, batch: Any, truth: SingleDevice) -> _Result:
    __tracebackhide__ = True
    if isinstance(step, TrainStep):
        return _run_train_step(step, params, batch)
    if not callable(step):
        got, wanted = f"a {type(step).__name__}", "a TrainStep, or a function step(params, batch)"
        raise ArgumentError(
            function="testing.assert_matches_single_device", argument="step", got=got, wanted=wanted
        )
    returned = step(params, batch)
    loss: dict[str, Any] = {}
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    paths = truth.whole.keys() - {"loss"}
    if is_pair and paths <= by_path(returned[1]).keys():
        loss, returned = {"loss": returned[0]}, returned[1]
    grads = {path: x for path, x in by_path(returned).items() if path in paths}
    values = {**loss, **grads}
    return _Result(
        values=values,
        axes=_axes_of(grads),
        eps={},
        num_parts=None,
        subject="what step returned",
        num_devices=_num_devices(values),
    )


def _run_train_step(step: TrainStep, params: Any, batch: Any) -> _Result:
    __tracebackhide__ = True
    # The same step with an optimizer that keeps what it is handed, also of a step that would be skipped.
    plan, keep = step.plan, _KeepGradients()
    is_sharded = isinstance(step.tx, ShardedOptimizer)
    probe = step.replace(tx=shard_optimizer(keep, plan) if is_sharded else keep, skip_nonfinite=False)
    state, metrics = probe(probe.init(params), batch)
    on_wire = eps_of(plan.config.wire_dtype) if plan.config.wire_dtype else 0.0
    wire = {
        f"grads{plan.leaves[i].path}": max(eps_of(bucket.dtype), on_wire)
        for bucket in plan.buckets
        for i in bucket.leaves
    }
    return _Result(
        values={"loss": metrics["loss"], **by_path(state.opt_state)},
        axes=axis_sizes(plan.mesh),
        eps=wire,
        num_parts=plan.num_replicas * step.accumulate,
        subject="the mesh of the step",
        num_devices=plan.mesh.size,
    )


class _KeepGradients:
    """An optimizer that changes nothing, and has the last gradients for its state."""

    def init(self, params: Any, /) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), updates


def _limits(truth: SingleDevice, result: _Result) -> dict[str, dict[str, float]]:
    """By how much the loss and each gradient may differ: path -> `rtol` and `atol`."""
    eps = {
        path: max(eps_of(jnp.result_type(x)), result.eps.get(path, 0.0), truth.eps)
        for path, x in result.values.items()
    }
    is_low = any(each > SINGLE for each in eps.values())
    rounding = truth.measure_rounding(result.num_parts) if is_low else {}
    grads = [x for path, x in truth.whole.items() if path != "loss"]
    sizes = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in grads]
    largest = max(map(float, sizes), default=0.0)
    limits = {}
    for path, each in eps.items():
        atol = min(each, SINGLE) * largest if path != "loss" else 0.0
        if each > SINGLE and path in rounding:
            noise = min(rounding[path].noise, each * max(largest, rounding[path].spread))
            atol = max(atol, each * rounding[path].spread, noise)
        limits[path] = {"rtol": math.sqrt(each), "atol": atol}
    return limits


def _given(limits: Mapping[str, float], rtol: float | None, atol: float | None) -> dict[str, float]:
    return {
        "rtol": limits["rtol"] if rtol is None else rtol,
        "atol": limits["atol"] if atol is None else atol,
    }


def _compare(want: Values, got: Any, axes: Mapping[str, int], limits: Mapping[str, float]) -> str | None:
    if differing := _differing_replicas(got):
        return f"{differing[0]} and {differing[1]} hold different values: not reduced, or not on all devices"
    values = on_host(got)
    if values.shape == want.shape:
        return describe_difference(values, want, axes=axes, **limits)
    if values.shape[1:] != want.shape or not values.shape:
        return f"has shape {values.shape}; wanted {want.shape}"
    if all(np.array_equal(row, values[0], equal_nan=True) for row in values):
        return describe_difference(values[0], want, axes={"devices": len(values)}, **limits)
    ratios = [f"{common_ratio(row, want):.4g}" for row in values[:_MAX_RATIOS]]
    more = f" and {len(values) - _MAX_RATIOS} more" if len(values) > _MAX_RATIOS else ""
    return f"each device has its own, not reduced: ratios {', '.join(ratios)}{more}"


def _differing_replicas(x: Any) -> tuple[str, str] | None:
    try:
        check_replicas_equal(x)
    except ReplicaMismatchError as error:
        return error.leaves[0][1:]
    return None


def _axes_of(grads: Mapping[str, Any]) -> dict[str, int]:
    """The axes of the mesh that gradients live on; else how many devices there are."""
    for x in grads.values():
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            return axis_sizes(x.sharding.mesh)
    used = [len(x.sharding.device_set) for x in grads.values() if isinstance(x, jax.Array)]
    return {"devices": max(used, default=1) if max(used, default=1) > 1 else len(jax.devices())}


def _num_devices(values: Mapping[str, Any]) -> int | None:
    """How many devices hold a part of these; None if no array says so."""
    used = [x.sharding.device_set for x in values.values() if isinstance(x, jax.Array)]
    return len(frozenset().union(*used)) if used else None
