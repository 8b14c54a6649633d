"""Which optimizers treat all elements alike: found out from the trace, and true in numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsync
from jaxsync.ingraph.elementwise import is_alike
from jaxsync.ingraph.packed import Packed, make_layout

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
PARAMS = {
    "a": RNG.normal(size=(3, 2)).astype(np.float32),
    "b": RNG.normal(size=(5,)).astype(np.float32),
    "c": {"scalar": np.float32(0.3), "one": np.ones((1, 1), np.float32)},
    "n": np.int32(4),
}
PLAN = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 8}))
LAYOUT = make_layout(PLAN)


def _counts_elements() -> Any:
    init = lambda p: sum(x.size for x in jax.tree.leaves(p)) * jnp.ones(())  # noqa: E731
    update = lambda u, s, p=None: (jax.tree.map(lambda x: x / s, u), s)  # noqa: E731
    return optax.GradientTransformation(init, update)


ALIKE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 20)),
    "warmup": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)),
    "lion": optax.lion(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "adagrad": optax.adagrad(1e-1),
    "nadam": optax.nadam(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "clipping each element": optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "averaging": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "the global norm": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "the number of all elements": _counts_elements(),
    "our global norm": optax.chain(jaxsync.clip_by_global_norm(0.5, PLAN), optax.adam(1e-2)),
}


def _scaled_by_size() -> Any:
    update = lambda u, s, p=None: (jax.tree.map(lambda x: x / x.size, u), s)  # noqa: E731
    return optax.GradientTransformation(lambda p: (), update)


def _reversed() -> Any:
    update = lambda u, s, p=None: (jax.tree.map(lambda x: jnp.flip(x).reshape(x.shape), u), s)  # noqa: E731
    return optax.GradientTransformation(lambda p: (), update)


def _looks_at_names() -> Any:
    update = lambda u, s, p=None: ({**u, "a": 2 * u["a"]}, s)  # noqa: E731
    return optax.GradientTransformation(lambda p: (), update)


def _max_of_some() -> Any:
    def update(u: Any, s: Any, p: Any = None) -> Any:
        largest = jnp.max(jax.tree.leaves(u)[0])
        return jax.tree.map(lambda x: x / (1 + largest), u), s

    return optax.GradientTransformation(lambda p: (), update)


def _counts_leaves() -> Any:
    update = lambda u, s, p=None: (jax.tree.map(lambda x: x / len(jax.tree.leaves(u)), u), s)  # noqa: E731
    return optax.GradientTransformation(lambda p: (), update)


def _starts_from_position() -> Any:
    init = lambda p: jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), p)  # noqa: E731
    update = lambda u, s, p=None: (jax.tree.map(lambda a, b: a + b, u, s), s)  # noqa: E731
    return optax.GradientTransformation(init, update)


NOT_ALIKE = {
    "a mask by shape": optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "a mask by name": optax.adamw(1e-2, mask={"a": True, "b": False, "c": False, "n": False}),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "noise": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "several steps in one": optax.MultiSteps(optax.adam(1e-2), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "clipping by leaf": optax.clip_by_block_rms(1.0),
    "centralize": optax.centralize(),
    "synchronize": optax.chain(jaxsync.synchronize(PLAN), optax.sgd(0.1)),
    "the number of elements of a leaf": _scaled_by_size(),
    "the number of leaves": _counts_leaves(),
    "another order": _reversed(),
    "a name": _looks_at_names(),
    "the largest of one leaf": _max_of_some(),
    "a start by position": _starts_from_position(),
}


def run(tx: Any, params: Any, gradient: Any, steps: int) -> Any:
    """Parameters after `steps` on one device, with gradients that depend on them."""

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("name", ALIKE)
def test_an_elementwise_optimizer_gives_the_same_numbers_for_packed_parameters(name: str) -> None:
    assert is_alike(ALIKE[name], LAYOUT)
    packed: Packed = LAYOUT.pack(PARAMS).without_rest()
    tree = packed.tree()
    gradient = lambda p: jax.tree.map(lambda x: jnp.sin(3 * x) - x, p)  # noqa: E731
    got, got_state = run(ALIKE[name], packed, gradient, 6)
    want, want_state = run(ALIKE[name], tree, gradient, 6)
    for a, b in zip(jax.tree.leaves(got.tree()), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    shown = jaxsync.ingraph.packed.unpack_all(got_state)
    assert jax.tree.structure(shown) == jax.tree.structure(want_state)
    for a, b in zip(jax.tree.leaves(shown), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_any_other_optimizer_is_told_apart(name: str) -> None:
    assert not is_alike(NOT_ALIKE[name], LAYOUT)


@pytest.mark.parametrize(
    "name", ["a mask by shape", "lamb", "the number of elements of a leaf", "another order"]
)
def test_any_other_optimizer_trains_on_the_tree_and_gives_its_own_numbers(name: str) -> None:
    tx = NOT_ALIKE[name]
    params = {key: PARAMS[key] for key in "ab"}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    loss = lambda p, x: sum(jnp.sum(jnp.sin(v) * (i + 1)) for i, v in enumerate(p.values())) * x.mean()  # noqa: E731
    step = jaxsync.make_train_step(loss, tx, plan)
    state = step.init(params)
    assert not state.packed_params.layout.is_fused
    for _ in range(5):
        state, _ = step(state, np.ones(8, np.float32))
    want, _ = run(tx, params, jax.grad(lambda p: loss(p, jnp.ones(8))), 5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_leaves_of_two_dtypes_stay_apart_and_the_norm_counts_both() -> None:
    params = {
        "a": jnp.ones(3),
        "b": jnp.ones(2),
        "h": jnp.ones(4, jnp.bfloat16),
        "k": jnp.ones(2, jnp.bfloat16),
    }
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    layout = make_layout(plan)
    assert layout.slots == ((0, 1), (2, 3))
    assert is_alike(optax.adam(1e-2), layout)
    assert is_alike(optax.chain(jaxsync.clip_by_global_norm(1.0, plan), optax.sgd(0.1)), layout)
