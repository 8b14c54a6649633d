"""TrainStep: the same training as on one device, in one reduction, compiled once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import (
    AliasedArrayError,
    AlreadyReducedError,
    ArgumentError,
    BatchError,
    DeletedArrayError,
    DispatchError,
    LossError,
    MeshError,
    ReplicaMismatchError,
    TreeMismatchError,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype(np.float32)
Y = RNG.normal(size=(48, 2)).astype(np.float32)
BATCH = {"x": X, "y": Y}
PARAMS = {
    "w1": RNG.normal(size=(6, 8)).astype(np.float32),
    "w2": RNG.normal(size=(8, 2)).astype(np.float32),
    "b": np.zeros(2, np.float32),
}
SPECS = {"w1": P(None, "model"), "w2": P("model", None), "b": P()}


def forward(params: Any, batch: Any, total: Any = lambda y: y) -> jax.Array:
    return total(jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]) + params["b"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((forward(params, batch) - batch["y"]) ** 2)


def model_loss_fn(params: Any, batch: Any) -> jax.Array:
    total = lambda y: jax.lax.psum(y, "model")  # noqa: E731
    return jnp.mean((forward(params, batch, total) - batch["y"]) ** 2)


def alone(tx: Any, steps: int, params: Any = PARAMS, batch: Any = BATCH) -> tuple[Any, list[float]]:
    """The truth: plain optax on one device."""

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, losses


def together(step: jaxsync.TrainStep, steps: int, params: Any = PARAMS, batch: Any = BATCH) -> Any:
    state, losses = step.init(params), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def plan_of(n: int = 8, params: Any = PARAMS, **config: Any) -> jaxsync.SyncPlan:
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": n}), config=jaxsync.SyncConfig(**config))


def check_close(got: Any, truth: Any, rtol: float = 1e-4) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_training_equals_training_on_one_device(transform, n: int, accumulate: int) -> None:
    tx = optax.adam(1e-2)
    plan = plan_of(n)
    step = jaxsync.make_train_step(loss_fn, tx, plan, accumulate=accumulate, transform=transform)
    state, losses = together(step, 10)
    params, true_losses = alone(tx, 10)
    check_close(state.params, params)
    np.testing.assert_allclose(losses, true_losses, rtol=1e-5)
    assert int(state.step) == 10
    audit = jaxsync.audit(step, state, BATCH)
    assert audit.count("all-reduce") == len(audit.collectives) == plan.num_all_reduces
    assert audit.in_loop == ()


OPTIMIZERS = {
    "adam": (lambda plan: optax.adam(1e-2), optax.adam(1e-2)),
    "our clipping": (
        lambda plan: optax.chain(jaxsync.clip_by_global_norm(0.5, plan), optax.adam(1e-2)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    ),
    "optax's clipping": (
        lambda plan: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    ),
    "lamb, which looks at whole leaves": (lambda plan: optax.lamb(1e-2), optax.lamb(1e-2)),
    "a masked schedule": (
        lambda plan: optax.adamw(
            optax.linear_schedule(1e-2, 0, 10), mask={"w1": True, "w2": False, "b": False}
        ),
        optax.adamw(optax.linear_schedule(1e-2, 0, 10), mask={"w1": True, "w2": False, "b": False}),
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_model_parallel_training_equals_training_on_one_device(kind: AxisType, optimizer: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind, kind))
    plan = jaxsync.make_plan(PARAMS, mesh, SPECS)
    make_tx, true_tx = OPTIMIZERS[optimizer]
    state, losses = together(jaxsync.make_train_step(model_loss_fn, make_tx(plan), plan), 10)
    params, true_losses = alone(true_tx, 10)
    check_close(state.params, params)
    np.testing.assert_allclose(losses, true_losses, rtol=1e-5)
    for name, array in state.params.items():
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), array.ndim)


def test_optimizer_state_is_sharded_like_its_parameter() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan(PARAMS, mesh, SPECS)
    step = jaxsync.make_train_step(model_loss_fn, optax.adam(1e-2), plan)
    state = step.init(PARAMS)
    for _ in range(2):
        adam = state.opt_state[0]
        for name in PARAMS:
            assert adam.mu[name].sharding.is_equivalent_to(
                NamedSharding(mesh, SPECS[name]), adam.mu[name].ndim
            )
        assert adam.count.sharding.is_fully_replicated
        state, _ = step(state, BATCH)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("rows", ["numpy", "uncommitted", "one device", "placed", "model-placed"])
def test_a_batch_comes_from_anywhere(kind: AxisType, rows: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind, kind))
    plan = jaxsync.make_plan(PARAMS, mesh, SPECS)
    put = {
        "numpy": lambda x: x,
        "uncommitted": jnp.asarray,
        "one device": lambda x: jax.device_put(x, jax.devices()[3]),
        "placed": lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))),
        "model-placed": lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "model"))),
    }[rows]
    step = jaxsync.make_train_step(model_loss_fn, optax.sgd(0.1), plan)
    _, losses = together(step, 2, batch=jax.tree.map(put, BATCH))
    np.testing.assert_allclose(losses, alone(optax.sgd(0.1), 2)[1], rtol=1e-5)


def test_two_data_axes_and_a_sum() -> None:
    mesh = jaxsync.make_mesh({"replica": 2, "data": 4})
    config = jaxsync.SyncConfig(axis=("replica", "data"), reduce="sum")
    plan = jaxsync.make_plan(PARAMS, mesh, config=config)
    state, losses = together(jaxsync.make_train_step(loss_fn, optax.sgd(0.1 / 8), plan), 5)
    params, true_losses = alone(optax.sgd(0.1), 5)
    check_close(state.params, params)
    np.testing.assert_allclose(np.array(losses) / 8, true_losses, rtol=1e-5)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_and_aux_are_means_over_real_rows(transform, accumulate: int) -> None:
    """40 real rows of 48: the others weigh nothing, wherever they are and whatever they hold."""
    real = np.ones(48, np.float32)
    real[[3, 4, 5, 11, 42, 43, 44, 47]] = 0
    padded = {"x": np.where(real[:, None] > 0, X, np.nan), "y": Y, "real": real}
    rows = {name: value[real > 0] for name, value in BATCH.items()}

    def weighted_loss(params: Any, batch: Any) -> Any:
        x = jnp.where(batch["real"][:, None] > 0, batch["x"], 0.0)
        errors = ((forward(params, {"x": x}) - batch["y"]) ** 2).mean(axis=1)
        count = batch["real"].sum()
        loss = (errors * batch["real"]).sum() / count
        return (loss, count), {"loss": loss, "x": (x * batch["real"][:, None]).sum(axis=0) / count}

    step = jaxsync.make_train_step(
        weighted_loss,
        optax.sgd(0.1),
        plan_of(),
        accumulate=accumulate,
        transform=transform,
        weighted=True,
        has_aux=True,
    )
    state = step.init(PARAMS)
    state, metrics = step(state, padded)
    params, [true_loss] = alone(optax.sgd(0.1), 1, batch=rows)
    check_close(state.params, params)
    assert float(metrics["loss"]) == pytest.approx(true_loss, rel=1e-5)
    assert float(metrics["aux"]["loss"]) == pytest.approx(true_loss, rel=1e-5)
    np.testing.assert_allclose(metrics["aux"]["x"], rows["x"].mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_scalar_in_the_batch_goes_to_every_device_and_microbatch() -> None:
    def scaled(params: Any, batch: Any) -> jax.Array:
        return batch["scale"] * loss_fn(params, batch)

    for transform in ("shard_map", "pmap"):
        step = jaxsync.make_train_step(scaled, optax.sgd(0.1), plan_of(), accumulate=2, transform=transform)
        _, metrics = step(step.init(PARAMS), {**BATCH, "scale": 2.0})
        assert float(metrics["loss"]) == pytest.approx(2 * alone(optax.sgd(0.1), 1)[1][0], rel=1e-5)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_accumulates_in_float32(transform, dtype: str) -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16; over microbatches as over devices the sum is 259."""
    params = {"w": jnp.zeros((), dtype)}
    plan = plan_of(2, params, reduce="sum")
    rows = np.array([256, 1, 1, 1, 0, 0, 0, 0], np.float32).repeat(1)
    step = jaxsync.make_train_step(
        lambda p, x: (p["w"] * x.astype(p["w"].dtype)).sum(),
        optax.sgd(1.0),
        plan,
        accumulate=4,
        transform=transform,
    )
    state, _ = step(step.init(params), rows)
    assert state.params["w"].dtype == jnp.dtype(dtype)
    assert float(state.params["w"]) == -float(jnp.asarray(259 / 4, dtype))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_bad_device_stops_the_update_on_all(transform, poison: float) -> None:
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan_of(), transform=transform, donate=False)
    state, _ = step(step.init(PARAMS), BATCH)
    bad = {"x": X.copy(), "y": Y}
    bad["x"][7, 2] = poison
    after, metrics = step(state, bad)
    assert not bool(metrics["finite"])
    for old, new in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((after.params, after.opt_state)),
        strict=True,
    ):
        for shard in new.addressable_shards:
            np.testing.assert_array_equal(shard.data, old)
    assert int(after.step) == 2
    assert bool(step(after, BATCH)[1]["finite"])


def test_a_bad_model_shard_is_seen_by_all_and_costs_one_small_reduction() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan({"v": jnp.ones(4)}, mesh, P("model"))

    def one_shard_overflows(params: Any, x: jax.Array) -> jax.Array:
        is_last = (jax.lax.axis_index("model") == 1).astype(jnp.float32)
        return jax.lax.psum((params["v"] * (1 + is_last * x.mean() * 1e38) * 1e5).sum(), "model")

    step = jaxsync.make_train_step(one_shard_overflows, optax.sgd(0.1), plan)
    state, metrics = step(step.init({"v": jnp.ones(4)}), jnp.ones(8))
    assert not bool(metrics["finite"])
    np.testing.assert_array_equal(state.params["v"], jnp.ones(4))
    small = [c for c in jaxsync.audit(step, state, jnp.ones(8)).collectives if c.axes == ("model",)]
    assert min(c.num_bytes for c in small) <= 4


def test_without_skipping_the_bad_values_arrive() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(), skip_nonfinite=False)
    state, metrics = step(step.init(PARAMS), {"x": X * np.nan, "y": Y})
    assert not bool(metrics["finite"])
    assert bool(jnp.isnan(state.params["w1"]).all())


MIXED = {
    "w": np.ones(6, np.float32),
    "weak": jnp.asarray(2.0),
    "n": jnp.arange(3),
    "key": jax.random.key(1),
    "raw": jax.random.PRNGKey(1),
    "none": None,
    "empty": jnp.zeros((0, 2)),
    "flag": jnp.array(True),
    "z": jnp.ones(2, jnp.complex64),
    "h": jnp.ones(3, jnp.bfloat16),
}


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_a_tree_of_every_kind_of_leaf_trains_what_can_be_trained(transform) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        total = (x @ params["w"]).mean() + params["weak"] ** 2 + (jnp.abs(params["z"]) ** 2).sum()
        return total + params["h"].astype(jnp.float32).sum()

    plan = plan_of(params=MIXED)
    step = jaxsync.make_train_step(loss, optax.adam(0.1), plan, transform=transform)
    state = step.init(MIXED)
    for _ in range(2):
        state, _ = step(state, X)
    got = state.params
    for name in ("n", "raw", "empty", "flag"):
        np.testing.assert_array_equal(got[name], MIXED[name])
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(MIXED["key"]))
    assert got["none"] is None
    for name in ("w", "weak", "z", "h"):
        assert not np.array_equal(got[name], MIXED[name])
        assert got[name].dtype == MIXED[name].dtype
        assert not got[name].weak_type


def test_the_callers_arrays_outlive_donation_and_one_array_may_stand_twice() -> None:
    w = jax.device_put(jnp.ones((6, 2)), NamedSharding(jaxsync.make_mesh({"data": 8}), P()))
    params = {"a": w, "b": w}
    plan = plan_of(params=params)
    step = jaxsync.make_train_step(
        lambda p, b: jnp.mean((b["x"] @ (p["a"] + p["b"]) - b["y"]) ** 2), optax.sgd(0.1), plan
    )
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, BATCH)
    np.testing.assert_array_equal(w, np.ones((6, 2)))
    np.testing.assert_array_equal(state.params["a"], state.params["b"])


def test_an_optimizer_that_keeps_the_parameters_shares_no_buffer_with_them() -> None:
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    keep = optax.GradientTransformation(
        lambda p: p, lambda u, s, p=None: (jax.tree.map(lambda x: -0.1 * x, u), s)
    )
    assert tx is not None
    step = jaxsync.make_train_step(loss_fn, keep, plan_of())
    state, losses = together(step, 3)
    np.testing.assert_allclose(losses, alone(optax.sgd(0.1), 3)[1], rtol=1e-5)
    np.testing.assert_array_equal(state.opt_state["w1"], PARAMS["w1"])


def test_a_state_that_was_donated_is_named() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of())
    old = step.init(PARAMS)
    step(old, BATCH)
    with pytest.raises(DeletedArrayError) as caught:
        step(old, BATCH)
    assert caught.value.leaves == (
        "state.step",
        "state.params['b'] and 2 more",
    )
    with pytest.raises(DeletedArrayError) as caught:
        _ = old.params
    assert caught.value.leaves == ("state.params['b'] and 2 more",)


def test_a_donated_state_that_holds_an_array_twice_is_refused() -> None:
    plan = plan_of(params={"a": jnp.ones(3), "b": jnp.ones(3)}, fuse_max_bytes=0)
    step = jaxsync.make_train_step(lambda p, x: (p["a"] + p["b"]).sum(), optax.sgd(0.1), plan)
    state = step.init({"a": jnp.ones(3), "b": jnp.ones(3)})
    packed = state.packed_params
    shared = dataclasses.replace(state, packed_params=packed.with_arrays([packed.arrays[0]] * 2))
    with pytest.raises(AliasedArrayError) as caught:
        step(shared, np.ones(8, np.float32))
    assert caught.value.leaves == (("state.params['b']", "state.params['a']"),)
    with pytest.raises(AliasedArrayError) as caught:
        step(state, {"x": np.ones(8, np.float32), "w": state.params["a"]})
    assert caught.value.leaves == (("state.params['a']", "another argument"),)


def test_one_array_may_stand_twice_in_a_batch() -> None:
    rows = jax.device_put(X[:, :2], NamedSharding(jaxsync.make_mesh({"data": 8}), P("data")))
    params = {"w": jnp.ones((2, 2))}
    loss = lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2)  # noqa: E731
    step = jaxsync.make_train_step(loss, optax.sgd(0.1), plan_of(params=params))
    _, metrics = step(step.init(params), {"x": rows, "y": rows})
    assert float(metrics["loss"]) == pytest.approx(
        np.mean((X[:, :2] @ np.ones((2, 2)) - X[:, :2]) ** 2), rel=1e-5
    )


def test_without_donation_a_state_can_be_used_again() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(), donate=False)
    state = step.init(PARAMS)
    first, again = step(state, BATCH)[0], step(state, BATCH)[0]
    np.testing.assert_array_equal(first.params["w1"], again.params["w1"])


def test_replicas_that_differ_are_refused_before_they_train() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    pieces = [jax.device_put(jnp.full(3, float(i > 0)), d) for i, d in enumerate(mesh.devices.flat)]
    w = jax.make_array_from_single_device_arrays((3,), NamedSharding(mesh, P()), pieces)
    plan = jaxsync.make_plan({"w": w}, mesh)
    step = jaxsync.make_train_step(lambda p, x: (p["w"] * x.mean()).sum(), optax.sgd(0.1), plan)
    with pytest.raises(ReplicaMismatchError) as caught:
        step.init({"w": w})
    assert caught.value.leaves == (("['w']", str(mesh.devices[0]), str(mesh.devices[1])),)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_batch_that_cannot_be_divided_is_named(transform, accumulate: int) -> None:
    step = jaxsync.make_train_step(
        loss_fn, optax.sgd(0.1), plan_of(), accumulate=accumulate, transform=transform
    )
    state = step.init(PARAMS)
    with pytest.raises(BatchError) as caught:
        step(state, {"x": X[:20], "y": Y[:24]})
    assert caught.value.divisor == 8 * accumulate
    assert caught.value.leaves[0] == ("['x']", "(20, 6)", f"20 rows are no multiple of {8 * accumulate}")
    if accumulate == 4:  # 40 rows divide over the devices, and not over their microbatches
        placed = jax.device_put(X[:40], NamedSharding(jaxsync.make_mesh({"data": 8}), P("data")))
        with pytest.raises(BatchError):
            step(state, {"x": placed, "y": placed[:, :2]})


def test_what_is_no_state_is_named_and_an_answer_that_was_not_unpacked_is_known() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of())
    batch = {"x": X[:16], "y": Y[:16]}
    with pytest.raises(ArgumentError) as caught:
        step(PARAMS, batch)
    assert (caught.value.got, caught.value.wanted) == ("a dict", "what step.init made")
    fix = "first state = step.init(params); see help(jaxsync.TrainStep.__call__) for what each argument is"
    assert fix in str(caught.value)
    with pytest.raises(ArgumentError) as caught:
        step(None, batch)
    assert caught.value.fix().startswith("see help(jaxsync.TrainStep.__call__)")
    described = inspect.getdoc(jaxsync.TrainStep.__call__)
    assert all(f"\n    {name}: " in described for name in ("state", "batch"))
    state = step(step.init(PARAMS), batch)
    with pytest.raises(
        ArgumentError, match=r"got state = a tuple; wanted the first of the two .* state, metrics = "
    ):
        step(state, batch)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_100_steps_compile_once(compiles: list[str], transform, kind: AxisType) -> None:
    plan = jaxsync.make_plan(PARAMS, Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,)))
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan, transform=transform)
    state = step.init(PARAMS)
    for i in range(102):
        if i == 2:  # once for host rows, once for placed ones
            compiles.clear()
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,))  # an equal, fresh mesh
        batch = BATCH if i % 2 else jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        state, metrics = step(state, batch)
    float(metrics["loss"])
    assert compiles == []


def test_a_plan_made_anew_from_an_equal_tree_is_the_same_to_jit(compiles: list[str]) -> None:
    def sync(plan: jaxsync.SyncPlan, grads: Any) -> Any:
        mapped = jax.shard_map(
            lambda g: jaxsync.sync_gradients(jax.tree.map(lambda x: x[0], g), plan),
            mesh=plan.mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
        return mapped(grads)

    compiled, stacked = jax.jit(sync, static_argnums=0), jax.tree.map(lambda x: np.stack([x] * 8), PARAMS)
    compiled(plan_of(), stacked)
    compiles.clear()
    for _ in range(5):
        compiled(plan_of(), stacked)
    assert compiles == []


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_syncing_in_the_optimizer_of_a_step_is_refused(transform) -> None:
    plan = plan_of(reduce="sum")
    tx = optax.chain(jaxsync.synchronize(plan), optax.sgd(0.1))
    step = jaxsync.make_train_step(loss_fn, tx, plan, transform=transform)
    with pytest.raises(AlreadyReducedError) as caught:
        step(step.init(PARAMS), BATCH)
    assert caught.value.leaves == ("['b']", "['w1']", "['w2']")


def test_a_loss_that_model_shards_do_not_agree_on_is_refused() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan(PARAMS, mesh, SPECS)
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)  # without the sum over model shards
    with pytest.raises(LossError) as caught:
        step(step.init(PARAMS), BATCH)
    assert caught.value.got == "a loss that differs along ['model']"
    assert caught.value.function == f"loss_fn (test_step.py:{loss_fn.__code__.co_firstlineno})"


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, lambda fn: functools.partial(fn, power=1)])
def test_a_loss_that_is_no_scalar_is_named_with_its_place(wrap) -> None:
    def rows(params: Any, batch: Any, power: int = 2) -> jax.Array:
        return (forward(params, batch) - batch["y"]).sum(axis=1) ** power

    step = jaxsync.make_train_step(wrap(rows), optax.sgd(0.1), plan_of())
    line = rows.__code__.co_firstlineno
    with pytest.raises(LossError, match=rf"^rows \(test_step.py:{line}\) returned float32\[6\]; wanted"):
        step(step.init(PARAMS), BATCH)


def test_a_loss_without_a_place_is_called_what_the_docs_call_it() -> None:
    class Loss:
        def __call__(self, params: Any, batch: Any) -> str:
            return "text"

    step = jaxsync.make_train_step(Loss(), optax.sgd(0.1), plan_of())
    with pytest.raises(LossError, match=r"^loss_fn returned a str; wanted a real float scalar loss"):
        step(step.init(PARAMS), BATCH)


def test_aux_that_has_no_mean_is_refused() -> None:
    step = jaxsync.make_train_step(
        lambda p, b: (loss_fn(p, b), {"count": jnp.int32(3)}), optax.sgd(0.1), plan_of(), has_aux=True
    )
    with pytest.raises(LossError, match=r"aux\['count'\], a int32 array"):
        step(step.init(PARAMS), BATCH)


def test_other_parameters_than_the_plans_are_refused() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of())
    with pytest.raises(TreeMismatchError, match=r"params\['b'\] is missing"):
        step.init({name: PARAMS[name] for name in ("w1", "w2")})


def test_settings_that_cannot_work_are_refused_when_the_step_is_made() -> None:
    plan = plan_of()
    with pytest.raises(ArgumentError, match="accumulate = 0; wanted an int of 1 or more"):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan, accumulate=0)
    with pytest.raises(ArgumentError, match="transform = 'vmap'"):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan, transform="vmap")  # type: ignore[arg-type]
    with pytest.raises(DispatchError):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(max_in_flight=40))
    two = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 4, "model": 2}))
    with pytest.raises(MeshError, match="transform='pmap' has one axis"):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), two, transform="pmap")
    abstract = jaxsync.make_plan(PARAMS, jax.sharding.AbstractMesh((8,), ("data",)))
    with pytest.raises(MeshError, match="it is an AbstractMesh"):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), abstract)


def test_a_state_is_a_plain_pytree() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan_of(), donate=False)
    state = step.init(PARAMS)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".step" in paths
    assert ".params['b'] and 2 more" in paths
    assert ".opt_state[0].mu['b'] and 2 more" in paths
    host = jax.device_get(state)
    next_state, _ = step(host, BATCH)  # a checkpoint read back as host arrays
    check_close(next_state.params, step(state, BATCH)[0].params)


def test_a_scan_over_steps_is_the_loop() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan_of(), donate=False)
    state = step.init(PARAMS)
    batches = jax.tree.map(lambda x: np.stack([x, 2 * x, -x]), BATCH)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    for index in range(3):
        state, single = step(state, jax.tree.map(lambda x, index=index: x[index], batches))
        assert float(single["loss"]) == pytest.approx(float(metrics["loss"][index]), rel=1e-6)
    check_close(scanned.params, state.params)


def test_optimizer_state_may_hold_random_keys() -> None:
    tx = optax.chain(optax.add_noise(eta=1e-3, gamma=0.5, key=jax.random.key(3)), optax.sgd(0.1))
    step = jaxsync.make_train_step(loss_fn, tx, plan_of(), donate=False)
    state, _ = step(step.init(PARAMS), BATCH)
    skipped, metrics = step(state, {"x": X * np.nan, "y": Y})
    assert not bool(metrics["finite"])
    for old, new in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(skipped.opt_state), strict=True):
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            old, new = jax.random.key_data(old), jax.random.key_data(new)
        np.testing.assert_array_equal(old, new)


def test_updates_of_another_dtype_are_added_in_the_parameters_own() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    wide = optax.GradientTransformation(
        lambda p: optax.EmptyState(),
        lambda u, s, p=None: (jax.tree.map(lambda x: -0.5 * x.astype(jnp.float32), u), s),
    )
    with jax.numpy_dtype_promotion("strict"):
        loss = lambda p, x: (p["w"] * x.mean().astype(jnp.bfloat16)).sum()  # noqa: E731
        step = jaxsync.make_train_step(loss, wide, plan_of(params=params))
        state, _ = step(step.init(params), np.ones(8, np.float32))
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.params["w"].astype(jnp.float32), 0.5 * np.ones(3))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("bad", [np.nan, -5.0])
def test_a_weight_that_is_none_is_seen_and_never_taken_for_zero(transform, bad: float) -> None:
    weighted = lambda p, b: (loss_fn(p, b), b["w"].sum())  # noqa: E731
    step = jaxsync.make_train_step(weighted, optax.sgd(1.0), plan_of(), weighted=True, transform=transform)
    weights = np.ones(48, np.float32)
    weights[:6] = bad
    state, metrics = step(step.init(PARAMS), {**BATCH, "w": weights})
    assert not bool(metrics["finite"])
    np.testing.assert_array_equal(state.params["w1"], PARAMS["w1"])


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("is_placed", [True, False])
def test_leaves_of_different_rows_are_refused_and_not_broadcast(transform, is_placed: bool) -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(), transform=transform)
    batch = {"x": X[:16], "y": Y[:8], "z": X[:16]}
    if is_placed:
        batch = jax.device_put(batch, NamedSharding(jaxsync.make_mesh({"data": 8}), P("data")))
    with pytest.raises(BatchError) as caught:
        step(step.init(PARAMS), batch)
    assert caught.value.leaves == (("['y']", "(8, 2)", "8 rows, where other leaves have 16"),)


def test_a_batch_without_rows_is_refused() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of())
    with pytest.raises(BatchError, match=r"\['x'\] \(0, 6\): it has no rows"):
        step(step.init(PARAMS), {"x": X[:0], "y": Y[:0]})


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_a_host_buffer_may_be_refilled_at_once(transform) -> None:
    """JAX borrows aligned NumPy memory; each step must see the rows it was called with."""
    memory = np.zeros(64 * 3000 + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    buffer = memory[start : start + 64 * 3000].reshape(64, 3000)
    params = {"w": np.float32(1)}
    step = jaxsync.make_train_step(
        lambda p, x: 0 * p["w"] + x.mean(), optax.sgd(0.1), plan_of(params=params), transform=transform
    )
    state, losses = step.init(params), []
    for i in range(30):
        buffer[:] = i
        state, metrics = step(state, buffer)
        losses.append(metrics["loss"])
    assert [float(x) for x in losses] == list(range(30))


def test_a_state_of_another_model_is_refused_even_if_its_shapes_fit() -> None:
    first, second = {"enc": jnp.ones(3), "head": jnp.zeros(3)}, {"a": jnp.ones(3), "body": jnp.zeros(3)}
    loss = lambda p, x: sum(v.sum() for v in p.values()) * x.mean()  # noqa: E731
    one = jaxsync.make_train_step(loss, optax.sgd(0.1), plan_of(params=first))
    other = jaxsync.make_train_step(loss, optax.sgd(0.1), plan_of(params=second))
    with pytest.raises(TreeMismatchError) as caught:
        other(one.init(first), np.ones(8, np.float32))
    assert "state.params['enc'] is not in the plan" in caught.value.problems


@pytest.mark.parametrize("accumulate", [1, 4])
def test_low_precision_aux_is_averaged_in_float32(accumulate: int) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (loss_fn(params, batch), 100.0), {"a": jnp.float16(30000), "b": jnp.bfloat16(3)}

    step = jaxsync.make_train_step(
        loss, optax.sgd(0.1), plan_of(2), accumulate=accumulate, weighted=True, has_aux=True
    )
    _, metrics = step(step.init(PARAMS), BATCH)
    assert (float(metrics["aux"]["a"]), float(metrics["aux"]["b"])) == (30000.0, 3.0)
    assert metrics["aux"]["a"].dtype == jnp.float16


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_complex_parameter_that_the_loss_does_not_use_compiles(accumulate: int) -> None:
    """The all-reduce of a complex constant ends the process in XLA's simplifier."""
    params = {"z": jnp.ones(3, jnp.complex64), "w": jnp.ones(3)}
    plan = plan_of(2, params)
    step = jaxsync.make_train_step(
        lambda p, x: (p["w"] * x.mean()).sum(), optax.sgd(0.5), plan, accumulate=accumulate
    )
    state, _ = step(step.init(params), np.ones(8, np.float32))
    np.testing.assert_array_equal(state.params["z"], params["z"])
    np.testing.assert_array_equal(state.params["w"], 0.5 * np.ones(3))


@pytest.mark.parametrize(
    ("update", "problem"),
    [
        (lambda u: {"a": u["a"]}, "updates['b'] is missing"),
        (lambda u: {"a": u["a"], "b": jnp.float32(1)}, "updates['b'] has shape (); wanted (3,)"),
        (lambda u: {**u, "c": u["a"]}, "updates['c'] is not in the plan"),
    ],
)
def test_an_optimizer_that_returns_another_tree_is_refused(update, problem: str) -> None:
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    tx = optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (update(u), s))
    step = jaxsync.make_train_step(lambda p, x: (p["a"] + p["b"]).sum(), tx, plan_of(params=params))
    with pytest.raises(TreeMismatchError) as caught:
        step(step.init(params), np.ones(8, np.float32))
    assert caught.value.problems == (problem,)


def test_an_update_may_be_a_number() -> None:
    params = {"a": jnp.float32(1)}
    tx = optax.GradientTransformation(lambda p: (), lambda u, s, p=None: ({"a": -0.5}, s))
    step = jaxsync.make_train_step(lambda p, x: p["a"] * x.mean(), tx, plan_of(params=params))
    assert float(step(step.init(params), np.ones(8, np.float32))[0].params["a"]) == 0.5


@pytest.mark.parametrize("is_sharded", [False, True])
def test_training_goes_on_with_another_optimizer(is_sharded: bool) -> None:
    plan = plan_of(shard_min_bytes=0)
    fast, slow = (
        jaxsync.shard_optimizer(tx, plan) if is_sharded else tx for tx in (optax.adam(1e-1), optax.adam(1e-3))
    )
    step = jaxsync.make_train_step(loss_fn, fast, plan, accumulate=2)
    slower = step.replace(tx=slow)
    assert (step.tx, slower.tx, slower.plan, slower.accumulate) == (fast, slow, plan, 2)
    state, _ = together(step, 2)
    params, opt_state = jax.jit(alone_with)(PARAMS, [1e-1, 1e-1, 1e-3, 1e-3])
    for _ in range(2):
        state, _ = slower(state, BATCH)
    check_close(state.params, params)
    check_close(state.opt_state, opt_state)
    step(state, BATCH)  # which stays as it was


def alone_with(params: Any, rates: list[Any]) -> tuple[Any, Any]:
    """The truth: parameters and state after a step of adam with each of these rates, on one device."""
    state = optax.adam(rates[0]).init(params)
    for rate in rates:
        updates, state = optax.adam(rate).update(jax.grad(loss_fn)(params, BATCH), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_parameters_go_on_with_an_optimizer_of_another_kind() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan_of())
    state, _ = together(step, 1)
    other = step.replace(tx=optax.sgd(0.1, momentum=0.9))
    trained, _ = other(other.init(state.params), BATCH)
    grads = jax.jit(jax.grad(loss_fn))(jax.device_get(state.params), BATCH)
    check_close(trained.params, jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), state.params, grads))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_other_options_make_another_step_of_the_same_loss(transform) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (loss_fn(params, batch), batch["x"].shape[0] * 1.0), {"rows": batch["x"].shape[0] * 1.0}

    step = jaxsync.make_train_step(
        loss, optax.sgd(0.1), plan_of(2), transform=transform, has_aux=True, weighted=True
    )
    other = step.replace(accumulate=4, donate=False, skip_nonfinite=False)
    state = other.init(PARAMS)
    _, metrics = other(state, BATCH)
    assert (float(metrics["aux"]["rows"]), step.accumulate, other.accumulate) == (6, 1, 4)
    bad, metrics = other(state, {**BATCH, "y": np.full_like(Y, np.nan)})  # the state was not donated
    assert not bool(metrics["finite"])
    assert np.isnan(bad.params["b"]).all()
    kept, metrics = step(state, {**BATCH, "y": np.full_like(Y, np.nan)})
    assert float(metrics["aux"]["rows"]) == 24
    np.testing.assert_array_equal(kept.params["b"], PARAMS["b"])


def test_options_that_cannot_work_are_refused_when_they_are_replaced() -> None:
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of())
    with pytest.raises(ArgumentError, match=r"^TrainStep\.replace got accumulate = 0; wanted an int of 1"):
        step.replace(accumulate=0)
    with pytest.raises(ArgumentError, match=r"^TrainStep\.replace got tx = one of another plan"):
        step.replace(tx=jaxsync.shard_optimizer(optax.sgd(0.1), plan_of(4)))


def test_a_factored_optimizer_trains_on_an_explicit_mesh() -> None:
    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=kinds)
    wide = {"w": np.full((256, 128), 0.01, np.float32)}
    plan = jaxsync.make_plan(wide, mesh, {"w": P(None, "model")})
    loss = lambda p, x: jax.lax.psum((p["w"] ** 2).sum() * x.mean(), "model")  # noqa: E731
    step = jaxsync.make_train_step(loss, optax.adafactor(1e-2), plan)
    state, metrics = step(step.init(wide), np.ones(8, np.float32))
    assert bool(metrics["finite"])
    assert not np.array_equal(state.params["w"], wide["w"])


def test_a_step_traced_through_a_closure_leaves_no_tracer_behind() -> None:
    plan = plan_of()

    def make(c: Any) -> jaxsync.TrainStep:
        scaled = lambda p, b: c * loss_fn(p, b)  # noqa: E731
        return jaxsync.make_train_step(scaled, optax.sgd(0.1), plan, donate=False)

    state = make(1.0).init(PARAMS)
    losses = [float(jax.jit(lambda c: make(c)(state, BATCH)[1]["loss"])(2.0)) for _ in range(10)]
    assert losses == [pytest.approx(2 * alone(optax.sgd(0.1), 1)[1][0], rel=1e-5)] * 10
    guarded = jaxsync.guard_dispatch(jax.jit(lambda x: x * 2))
    for _ in range(12):
        np.testing.assert_array_equal(guarded(jnp.ones(2)), [2, 2])


def test_the_abstract_state_is_that_of_init_and_lowers_to_the_same_program() -> None:
    params = {
        "w": np.ones((8, 3), np.float32),
        "half": np.ones(5, jnp.bfloat16),
        "count": np.int32(1),
        "key": jax.random.key(0, impl="rbg"),
        "empty": np.zeros((0, 2), np.float32),
    }
    plan = jaxsync.make_plan(
        params, jaxsync.make_mesh({"data": 8}), {**dict.fromkeys(params, P()), "w": P("data")}
    )
    step = jaxsync.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.adam(0.1), plan)
    state, abstract = step.init(params), step.abstract_state()
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(abstract), strict=True
    ):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding), jax.tree_util.keystr(path)
    rows = np.ones((16, 8), np.float32)
    lowered = step.lower(abstract, jax.ShapeDtypeStruct(rows.shape, rows.dtype))
    assert lowered.as_text() == step.lower(state, rows).as_text()


@pytest.mark.parametrize("divides", [False, True], ids=["whole state", "ZeRO-1"])
def test_the_state_of_another_optimizer_is_refused(divides: bool) -> None:
    params = {"w": np.ones((8, 3), np.float32)}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    loss = lambda p, x: jnp.mean(x @ p["w"])  # noqa: E731
    tx = jaxsync.shard_optimizer(optax.adam(0.1), plan) if divides else optax.adam(0.1)
    own = jaxsync.make_train_step(loss, tx, plan, donate=False)
    rows = np.ones((16, 8), np.float32)
    others = [optax.sgd(0.1), jaxsync.shard_optimizer(optax.sgd(0.1, momentum=0.9), plan)]
    others += [optax.adam(0.1) if divides else jaxsync.shard_optimizer(optax.adam(0.1), plan)]
    for other in others:
        state = jaxsync.make_train_step(loss, other, plan).init(params)
        with pytest.raises(
            TreeMismatchError, match=r"state.opt_state is that of another optimizer: start from"
        ):
            own(state, rows)
    state, _ = own(own.init(params), rows)
    again = jaxsync.make_train_step(loss, tx, plan)
    assert int(again(state, rows)[0].step) == 2


def test_a_launcher_that_speaks_of_several_processes_is_not_ignored(run_python) -> None:
    code = """
    import jax.numpy as jnp, jaxsync
    plan = jaxsync.make_plan({"w": jnp.zeros(2)}, jaxsync.make_mesh({"data": 1}))
    try:
        jaxsync.make_train_step(lambda p, x: p["w"].sum(), jaxsync.synchronize(plan), plan)
    except jaxsync.errors.InitializationError as error:
        print(error)
    """
    done = run_python(code, JAX_NUM_PROCESSES="2")
    assert done.returncode == 0, done.stderr
    said = "it was not called, and JAX_NUM_PROCESSES says that this is one of 2 processes"
    assert done.stdout.splitlines()[0] == f"jaxsync.initialize: {said}."


@pytest.mark.parametrize("flag", ["donate", "has_aux", "weighted", "skip_nonfinite"])
def test_what_is_neither_true_nor_false_is_refused(flag: str) -> None:
    wanted = rf"got {flag} = 'no'; wanted True or False"
    with pytest.raises(ArgumentError, match=f"^make_train_step {wanted}"):
        jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(), **{flag: "no"})
    if flag in ("has_aux", "weighted"):
        with pytest.raises(ArgumentError, match=f"^value_and_grad {wanted}"):
            jaxsync.value_and_grad(loss_fn, plan_of(), **{flag: "no"})
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan_of(), **{flag: np.bool_(False)})
    with pytest.raises(ArgumentError, match=r"^TrainStep.init got broadcast = 1; wanted True or False"):
        step.init(PARAMS, broadcast=1)
