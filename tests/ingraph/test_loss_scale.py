"""Loss scaling, with a scale that grows and shrinks on the host: the same numbers in every sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(8, 16)).astype(np.float16),
    "v": RNG.normal(size=(16,)).astype(np.float16),
    "odd": np.full(3, 0.5, np.float16),
}
X = RNG.normal(size=(16, 8)).astype(np.float16)
SHARDINGS = {
    "replicated": (P(), False),
    "ZeRO-1": (P(), True),
    "FSDP": ({"w": P("data"), "v": P("data"), "odd": P()}, False),
    "mixed": ({"w": P(None, "data"), "v": P(), "odd": P()}, True),
}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """So small that its gradient is 0 in float16, unless it is scaled on the way there."""
    out = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    loss = jnp.mean(out.astype(jnp.float32) ** 2) + jnp.sum(params["odd"].astype(jnp.float32) ** 2)
    return 1e-8 * loss * batch["scale"]


def make_optimizer(inverse_scale: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.stateless(lambda u, _: jax.tree.map(lambda g: g.astype(jnp.float32) * inverse_scale, u)),
        optax.clip_by_global_norm(1e-8),
        optax.scale(-1e6),
    )


def run_steps(name: str, n: int) -> tuple[list[bool], Any]:
    """Five steps; as a user would: less after an overflow, more after a good step."""
    specs, divides = SHARDINGS[name]
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": n}), specs)
    tx = optax.inject_hyperparams(make_optimizer, hyperparam_dtype=jnp.float32)(inverse_scale=1.0)
    step = jaxsync.make_train_step(loss_fn, jaxsync.shard_optimizer(tx, plan) if divides else tx, plan)
    state, scale, flags = step.init(PARAMS), 2.0**50, []
    for _ in range(5):
        opt_state = state.opt_state
        opt_state.hyperparams["inverse_scale"] = jnp.float32(1 / scale)
        state = state.replace(opt_state=opt_state)
        state, metrics = step(state, {"x": X, "scale": np.float32(scale)})
        flags.append(bool(metrics["finite"]))
        scale = scale * 2.0 if flags[-1] else scale / 2.0**16
    return flags, jax.device_get(state.params)


def truth() -> tuple[list[bool], Any]:
    """The same on one device in plain JAX."""
    params, scale, flags = dict(PARAMS), 2.0**50, []
    grad = jax.jit(jax.grad(loss_fn))
    for _ in range(5):
        grads = jax.device_get(grad(params, {"x": X, "scale": np.float32(scale)}))
        flags.append(all(np.isfinite(g).all() for g in grads.values()))
        if flags[-1]:
            grads = {k: g.astype(np.float64) / scale for k, g in grads.items()}
            norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
            params = {
                k: (p.astype(np.float64) - 1e6 * grads[k] * min(1, 1e-8 / norm)).astype(np.float16)
                for k, p in params.items()
            }
        scale = scale * 2.0 if flags[-1] else scale / 2.0**16
    return flags, params


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_scaled_loss_gives_the_numbers_of_one_device(name: str, n: int) -> None:
    flags, params = run_steps(name, n)
    want_flags, want = truth()
    assert flags == want_flags
    assert {True, False} == set(flags)  # it overflowed, and it did not
    for key, p in params.items():
        assert np.abs(p.astype(np.float64) - PARAMS[key]).max() > 1e-3  # unscaled, nothing would move
        np.testing.assert_allclose(p, want[key], rtol=2e-2, atol=2e-3)
