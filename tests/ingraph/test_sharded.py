"""shard_optimizer: the numbers of the whole optimizer, with a part of its state and work on each device."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import ArgumentError, NotElementwiseError

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
PARAMS = {
    "w1": RNG.normal(size=(7, 3)).astype(np.float32),
    "b": np.zeros(3, np.float32),
    "scalar": np.float32(0.3),
    "one": np.ones(1, np.float32),
    "w2": RNG.normal(size=(3, 16)).astype(np.float32),
    "count": np.int32(3),
    "large": RNG.normal(size=(200, 201)).astype(np.float32),
    "empty": np.zeros((0, 3), np.float32),
}
SMALL = {"w": PARAMS["w1"], "b": np.ones(5, np.float32)}
X = RNG.normal(size=(48, 7)).astype(np.float32)
MODEL_SPECS = {"w1": P(None, "model"), "w2": P("model"), "b": P()}
MODEL_PARAMS = {
    "w1": RNG.normal(size=(7, 6)).astype(np.float32),
    "w2": RNG.normal(size=(6, 3)).astype(np.float32),
    "b": np.zeros(3, np.float32),
}


def loss_fn(params: Any, x: Any) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b"]) @ params["w2"]
    return jnp.mean((hidden * params["scalar"] * params["one"]) ** 2) + 1e-3 * jnp.sum(params["large"] ** 2)


def any_loss(params: Any, x: Any) -> jax.Array:
    """For any tree: a gradient of its own for each leaf, and none that is near zero everywhere."""
    floats = [p for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.inexact)]
    total = sum(jnp.sum(jnp.sin(p * (i + 1)).real) for i, p in enumerate(floats))
    return (total + 0 * x.sum()).astype(jnp.float32) * jnp.mean(jnp.abs(x))


def model_loss(params: Any, x: Any, total: Any = lambda y: jax.lax.psum(y, "model")) -> jax.Array:
    return jnp.mean((total(jnp.tanh(x @ params["w1"]) @ params["w2"]) + params["b"]) ** 2)


def whole_loss(params: Any, x: Any) -> jax.Array:
    return model_loss(params, x, lambda y: y)


def alone(tx: Any, steps: int, params: Any = PARAMS, loss: Any = loss_fn, x: Any = X) -> tuple[Any, Any]:
    """The truth: plain optax on one device, with None for what is not trained."""

    def is_trained(p: Any) -> bool:
        return bool(jnp.issubdtype(jnp.result_type(p), jnp.inexact)) and jnp.size(p) > 0

    trained = jax.tree.map(lambda p: jnp.asarray(p) if is_trained(p) else None, params)

    @jax.jit
    def step(trained: Any, state: Any) -> Any:
        whole = lambda t: jax.tree.map(lambda p, q: p if q is None else q, params, t, is_leaf=_is_none)  # noqa: E731
        grads = jax.grad(lambda t: loss(whole(t), x))(trained)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    state = tx.init(trained)
    for _ in range(steps):
        trained, state = step(trained, state)
    return trained, state


def _is_none(x: Any) -> bool:
    return x is None


def plan_of(n: int = 8, params: Any = PARAMS, **config: Any) -> jaxsync.SyncPlan:
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": n}), config=jaxsync.SyncConfig(**config))


def step_of(tx: Any, plan: Any = None, loss: Any = loss_fn, **options: Any) -> jaxsync.TrainStep:
    plan = plan_of() if plan is None else plan
    return jaxsync.make_train_step(loss, jaxsync.shard_optimizer(tx, plan), plan, **options)


def train(step: Any, steps: int, params: Any = PARAMS, x: Any = X) -> jaxsync.TrainState:
    state = step.init(params)
    for _ in range(steps):
        state, _ = step(state, x)
    return state


def check_equals_alone(state: Any, truth: Any, params: Any = PARAMS, rtol: float = 1e-4) -> None:
    """Parameters, and the optimizer's state in its own structure."""
    want, want_state = truth
    got = jax.tree.map(lambda p, q: None if q is None else p, state.params, want, is_leaf=_is_none)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
    found = state.opt_state
    assert jax.tree.structure(found) == jax.tree.structure(want_state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want_state), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def check_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def stateless(fn: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (fn(u), s))


OPTIMIZERS = {
    "adam": lambda plan: optax.adam(1e-2),
    "decay masked by shape": lambda plan: optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "optax's clipping": lambda plan: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "our clipping": lambda plan: optax.chain(jaxsync.clip_by_global_norm(0.1, plan), optax.adamw(1e-2)),
}


@functools.cache
def truth_of(name: str) -> tuple[Any, Any]:
    return alone(OPTIMIZERS[name](None), 10)


MORE = {
    "state masked by shape": optax.masked(optax.sgd(0.1, momentum=0.9), is_matrix),
    "state masked by name": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "two optimizers by shape": optax.multi_transform(
        {"yes": optax.adam(1e-2), "no": optax.sgd(0.1, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "yes" if x.ndim > 1 else "no", tree),
    ),
    "two optimizers by name": optax.multi_transform(
        {"yes": optax.adam(1e-2), "no": optax.sgd(0.1, momentum=0.9)}, {"w": "yes", "b": "no"}
    ),
    "moments in bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "a state that starts from ones": optax.adagrad(0.1),
    "averages": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "distance from the start": optax.contrib.dog(),
}


@pytest.mark.parametrize("name", MORE)
def test_states_of_many_kinds_are_shown_and_replaced_as_the_optimizer_has_them(name: str) -> None:
    tx = MORE[name]
    state = train(step_of(tx, plan_of(params=SMALL), any_loss), 3, SMALL)
    check_equals_alone(state, alone(tx, 3, SMALL, any_loss), rtol=1e-2 if "bfloat16" in name else 1e-4)
    check_same_bits(state.replace(opt_state=state.opt_state).opt_state, state.opt_state)


def parts_bytes(plan: jaxsync.SyncPlan) -> int:
    """Bytes of one device's part of all parameters, padding included."""
    leaves = [leaf for leaf in plan.leaves if leaf.is_synced]
    return sum(-(-math.prod(leaf.local_shape) // plan.num_replicas) * 4 for leaf in leaves)


LAYOUTS = {"fused": optax.adam(1e-2), "single": optax.adamw(1e-2, mask=is_matrix)}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_one_reduce_scatter_and_one_all_gather_a_bucket(layout: str, accumulate: int) -> None:
    plan = plan_of()
    step = step_of(LAYOUTS[layout], plan, accumulate=accumulate)
    state = step.init(PARAMS)
    assert state.packed_params.layout.is_fused == (layout == "fused")
    audit = jaxsync.audit(step, state, X)
    assert audit.count("reduce-scatter") == audit.count("all-gather") == len(plan.buckets) == 2
    scattered = sum(c.num_bytes for c in audit.collectives if c.kind == "reduce-scatter")
    gathered = sum(c.num_bytes for c in audit.collectives if c.kind == "all-gather")
    size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS) if leaf.dtype == np.float32) * 4
    padding = 4 * 7 * sum(leaf.is_synced for leaf in plan.leaves)
    assert size / 8 <= scattered <= (size + padding) / 8
    assert size <= gathered <= size + padding
    assert gathered == 8 * scattered
    others = [c for c in audit.collectives if c.kind not in ("reduce-scatter", "all-gather")]
    assert {c.kind for c in others} == {"all-reduce"}
    assert sum(c.num_bytes for c in others) <= 16  # the loss and the flag
    assert audit.in_loop == ()


def test_a_global_norm_adds_reductions_of_single_numbers() -> None:
    step = step_of(OPTIMIZERS["optax's clipping"](None))
    audit = jaxsync.audit(step, step.init(PARAMS), X)
    assert audit.count("reduce-scatter") == audit.count("all-gather") == 2
    assert {c.kind for c in audit.collectives} == {"reduce-scatter", "all-gather", "all-reduce"}
    assert sum(c.num_bytes for c in audit.collectives if c.kind == "all-reduce") <= 32


def test_accumulating_microbatches_gives_the_same_numbers() -> None:
    state = train(step_of(optax.adam(1e-2), accumulate=3), 10)
    check_equals_alone(state, truth_of("adam"))


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_holds_its_part_of_the_state_before_and_after_steps(layout: str, n: int) -> None:
    plan = plan_of(n)
    step = step_of(LAYOUTS[layout], plan, donate=False)
    first = step.init(PARAMS)
    then, _ = step(first, X)
    last, _ = step(then, X)
    for state in (first, then, last):
        arrays = [x for x in jax.tree.leaves(state.packed_opt_state) if x.ndim]
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
        assert held <= 2 * parts_bytes(plan)
        for device in jax.devices()[:n]:
            shards = [s for x in arrays for s in x.addressable_shards if s.device == device]
            assert sum(s.data.nbytes for s in shards) == held
    assert [x.sharding for x in jax.tree.leaves(last)] == [x.sharding for x in jax.tree.leaves(first)]
    # What the compiled program takes in on one device: parameters, parts of two moments, rows, scalars.
    taken = step.lower(first, X).compile().memory_analysis().argument_size_in_bytes
    params = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert taken <= params + 2 * parts_bytes(plan) + X.nbytes // n + 64


def test_steps_compile_once(compiles: list[str]) -> None:
    step = step_of(optax.adam(1e-2))
    state, _ = step(step.init(PARAMS), X)
    compiles.clear()
    for _ in range(3):
        state, _ = step(state, X)
    jax.block_until_ready(state)
    assert compiles == []


def model_mesh(kind: AxisType, **sizes: int) -> Mesh:
    return Mesh(
        np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_model_shards_are_divided_further_over_the_data_axis(kind: AxisType, name: str) -> None:
    plan = jaxsync.make_plan(MODEL_PARAMS, model_mesh(kind, data=4, model=2), MODEL_SPECS)
    tx = OPTIMIZERS[name](plan)
    state = train(step_of(tx, plan, model_loss), 10, MODEL_PARAMS)
    true_tx = OPTIMIZERS["optax's clipping"](None) if name == "our clipping" else tx
    params, true_state = alone(true_tx, 10, MODEL_PARAMS, whole_loss)
    structure = jax.tree.structure(jax.eval_shape(tx.init, params))
    true_state = jax.tree.unflatten(structure, jax.tree.leaves(true_state))
    check_equals_alone(state, (params, true_state), MODEL_PARAMS)
    for key, array in state.params.items():
        assert array.sharding.is_equivalent_to(NamedSharding(plan.mesh, MODEL_SPECS[key]), array.ndim)
    moments = [x for x in jax.tree.leaves(state.packed_opt_state) if x.ndim]
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in moments)
    assert held == 2 * parts_bytes(plan)


@pytest.mark.parametrize("axis", [("data", "replica"), ("replica", "data")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parts_lie_along_two_data_axes_with_a_model_axis_between(kind: AxisType, axis: Any) -> None:
    mesh = model_mesh(kind, replica=2, model=2, data=2)
    plan = jaxsync.make_plan(MODEL_PARAMS, mesh, MODEL_SPECS, jaxsync.SyncConfig(axis=axis))
    tx = optax.adam(1e-2)
    state = train(step_of(tx, plan, model_loss), 5, MODEL_PARAMS)
    check_equals_alone(state, alone(tx, 5, MODEL_PARAMS, whole_loss), MODEL_PARAMS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_any_state_is_replaced_by_itself_bit_for_bit(kind: AxisType) -> None:
    """Also where the shown state is divided along a dim, as (7, 16) over eight devices is."""
    params = {"w": RNG.normal(size=(7, 16)).astype(np.float32), "b": np.ones(5, np.float32)}
    for plan, own, loss, own_loss in (
        (
            jaxsync.make_plan(
                params,
                model_mesh(kind, replica=2, data=4),
                config=jaxsync.SyncConfig(axis=("replica", "data")),
            ),
            params,
            any_loss,
            any_loss,
        ),
        (
            jaxsync.make_plan(MODEL_PARAMS, model_mesh(kind, data=4, model=2), MODEL_SPECS),
            MODEL_PARAMS,
            model_loss,
            whole_loss,
        ),
    ):
        step = step_of(optax.adam(1e-2), plan, loss, donate=False)
        state = train(step, 3, own)
        check_equals_alone(state, alone(optax.adam(1e-2), 3, own, own_loss), own)
        shown = state.replace(params=state.params, opt_state=state.opt_state)
        host = state.replace(**jax.device_get({"params": state.params, "opt_state": state.opt_state}))
        for new in (shown, host):
            check_same_bits(new, state)
            assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(state)]


def test_the_shown_state_is_sharded_along_the_first_dim_that_divides() -> None:
    params = {"w": np.ones((7, 16), np.float32), "odd": np.ones((7, 3), np.float32)}
    state = step_of(optax.adam(1e-2), plan_of(params=params), any_loss).init(params)
    moments = state.opt_state[0].mu
    assert moments["w"].sharding.shard_shape((7, 16)) == (7, 2)
    assert moments["odd"].sharding.is_fully_replicated


def test_a_state_moves_between_numbers_of_devices_bit_for_bit() -> None:
    steps = {n: step_of(optax.adam(1e-2), plan_of(n), donate=False) for n in (8, 2, 1)}
    state = start = train(steps[8], 4)
    for n in (2, 1, 8):
        state = steps[n].init(PARAMS).replace(params=state.params, opt_state=state.opt_state)
    check_same_bits((state.params, state.opt_state), (start.params, start.opt_state))
    check_same_bits(steps[8](state, X)[0].packed_params, steps[8](start, X)[0].packed_params)
    plain = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan_of()).init(PARAMS)
    plain = plain.replace(params=start.params, opt_state=start.opt_state)
    check_same_bits(plain.opt_state, start.opt_state)
    check_same_bits(start.replace(opt_state=plain.opt_state), start)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_training_goes_on_from_host_arrays(kind: AxisType) -> None:
    plan = jaxsync.make_plan(MODEL_PARAMS, model_mesh(kind, data=8))
    step = step_of(optax.adam(1e-2), plan, whole_loss, donate=False)
    state = train(step, 2, MODEL_PARAMS)
    host = jax.device_get(state)
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(host))
    check_same_bits(host.params, state.params)
    check_same_bits(host.opt_state, state.opt_state)
    check_same_bits(step(host, X)[0], step(state, X)[0])


def test_a_learning_rate_that_is_set_between_steps_holds() -> None:
    step = step_of(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), donate=False)
    state = train(step, 2)
    opt_state = state.opt_state
    opt_state.hyperparams["learning_rate"] = jnp.float32(0)
    after, _ = step(state.replace(opt_state=opt_state), X)
    check_same_bits(after.params, state.params)


def test_a_state_can_be_shown_inside_a_program() -> None:
    state = train(step_of(optax.adam(1e-2)), 1)
    total = jax.jit(lambda state: state.params["w1"].sum() + state.opt_state[0].mu["w1"].sum())(state)
    want = np.float64(state.params["w1"]).sum() + np.float64(state.opt_state[0].mu["w1"]).sum()
    assert float(total) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_scan_over_steps_equals_the_loop(kind: AxisType) -> None:
    plan = jaxsync.make_plan(MODEL_PARAMS, model_mesh(kind, data=4, model=2), MODEL_SPECS)
    step = step_of(optax.adam(1e-2), plan, model_loss, donate=False)
    state = step.init(MODEL_PARAMS)
    rows = jax.device_put(X, NamedSharding(plan.mesh, plan.batch_spec))
    scanned, metrics = jax.jit(lambda state, x: jax.lax.scan(lambda s, _: step(s, x), state, None, length=4))(
        state, rows
    )
    looped = train(step, 4, MODEL_PARAMS)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(looped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert metrics["loss"].shape == (4,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_every_dtype_keeps_its_numbers(dtype: str) -> None:
    params = {"w": SMALL["w"].astype(dtype), "b": SMALL["b"].astype(dtype), "f": PARAMS["w2"]}
    if dtype == "complex64":
        params["w"] = (SMALL["w"] + 1j * SMALL["w"][::-1]).astype(dtype)

    def loss(params: Any, x: Any) -> jax.Array:
        wide = [p.astype(jnp.promote_types(p.dtype, jnp.float32)) for p in params.values()]
        return sum(jnp.sum(jnp.abs(p - 0.5) ** 2) for p in wide) * jnp.mean(jnp.abs(x))

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-4))
    state = train(step_of(tx, plan_of(params=params), loss), 5, params)
    want, want_state = alone(tx, 5, params, loss)
    rtol = {"bfloat16": 2**-7, "float16": 2**-9, "complex64": 1e-5}[dtype]
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(want_state)
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((want, want_state)), strict=True
    ):
        assert a.dtype == b.dtype
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        np.testing.assert_allclose(
            np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=rtol, atol=1e-5
        )


def test_a_device_without_rows_adds_nothing_even_nan() -> None:
    real = np.ones(48, np.float32)
    real[6:12] = 0  # all rows of the second device
    batch = {"x": np.where(real[:, None] > 0, X, np.nan), "real": real}

    def weighted(params: Any, batch: Any) -> Any:
        count = batch["real"].sum()
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return (hidden.mean(axis=1) * batch["real"]).sum() / count + (params["b"] ** 2).sum(), count

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.tanh(x @ params["w"]).mean() + (params["b"] ** 2).sum()

    step = step_of(optax.adam(1e-2), plan_of(params=SMALL), weighted, weighted=True)
    state = train(step, 3, SMALL, batch)
    check_equals_alone(state, alone(optax.adam(1e-2), 3, SMALL, loss, X[real > 0]), SMALL)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_the_rows_of_one_device_leaves_every_part_as_it_was(layout: str) -> None:
    step = step_of(LAYOUTS[layout], donate=False)
    state = train(step, 2)
    bad = X.copy()
    bad[13] = np.nan  # a row of the third device
    after, metrics = step(state, bad)
    assert not metrics["finite"]
    assert int(after.step) == 3
    for a, b in zip(
        jax.tree.leaves((after.packed_params, after.packed_opt_state)),
        jax.tree.leaves((state.packed_params, state.packed_opt_state)),
        strict=True,
    ):
        for mine, old in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(mine.data).tobytes() == np.asarray(old.data).tobytes()
    good, metrics = step(after, X)
    assert metrics["finite"]
    check_same_bits(good.packed_params, step(state, X)[0].packed_params)


def test_a_donated_state_is_reused() -> None:
    step = step_of(optax.adam(1e-2), donate=True)
    state = train(step, 1)
    held = jax.tree.leaves(state.packed_opt_state)
    _, _ = step(state, X)
    assert all(x.is_deleted() for x in held if x.size)
    with pytest.raises(jaxsync.errors.DeletedArrayError):
        _ = state.opt_state


def test_small_buckets_stay_whole_if_asked() -> None:
    plan = plan_of(shard_min_bytes=100_000)
    step = step_of(OPTIMIZERS["optax's clipping"](None), plan)
    state = train(step, 10)
    check_equals_alone(state, truth_of("optax's clipping"))
    moments = [x for x in jax.tree.leaves(state.packed_opt_state) if x.ndim]
    assert sorted(x.sharding.is_fully_replicated for x in moments) == [False, False, True, True]
    audit = jaxsync.audit(step, state, X)
    assert audit.count("reduce-scatter") == audit.count("all-gather") == 1
    check_same_bits(state.replace(opt_state=state.opt_state), state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["adam", "decay masked by shape"])
def test_used_as_an_optimizer_of_its_own_it_equals_the_whole_one(name: str, kind: AxisType) -> None:
    plan = jaxsync.make_plan(MODEL_PARAMS, model_mesh(kind, data=4, model=2), MODEL_SPECS)
    tx = OPTIMIZERS[name](plan)
    sharded = jaxsync.shard_optimizer(tx, plan)
    place = lambda tree: jax.device_put(  # noqa: E731
        tree, jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), MODEL_SPECS)
    )
    params, want = place(MODEL_PARAMS), MODEL_PARAMS
    state, want_state = sharded.init(params), tx.init(want)
    with jax.set_mesh(plan.mesh):  # a program of which no argument is used has no devices of its own
        jitted = jax.jit(sharded.init)(params)
    check_same_bits(jitted, state)
    pairs = zip(jax.tree.leaves(jitted), jax.tree.leaves(state), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    update = jax.jit(sharded.update)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: np.cos(p * (k + 1)), MODEL_PARAMS)
        updates, state = update(place(grads), state, params)
        true_updates, want_state = tx.update(grads, want_state, want)
        for key in MODEL_PARAMS:
            np.testing.assert_allclose(updates[key], true_updates[key], rtol=1e-5, atol=1e-7)
        params, want = optax.apply_updates(params, updates), optax.apply_updates(want, true_updates)
    held = [x for x in jax.tree.leaves(state) if x.ndim]
    assert not any(x.sharding.is_fully_replicated for x in held)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_is_made_from_parameters_of_any_kind(kind: AxisType) -> None:
    plan = jaxsync.make_plan(SMALL, model_mesh(kind, data=8))
    sharded = jaxsync.shard_optimizer(optax.adagrad(0.1), plan)
    want = sharded.init(SMALL)
    for params in (
        jax.tree.map(jnp.asarray, SMALL),
        jax.device_put(SMALL, NamedSharding(plan.mesh, P())),
        jax.device_put(SMALL, jax.devices()[3]),
    ):
        check_same_bits(sharded.init(params), want)


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str


TREES = {
    "one array": np.ones((3, 5), np.float32),
    "one scalar": np.float32(0.3),
    "nothing": {},
    "only integers": {"n": np.int32(3)},
    "only an empty array": [np.zeros((0, 3), np.float32)],
    "nested tuples": (np.ones((3, 2), np.float32), (np.float32(1), [np.ones(3, np.float32), None])),
    "named tuples": Pair(np.ones((3, 2), np.float32), Pair(np.int32(1), np.ones(9, np.float32))),
    "a class": [Layer(np.ones((3, 5), np.float32), np.ones(5, np.float32), "first")],
    "the name of a hyperparameter": {
        "learning_rate": np.float32(0.3),
        "w": np.ones(3, np.float32),
    },
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "fused") for name in TREES]
    + [("one array", "single"), ("one scalar", "single"), ("a class", "single")],
)
def test_every_tree_of_parameters_is_divided(name: str, layout: str) -> None:
    params = TREES[name]
    if layout == "single":
        tx = optax.adamw(1e-2, mask=is_matrix)
    else:
        tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    state = train(step_of(tx, plan_of(params=params), any_loss), 3, params)
    check_equals_alone(state, alone(tx, 3, params, any_loss), params)


def scaled_by(total: Any) -> optax.GradientTransformation:
    """Updates divided by one number of the whole tree."""

    def fn(updates: Any) -> Any:
        scale = 1 + jnp.abs(total(updates))
        return jax.tree.map(lambda x: -0.1 * x / scale, updates)

    return stateless(fn)


def sum_of(fn: Any) -> optax.GradientTransformation:
    return scaled_by(lambda tree: sum(jnp.sum(fn(x)) for x in jax.tree.leaves(tree)))


def sum_of_state(start: Any, drift: float) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda s, g: 0.9 * s + g * g + drift, state, updates)
        total = sum(jnp.sum(x) for x in jax.tree.leaves(state))
        return jax.tree.map(lambda g: -g / (1 + total), updates), state

    return optax.GradientTransformation(lambda p: jax.tree.map(start, p), update)


SEES_PADDING = {
    "the sum of exponentials": sum_of(jnp.exp),
    "the sum of cosines": sum_of(jnp.cos),
    "the largest": scaled_by(lambda tree: jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, tree))),
    "how many are zero": sum_of(lambda g: (g == 0).astype(g.dtype)),
    "a floor above zero": sum_of(lambda g: jnp.maximum(g, 0.1)),
    "a state that starts from ones": sum_of_state(jnp.ones_like, 0.0),
    "a state that leaves zero": sum_of_state(jnp.zeros_like, 0.1),
    "zero by zero": sum_of(lambda g: g / (jnp.exp(g) - 1)),
    "zero by zero in a square": sum_of(lambda g: g / (1 - jnp.cos(g))),
    "zero times infinity": sum_of(lambda g: g * jax.lax.rsqrt(g * g)),
    "zero times a logarithm": sum_of(lambda g: g * jnp.log(g * g)),
}


@pytest.mark.parametrize("name", SEES_PADDING)
def test_an_optimizer_whose_sums_would_see_padding_is_refused(name: str) -> None:
    with pytest.raises(NotElementwiseError, match="over padding"):
        jaxsync.shard_optimizer(SEES_PADDING[name], plan_of(params=SMALL))


BLIND_TO_PADDING = {
    "one norm for each leaf": stateless(
        lambda u: jax.tree.map(lambda x: -0.1 * x / (1 + jnp.sqrt(jnp.sum(x * x))), u)
    ),
    "the sum": sum_of(lambda g: g),
    "the sum of squares": sum_of(lambda g: g * g),
    "the sum of magnitudes": sum_of(jnp.abs),
    "the sum of what is positive": sum_of(lambda g: jnp.where(g > 0, g, 0.0)),
    "a state that stays zero": sum_of_state(jnp.zeros_like, 0.0),
    "a state that starts as the parameter": sum_of_state(lambda p: p, 0.0),
}


@pytest.mark.parametrize("name", BLIND_TO_PADDING)
def test_sums_that_zeros_do_not_change_are_right(name: str) -> None:
    tx = BLIND_TO_PADDING[name]
    state = train(step_of(tx, plan_of(params=SMALL), any_loss), 5, SMALL)
    check_equals_alone(state, alone(tx, 5, SMALL, any_loss), SMALL)


def each(fn: Any) -> optax.GradientTransformation:
    return stateless(lambda updates: jax.tree.map(fn, updates))


NOT_ELEMENTWISE = {
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "novograd": optax.novograd(1e-2),
    "sm3": optax.sm3(1e-2),
    "lbfgs": optax.scale_by_lbfgs(),
    "noise": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "the mean of a leaf": each(lambda x: x - jnp.mean(x)),
    "sums along a dim": each(lambda x: x - jnp.sum(x, axis=-1, keepdims=True)),
    "running sums": each(lambda x: jnp.cumsum(x).reshape(x.shape)),
    "flips": each(jnp.flip),
    "sorts": each(lambda x: jnp.sort(x, axis=None).reshape(x.shape)),
    "column order": each(lambda x: jnp.reshape(x, x.shape, order="F")),
    "a permuting reshape": each(lambda x: jax.lax.reshape(x, x.shape, tuple(reversed(range(x.ndim))))),
    "positions": each(lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)),
    "constants of a leaf's shape": stateless(
        lambda u: {"w": u["w"] * jnp.arange(21.0).reshape(7, 3), "b": u["b"]}
    ),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_optimizer_that_looks_at_more_than_one_element_is_refused(name: str) -> None:
    with pytest.raises(NotElementwiseError, match=r"^shard_optimizer cannot divide this optimizer"):
        jaxsync.shard_optimizer(NOT_ELEMENTWISE[name], plan_of(params=SMALL))


def test_an_optimizer_that_moves_updates_between_leaves_is_refused() -> None:
    """Leaves of one shape that are sharded differently are cut in different orders."""
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    params = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}

    def swapped(updates: Any) -> Any:
        treedef = jax.tree.structure(updates)
        return jax.tree.unflatten(treedef, jax.tree.leaves(updates)[::-1])

    for specs in ({"a": P("model"), "b": P()}, {"a": P(), "b": P()}):
        plan = jaxsync.make_plan(params, mesh, specs)
        with pytest.raises(NotElementwiseError):
            jaxsync.shard_optimizer(stateless(swapped), plan)


def test_the_refusal_names_the_leaf_and_the_operation_and_says_what_to_do() -> None:
    params = {"layers": [{"w": np.ones((7, 3), np.float32)}, {"w": np.ones(5, np.float32)}]}
    with pytest.raises(NotElementwiseError) as caught:
        jaxsync.shard_optimizer(each(lambda x: jnp.cumsum(x).reshape(x.shape)), plan_of(params=params))
    assert str(caught.value) == (
        "shard_optimizer cannot divide this optimizer: its results are not elementwise.\n"
        "  - updates of params['layers'][0]['w']: cumsum\n"
        "  - updates of params['layers'][1]['w']: cumsum\n"
        "To fix it: use an elementwise optimizer (sgd, momentum, adam, adamw, lion, rmsprop, also with "
        "schedules, masks, inject_hyperparams and clipping by the global norm); or give this one to "
        "make_train_step as it is, with its state on every device."
    )


@pytest.mark.parametrize(
    ("tx", "plan", "message"),
    [
        (None, plan_of(), "got tx = a NoneType; wanted an optimizer with init and update."),
        (optax.sgd(0.1), None, "got plan = a NoneType; wanted a SyncPlan."),
    ],
)
def test_arguments_of_another_kind_are_refused(tx: Any, plan: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        jaxsync.shard_optimizer(tx, plan)
    assert str(caught.value) == (
        f"shard_optimizer {message}\n"
        "To fix it: see help(jaxsync.shard_optimizer) for what each argument is, and their order."
    )


def test_an_optimizer_is_divided_once() -> None:
    sharded = jaxsync.shard_optimizer(optax.sgd(0.1), plan_of())
    with pytest.raises(ArgumentError, match="ShardedOptimizer"):
        jaxsync.shard_optimizer(sharded, plan_of())


OTHER_PLANS = {
    "fewer devices": lambda: plan_of(4),
    "other buckets": lambda: plan_of(fuse_max_bytes=0),
    "another tree": lambda: plan_of(params={"w1": PARAMS["w1"]}),
    "another order of devices": lambda: jaxsync.make_plan(PARAMS, Mesh(jax.devices()[::-1], ("data",))),
    "another sum": lambda: plan_of(reduce="sum"),
}


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_a_step_refuses_an_optimizer_of_another_plan(name: str) -> None:
    sharded = jaxsync.shard_optimizer(optax.adam(1e-2), OTHER_PLANS[name]())
    with pytest.raises(ArgumentError, match="plan"):
        jaxsync.make_train_step(loss_fn, sharded, plan_of())


def test_a_step_takes_an_optimizer_of_an_equal_plan() -> None:
    sharded = jaxsync.shard_optimizer(optax.adam(1e-2), plan_of())
    state = train(jaxsync.make_train_step(loss_fn, sharded, plan_of()), 1)
    assert int(state.step) == 1


def test_pmap_has_no_parts() -> None:
    with pytest.raises(ArgumentError, match="shard_map"):
        step_of(optax.adam(1e-2), transform="pmap")


def test_a_plan_without_devices_can_be_asked_and_not_run() -> None:
    plan = jaxsync.make_plan(SMALL, jax.sharding.AbstractMesh((8,), ("data",)))
    sharded = jaxsync.shard_optimizer(optax.adam(1e-2), plan)
    with pytest.raises(jaxsync.errors.MeshError, match="AbstractMesh"):
        jaxsync.make_train_step(any_loss, sharded, plan)
    with pytest.raises(jaxsync.errors.MeshError, match="AbstractMesh"):
        sharded.init(SMALL)


def test_a_loop_that_awaits_nothing_ends(run_python) -> None:
    result = run_python(
        """
        import jax, jax.numpy as jnp, numpy as np, optax, jaxsync

        jaxsync.simulate_devices(8)
        params = {"w": np.ones((7, 3), np.float32), "b": np.ones(3, np.float32)}
        plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
        loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
        step = jaxsync.make_train_step(loss_fn, jaxsync.shard_optimizer(optax.adam(1e-3), plan), plan)
        state, x = step.init(params), np.ones((16, 7), np.float32)
        for k in range(300):
            state, metrics = step(state, x)
            if k % 100 == 50:
                state.opt_state
        print(int(state.step))
        """
    )
    assert (result.returncode, result.stdout) == (0, "300\n"), result.stderr
