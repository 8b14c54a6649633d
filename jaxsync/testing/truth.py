"""What one device computes: the loss, the gradients, and how far rounding may take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.testing.comparison import Values

SINGLE = float(np.finfo(np.float32).eps)
_MAX_PARTS = 64
_NOISE_MARGIN = 8.0  # one measured difference of two roundings is small by chance at times


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What computing a batch in parts tells of the loss, or of one gradient.

    Attributes:
        spread: The largest sum of the parts' absolute values, weighted as the parts are.
        noise: 8 times the largest difference between the weighted sum of the parts and the whole.
    """

    spread: float
    noise: float


class SingleDevice:
    """The loss of a batch and its gradients on the first device alone, by path: `"loss"`, `"grads['w']"`.

    Attributes:
        whole: Of the whole batch, with `then` done to the gradients.
        eps: The lowest precision that the program computes in.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        batch: Any,
        then: Callable[[Any], Any] | None,
    ) -> None:
        __tracebackhide__ = True
        first = jax.devices()[0]
        params, batch = jax.tree.map(lambda x: jax.device_put(x, first), (params, batch))
        self._loss_fn, self._batch = loss_fn, batch
        self._leaves, self._treedef = jax.tree.flatten(params)
        self._is_trained = [is_differentiable(x) for x in self._leaves]
        self._trained = [x for x, yes in zip(self._leaves, self._is_trained, strict=True) if yes]
        # No lambda: it would stand in the traceback of what the user's loss raises.
        loss = functools.partial(self._loss, batch=batch)
        traced = jax.jit(jax.value_and_grad(loss)).trace(self._trained)
        self.eps = _lowest_eps(traced.jaxpr)
        value, found = traced.lower().compile()(self._trained)
        tree = self._tree(found)
        self._raw = _on_host_by_path(value, tree)
        self.whole = self._raw if then is None else _on_host_by_path(value, then(tree))

    def _loss(self, trained: list[Any], batch: Any) -> Any:
        __tracebackhide__ = True
        values = iter(trained)
        leaves = [next(values) if yes else x for x, yes in zip(self._leaves, self._is_trained, strict=True)]
        returned = self._loss_fn(jax.tree.unflatten(self._treedef, leaves), batch)
        return returned[0] if isinstance(returned, tuple | list) else returned

    def _tree(self, found: list[Any]) -> Any:
        grads = iter(found)
        return jax.tree.unflatten(self._treedef, [next(grads) if yes else None for yes in self._is_trained])

    def measure_rounding(self, count: int | None) -> Mapping[str, Rounding]:
        """The rounding of the loss and of each gradient, measured with the batch in `count` parts.

        Empty if the batch, or the loss of a part of it, cannot be computed in parts.
        """
        try:
            parts = self._parts(count)
        except (TypeError, ValueError):  # a loss that takes no other number of rows
            return {}
        if not parts:
            return {}
        total = sum(float(part["loss"].real) for part in parts)
        whole = float(self._raw["loss"].real)
        # The loss of all rows is the mean of the parts' or their sum, whichever is closer.
        weight = min(1 / len(parts), 1.0, key=lambda weight: abs(weight * total - whole))
        return {path: self._rounding(path, [part[path] for part in parts], weight) for path in self._raw}

    def _rounding(self, path: str, parts: list[Values], weight: float) -> Rounding:
        raw = self._raw[path]
        whole = self.whole.get(path, raw)
        spread = weight * sum(np.abs(part) for part in parts)
        noise = np.abs(weight * sum(parts) - raw)
        # What `then` does to a leaf, such as clipping, it does to its rounding.
        scale = _largest(whole) / _largest(raw) if _largest(raw) else 1.0
        return Rounding(spread=scale * _largest(spread), noise=_NOISE_MARGIN * scale * _largest(noise))

    def _parts(self, count: int | None) -> list[dict[str, Values]]:
        leaves, treedef = jax.tree.flatten(self._batch)
        rows = max((x.shape[0] for x in leaves if x.ndim), default=0)
        count = count or next((n for n in range(min(rows, _MAX_PARTS), 1, -1) if rows % n == 0), 1)
        if count < 2 or rows % count or rows < count:
            return []
        is_split = [x.ndim > 0 and x.shape[0] == rows for x in leaves]

        def loss(trained: list[Any], split: list[Any]) -> Any:
            values = iter(split)
            part = [next(values) if yes else x for x, yes in zip(leaves, is_split, strict=True)]
            return self._loss(trained, jax.tree.unflatten(treedef, part))

        program = jax.jit(jax.value_and_grad(loss))
        size, found = rows // count, []
        for start in range(0, rows, size):
            split = [x[start : start + size] for x, yes in zip(leaves, is_split, strict=True) if yes]
            value, grads = program(self._trained, split)
            found.append(_on_host_by_path(value, self._tree(grads)))
        return found


def is_differentiable(x: Any) -> bool:
    """Whether a leaf is of floats or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of gradients: path -> leaf."""
    return {f"grads{jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def on_host(x: Any) -> Values:
    """An array in double precision."""
    host = np.asarray(x)
    return host.astype(np.complex128 if np.iscomplexobj(host) else np.float64)


def eps_of(dtype: Any) -> float:
    """The precision of a dtype; zero if it is exact.

    >>> eps_of("bfloat16"), eps_of("int32")
    (0.0078125, 0.0)
    """
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _on_host_by_path(loss: Any, grads: Any) -> dict[str, Values]:
    return {"loss": on_host(loss), **{path: on_host(x) for path, x in by_path(grads).items()}}


def _largest(values: Any) -> float:
    return float(np.abs(values).max(initial=0.0))


def _lowest_eps(jaxpr: Any) -> float:
    """The largest precision step of any value that a program computes, and of what it is given."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values = [*jaxpr.invars, *(x for each in jaxpr.eqns for x in each.outvars)]
    dtypes = {x.aval.dtype for x in values if hasattr(x.aval, "dtype")}
    own = [eps_of(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return max(
        [*own, *(_lowest_eps(inner) for each in jaxpr.eqns for inner in _inner(each.params))], default=0.0
    )


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each
