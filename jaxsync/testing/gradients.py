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

from jaxsync.errors import ArgumentError, GradientMismatchError, ReplicaMismatchError
from jaxsync.ingraph.sharded import shard_optimizer
from jaxsync.mesh import axis_sizes
from jaxsync.placement import check_replicas_equal
from jaxsync.step import TrainStep, make_train_step
from jaxsync.testing.comparison import Values, common_ratio, describe_difference

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
            precision of its dtype, or of the dtype it is reduced in (float32: 3e-4, bfloat16: 0.09). On
            accelerators that multiply in lower precision, set `jax_default_matmul_precision`.
        atol: What may differ in any case: by default the precision of the leaf's dtype, as a part of the
            largest gradient of all.

    Raises:
        GradientMismatchError: For each leaf that differs, by which ratio: the same in all elements, or from
            least to largest; or which devices differ from each other.
        ArgumentError: `step` is no function.

    Collectives: those of `step`.

    >>> import jax, jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.ones(3)}
    >>> batch = {"x": jnp.arange(48.0).reshape(16, 3), "y": jnp.ones(16)}
    >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> step = jaxsync.make_train_step(loss_fn, optax.adam(1e-3), plan)
    >>> assert_matches_single_device(loss_fn, params, batch, step)
    """
    truth = _single_device(loss_fn, params, batch, then)
    result = _run(step, params, batch, truth)
    largest = max((float(np.abs(value).max(initial=0.0)) for value in truth.grads.values()), default=0.0)
    findings = [
        (path, finding)
        for path, want in truth.all().items()
        if path in result.values and (finding := _compare(path, want, result, largest, rtol, atol))
    ]
    findings += [
        (path, "is missing from what step returned") for path in truth.grads if path not in result.values
    ]
    if findings:
        raise GradientMismatchError(leaves=tuple(findings), num_compared=len(result.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truth:
    """What one device computes: the loss, and the gradients by path."""

    loss: Values
    grads: Mapping[str, Values]

    def all(self) -> dict[str, Values]:
        return {"loss": self.loss, **self.grads}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What the step computes.

    Attributes:
        values: The loss, if there is one, and the gradients by path.
        axes: The sizes of the axes of its mesh.
        eps: The precision of what it computes with, by path, if it is less than that of the dtype.
    """

    values: Mapping[str, Any]
    axes: Mapping[str, int]
    eps: Mapping[str, float]


def _single_device(
    loss_fn: Callable[..., Any], params: Any, batch: Any, then: Callable[[Any], Any] | None
) -> _Truth:
    first = jax.devices()[0]
    params, batch = jax.tree.map(lambda x: jax.device_put(x, first), (params, batch))
    leaves, treedef = jax.tree.flatten(params)
    is_trained = [_is_differentiable(x) for x in leaves]

    def run(trained: list[Any]) -> Any:
        values = iter(trained)
        whole = [next(values) if yes else x for x, yes in zip(leaves, is_trained, strict=True)]
        returned = loss_fn(jax.tree.unflatten(treedef, whole), batch)
        return returned[0] if isinstance(returned, tuple | list) else returned

    loss, found = jax.jit(jax.value_and_grad(run))(
        [x for x, yes in zip(leaves, is_trained, strict=True) if yes]
    )
    grads = iter(found)
    tree = jax.tree.unflatten(treedef, [next(grads) if yes else None for yes in is_trained])
    return _Truth(
        loss=_on_host(loss),
        grads={path: _on_host(x) for path, x in _by_path(then(tree) if then else tree).items()},
    )


def _run(step: Any, params: Any, batch: Any, truth: _Truth) -> _Result:
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
    if is_pair and truth.grads.keys() <= _by_path(returned[1]).keys():
        loss, returned = {"loss": returned[0]}, returned[1]
    grads = {path: x for path, x in _by_path(returned).items() if path in truth.grads}
    return _Result(values={**loss, **grads}, axes=_axes_of(grads), eps={})


def _run_train_step(step: TrainStep, params: Any, batch: Any) -> _Result:
    # The step's own parts, which it does not show to others: the same step with an optimizer that keeps what
    # it is handed.
    plan = step.plan
    keep = _KeepGradients()
    probe = make_train_step(
        step._loss_fn,
        keep if step._sharded is None else shard_optimizer(keep, plan),
        plan,
        accumulate=step._accumulate,
        donate=False,
        transform="pmap" if step._is_pmap else "shard_map",
        has_aux=step._has_aux,
        weighted=step._weighted,
        skip_nonfinite=False,
    )
    state, metrics = probe(probe.init(params), batch)
    wire = {plan.leaves[i].path: bucket.dtype for bucket in plan.buckets for i in bucket.leaves}
    return _Result(
        values={"loss": metrics["loss"], **_by_path(state.opt_state)},
        axes=axis_sizes(plan.mesh),
        eps={f"grads{path}": _eps(dtype) for path, dtype in wire.items()},
    )


class _KeepGradients:
    """An optimizer that changes nothing, and has the last gradients for its state."""

    def init(self, params: Any, /) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), updates


def _compare(
    path: str, want: Values, result: _Result, largest: float, rtol: float | None, atol: float | None
) -> str | None:
    got = result.values[path]
    eps = max(_eps(jnp.result_type(got)), result.eps.get(path, 0.0))
    limits = {
        "rtol": math.sqrt(eps) if rtol is None else rtol,
        "atol": (eps * largest if path != "loss" else 0.0) if atol is None else atol,
    }
    if differing := _differing_replicas(got):
        return f"{differing[0]} and {differing[1]} hold different values: not reduced, or not on all devices"
    values = _on_host(got)
    if values.shape == want.shape:
        return describe_difference(values, want, axes=result.axes, **limits)
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


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _by_path(tree: Any) -> dict[str, Any]:
    return {f"grads{jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _on_host(x: Any) -> Values:
    host = np.asarray(x)
    return host.astype(np.complex128 if np.iscomplexobj(host) else np.float64)


def _eps(dtype: Any) -> float:
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
