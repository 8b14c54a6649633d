"""Ten steps of each optimizer, however state and parameters are sharded, equal plain optax on one device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
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
    "odd": RNG.normal(size=(7, 3)).astype(np.float32),
    "b": np.zeros(3, np.float32),
    "scalar": np.float32(0.3),
    "one": np.ones(1, np.float32),
    "even": {"w": RNG.normal(size=(3, 16)).astype(np.float32), "b": np.ones(16, np.float32)},
    "count": np.int32(3),
    "large": RNG.normal(size=(200, 201)).astype(np.float32),
    "empty": np.zeros((0, 3), np.float32),
}
X = RNG.normal(size=(48, 7)).astype(np.float32)


def loss_fn(params: Any, x: Any) -> jax.Array:
    hidden = jnp.tanh(x @ params["odd"] + params["b"]) @ params["even"]["w"] + params["even"]["b"]
    return jnp.mean((hidden * params["scalar"] * params["one"]) ** 2) + 1e-3 * jnp.sum(params["large"] ** 2)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


NAMES = jax.tree_util.tree_map_with_path(
    lambda path, x: None if x.dtype == np.int32 or x.size == 0 else path[0].key in ("odd", "large"), PARAMS
)
OPTIMIZERS = {
    "sgd": lambda plan: optax.sgd(0.1),
    "momentum": lambda plan: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda plan: optax.adam(1e-2),
    "adamw with a schedule": lambda plan: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)),
    "lion": lambda plan: optax.lion(1e-2),
    "injected": lambda plan: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 0, 20)
    ),
    "decay masked by shape": lambda plan: optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "decay masked by name": lambda plan: optax.adamw(1e-2, weight_decay=0.1, mask=NAMES),
    "optax's clipping": lambda plan: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "our clipping": lambda plan: optax.chain(jaxsync.clip_by_global_norm(0.1, plan), optax.adamw(1e-2)),
}
EVEN = {"w": P(None, "data"), "b": P("data")}
LARGE = {**dict.fromkeys(PARAMS, P()), "large": P("data")}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is sharded, and how the step goes about it."""

    specs: Any = field(default_factory=P)
    divides_state: bool = False
    reshard_after_forward: bool = False
    accumulate: int = 1


SHARDINGS = {
    "replicated": Sharding(),
    "ZeRO-1": Sharding(divides_state=True),
    "FSDP": Sharding(specs={**LARGE, "even": EVEN}, reshard_after_forward=True),
    "mixed": Sharding(specs=LARGE, divides_state=True, accumulate=2),
}


@functools.cache
def truth_of(name: str) -> tuple[Any, list[Any]]:
    """Parameters, and the leaves of the state, of plain optax; with None for what is not trained."""
    tx = OPTIMIZERS["optax's clipping" if name == "our clipping" else name](None)
    held = {key: PARAMS[key] for key in ("count", "empty")}
    trained = {key: jax.tree.map(jnp.asarray, p) for key, p in PARAMS.items() if key not in held}
    trained |= dict.fromkeys(held)

    @jax.jit
    def step(trained: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(lambda t: loss_fn({**t, **held}, X))(trained), state, trained)
        return optax.apply_updates(trained, updates), state

    state = tx.init(trained)
    for _ in range(10):
        trained, state = step(trained, state)
    return trained, jax.tree.leaves(state)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_plain_optax_on_one_device(name: str, sharding: str, n: int) -> None:
    how = SHARDINGS[sharding]
    config = jaxsync.SyncConfig(reshard_after_forward=how.reshard_after_forward)
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": n}), how.specs, config)
    tx = OPTIMIZERS[name](plan)
    step = jaxsync.make_train_step(
        loss_fn,
        jaxsync.shard_optimizer(tx, plan) if how.divides_state else tx,
        plan,
        accumulate=how.accumulate,
    )
    state = step.init(PARAMS)
    for _ in range(10):
        state, metrics = step(state, X)
    assert bool(metrics["finite"])
    params, opt_state = truth_of(name)
    check_close({key: p for key, p in state.params.items() if params[key] is not None}, params)
    found = jax.tree.leaves(state.opt_state)
    check_close(found, opt_state, rtol=1e-4)
    assert int(state.params["count"]) == 3
    assert state.params["empty"].shape == (0, 3)


def check_close(got: Any, want: Any, rtol: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=5e-6)
