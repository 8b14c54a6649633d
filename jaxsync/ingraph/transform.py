"""Sync and clipping as optimizer transformations: the optax protocol, without optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxsync.ingraph.grads import sync_gradients
from jaxsync.ingraph.norm import clip
from jaxsync.plan import SyncPlan


class Transformation(NamedTuple):
    """The optax protocol: `init(params) -> state`, `update(updates, state, params) -> (updates, state)`."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that keeps none."""


def synchronize(plan: SyncPlan) -> Transformation:
    """A transformation that syncs local gradients; put it first in `optax.chain`.

    `update` is `sync_gradients`, with its contract and its errors. Under `shard_map(check_vma=True)`,
    `jax.grad` with respect to replicated parameters has already summed the gradients, and `update` refuses
    them: differentiate with respect to `jax.lax.pcast(params, axis, to="varying")` there.

    Collectives: `plan.num_all_reduces` all-reduces.

    >>> import jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.zeros(3)}
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> tx = optax.chain(jaxsync.synchronize(plan), optax.adamw(1e-3))
    >>> state = tx.init(params)
    """

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return sync_gradients(updates, plan), state

    return Transformation(lambda params: EmptyState(), update)


def clip_by_global_norm(max_norm: float, plan: SyncPlan) -> Transformation:
    """A transformation that scales synced gradients so that their global norm is at most `max_norm`.

    Right for any mix of replicated and model-sharded leaves: see `global_norm`, whose errors it raises.
    Gradients whose norm is NaN stay NaN.

    Args:
        max_norm: More than 0.
        plan: From `make_plan`.

    Collectives: those of `global_norm`.

    >>> import jax.numpy as jnp, jaxsync
    >>> grads = {"w": jnp.array([3.0, 4.0])}
    >>> plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    >>> tx = jaxsync.clip_by_global_norm(1.0, plan)
    >>> clipped, _ = tx.update(grads, tx.init(grads))
    >>> print(clipped["w"])
    [0.6 0.8]
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm needs max_norm > 0; got {max_norm!r}")

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return clip(updates, max_norm, plan), state

    return Transformation(lambda params: EmptyState(), update)
