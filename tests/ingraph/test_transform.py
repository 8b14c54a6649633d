"""One added line syncs a functional step written by hand, with optax, flax and equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import AlreadyReducedError, UnboundAxisError

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))


def plain_model() -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    params = {"w": jnp.full((5, 1), 0.1), "b": jnp.zeros(1)}
    return params, lambda p, x: x @ p["w"] + p["b"]


def flax_model() -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    model = Flax()
    return model.init(jax.random.key(0), X), model.apply


def equinox_model() -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    model = eqx.nn.MLP(5, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x)


MODELS = {"plain": plain_model, "flax": flax_model, "equinox": equinox_model}


def train(params: Any, apply: Any, tx: Any, wrap: Callable[[Any], Any], steps: int = 5) -> Any:
    """A user's loop: the step knows nothing of devices but what `wrap` and `tx` bring."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wrapped, state = wrap(step), tx.init(params)
    for _ in range(steps):
        params, state = wrapped(params, state, X, Y)
    return params


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["shard_map", "pmap"])
def test_one_added_line_makes_a_step_data_parallel(model: str, way: str) -> None:
    params, apply = MODELS[model]()
    alone = train(params, apply, optax.adamw(1e-2), jax.jit)

    mesh = jaxsync.make_mesh({"data": 8})
    plan = jaxsync.make_plan(params, mesh)
    tx = optax.chain(jaxsync.synchronize(plan), optax.adamw(1e-2))  # the line

    def shard(step: Any) -> Any:
        rows = P("data")
        return jaxsync.guard_dispatch(
            jax.jit(
                jax.shard_map(
                    step, mesh=mesh, in_specs=(P(), P(), rows, rows), out_specs=P(), check_vma=False
                )
            )
        )

    def pmap(step: Any) -> Any:
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, None, 0, 0), out_axes=None)
        return jaxsync.guard_dispatch(lambda p, s, x, y: mapped(p, s, x.reshape(8, 2, 5), y.reshape(8, 2, 1)))

    together = train(params, apply, tx, shard if way == "shard_map" else pmap)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_where_types_are_checked_the_line_needs_varying_parameters() -> None:
    params, apply = plain_model()
    mesh = jaxsync.make_mesh({"data": 8})
    plan = jaxsync.make_plan(params, mesh)
    tx = optax.chain(jaxsync.synchronize(plan), optax.adamw(1e-2))

    def shard(step: Any) -> Any:
        rows = P("data")
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), rows, rows), out_specs=P()))

    with pytest.raises(AlreadyReducedError, match=r"jaxsync\.value_and_grad"):
        train(params, apply, tx, shard)


def test_value_and_grad_with_a_plain_optimizer_is_the_checked_way() -> None:
    params, apply = plain_model()
    alone = train(params, apply, optax.adamw(1e-2), jax.jit)
    mesh = jaxsync.make_mesh({"data": 8})
    tx = optax.adamw(1e-2)
    grad = jaxsync.value_and_grad(
        lambda p, x, y: jnp.mean((apply(p, x) - y) ** 2), jaxsync.make_plan(params, mesh)
    )

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(grad(params, x, y)[1], state, params)
        return optax.apply_updates(params, updates), state

    rows = P("data")
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), rows, rows), out_specs=P()))
    state = tx.init(params)
    for _ in range(5):
        params, state = mapped(params, state, X, Y)
    for name in params:
        np.testing.assert_allclose(alone[name], params[name], rtol=2e-4, atol=1e-6)


def test_under_plain_jit_it_says_that_gradients_are_global() -> None:
    params, apply = plain_model()
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    with pytest.raises(UnboundAxisError, match="Under plain jit on a sharded batch, gradients are global"):
        train(params, apply, optax.chain(jaxsync.synchronize(plan), optax.sgd(0.1)), jax.jit)
