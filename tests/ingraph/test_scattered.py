"""Parameters sharded over data axes: gathered before use, their gradients reduce-scattered by bucket."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import DataShardedError, SpecError

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 16)).astype(np.float32)
PARAMS = {
    "l1": {"w": RNG.normal(size=(16, 24)).astype(np.float32), "b": np.zeros(24, np.float32)},
    "l2": {"w": RNG.normal(size=(24, 8)).astype(np.float32), "b": np.zeros(8, np.float32)},
    "odd": RNG.normal(size=(7, 3)).astype(np.float32),
    "scalar": np.float32(0.3),
}
FULL = {
    "l1": {"w": P("data"), "b": P("data")},
    "l2": {"w": P(None, "data"), "b": P("data")},
    "odd": P(),
    "scalar": P(),
}
MIXED = {
    "l1": {"w": P(None, "data"), "b": P()},
    "l2": {"w": P(), "b": P("data")},
    "odd": P(),
    "scalar": P(),
}
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def loss_fn(params: Any, x: Any) -> jax.Array:
    hidden = jnp.tanh(x @ params["l1"]["w"] + params["l1"]["b"]) @ params["l2"]["w"]
    return jnp.mean((hidden * params["scalar"] + params["l2"]["b"]) ** 2) + 1e-2 * jnp.sum(params["odd"] ** 2)


def alone(tx: Any, steps: int) -> tuple[Any, Any]:
    """The truth: plain optax on one device."""

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(params, X), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def check_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("divided", [False, True], ids=["whole state", "ZeRO-1"])
@pytest.mark.parametrize("specs", [FULL, MIXED], ids=["sharded", "mixed"])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_training_equals_training_on_one_device(n: int, specs: Any, divided: bool, accumulate: int) -> None:
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": n}), specs)
    tx = jaxsync.shard_optimizer(TX, plan) if divided else TX
    step = jaxsync.make_train_step(loss_fn, tx, plan, accumulate=accumulate)
    state = step.init(PARAMS)
    for _ in range(10):
        state, metrics = step(state, X)
    params, opt_state = alone(TX, 10)
    check_close(state.params, params)
    check_close(state.opt_state, opt_state)
    assert bool(metrics["finite"])
    w = state.params["l1"]["w"]
    assert math.prod(w.sharding.shard_shape(w.shape)) == 16 * 24 // n
    audit = jaxsync.audit(step, state, X)
    num_cut = len(plan.buckets) if divided else plan.num_reduce_scatters
    assert audit.count("reduce-scatter") == audit.count("all-gather") == num_cut
    assert audit.in_loop == ()


@pytest.mark.parametrize("checked", [True, False])
def test_gradients_come_back_sharded_like_their_parameters(checked: bool) -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    params = {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.ones(3, np.float32)}
    plan = jaxsync.make_plan(params, mesh, {"w": P("data"), "b": P()})
    rows = RNG.normal(size=(4, 4, 2)).astype(np.float32)

    def sync(x: jax.Array) -> Any:
        return jaxsync.sync_gradients({"w": x[0], "b": x[0, 0, :1] * jnp.ones(3)}, plan)

    run = jax.shard_map(sync, mesh=mesh, in_specs=P("data"), out_specs=plan.specs, check_vma=checked)
    synced = jax.jit(run)(rows)
    np.testing.assert_allclose(synced["w"], rows.astype(np.float64).mean(axis=0), rtol=1e-5, atol=1e-6)
    assert synced["w"].sharding.shard_shape((4, 2)) == (1, 2)
    grad = jax.shard_map(
        lambda p, x: jaxsync.value_and_grad(lambda p, x: jnp.sum(p["w"] * x[0]) + p["b"].sum(), plan)(p, x),
        mesh=mesh,
        in_specs=(plan.specs, P("data")),
        out_specs=(P(), plan.specs),
        check_vma=checked,
    )
    loss, grads = jax.jit(grad)(params, rows)
    np.testing.assert_allclose(loss, (params["w"] * rows).sum(axis=(1, 2)).mean() + 3, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], rows.mean(axis=0), rtol=1e-5, atol=1e-6)
    norm = jaxsync.global_norm(grads, plan)
    want = np.sqrt((rows.mean(axis=0, dtype=np.float64) ** 2).sum() + 3)
    np.testing.assert_allclose(norm, want, rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec",
    [
        P(("replica", "data")),
        P("data", "replica"),
        P("replica", "data"),
        P("data", "model"),
        P(("model", "data")),
    ],
    ids=str,
)
def test_any_dims_and_any_order_of_axes(spec: P, kind: AxisType) -> None:
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "model", "replica"), axis_types=(kind,) * 3)
    config = jaxsync.SyncConfig(axis=("data", "replica"))
    params = {"w": RNG.normal(size=(8, 4)).astype(np.float32)}
    plan = jaxsync.make_plan(params, mesh, {"w": spec}, config)

    def model_loss(p: Any, x: Any) -> jax.Array:
        total = jnp.sum(jnp.sin(p["w"]) * x.mean())
        return jax.lax.psum(total, "model") if "model" in str(spec) else total

    step = jaxsync.make_train_step(model_loss, optax.sgd(0.5), plan)
    x = np.arange(16, dtype=np.float32)
    state, _ = step(step.init(params), x)
    want = params["w"] - 0.5 * np.cos(params["w"]) * x.mean()
    np.testing.assert_allclose(jax.device_get(state.params["w"]), want, rtol=1e-5, atol=1e-6)


def test_a_weight_of_zero_keeps_a_nan_out_and_a_nan_skips_the_step() -> None:
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 8}), FULL)
    weighted = lambda p, x: (loss_fn(p, x), jnp.where(jnp.isnan(x).any(), 0.0, 1.0))  # noqa: E731
    bad = X.copy()
    bad[:4] = np.nan
    step = jaxsync.make_train_step(weighted, optax.sgd(0.1), plan, weighted=True)
    state, metrics = step(step.init(PARAMS), bad)
    assert bool(metrics["finite"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    state, metrics = step(step.init(PARAMS), bad)
    assert not bool(metrics["finite"])
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(a, b)


def layers_loss(params: Any, x: Any, call: Any = lambda layer, h, p: layer(h, p)) -> jax.Array:
    layer = lambda h, p: jnp.tanh(h @ p["w"] + p["b"])  # noqa: E731
    for name in sorted(params):
        x = call(layer, x, params[name])
    return jnp.mean(x**2)


LAYERS = {
    f"l{k}": {"w": RNG.normal(size=(16, 16)).astype(np.float32), "b": np.zeros(16, np.float32)}
    for k in range(3)
}
CALLS = {
    "as it is": lambda layer, h, p: layer(h, p),
    "under jax.checkpoint": lambda layer, h, p: jax.checkpoint(layer)(h, p),
    "under jit": lambda layer, h, p: jax.jit(layer)(h, p),
    "in a scan": lambda layer, h, p: jax.lax.scan(lambda h, _: (layer(h, p), None), h, None, length=2)[0],
}


@pytest.mark.parametrize("call", CALLS)
def test_parameters_are_gathered_again_for_the_backward_pass_and_not_kept(call: str) -> None:
    own_loss = lambda p, x: layers_loss(p, x, CALLS[call])  # noqa: E731
    counts, states = {}, {}
    for again in (False, True):
        config = jaxsync.SyncConfig(reshard_after_forward=again, bucket_max_leaves=2)
        plan = jaxsync.make_plan(LAYERS, jaxsync.make_mesh({"data": 8}), P("data"), config)
        assert plan.num_reduce_scatters == 3
        step = jaxsync.make_train_step(own_loss, optax.adam(1e-2), plan)
        state = step.init(LAYERS)
        # In the program as JAX hands it over: XLA on CPU makes one of two equal gathers.
        lowered = step.lower(state, X).as_text()
        counts[again] = lowered.count("stablehlo.all_gather")
        assert lowered.count("stablehlo.reduce_scatter") == 3
        for _ in range(3):
            state, _ = step(state, X)
        states[again] = jax.device_get(state.params)
    # The gradient of the first layer's own parameters alone needs none of them, unless it is computed anew.
    needed = 3 if call in ("under jax.checkpoint", "in a scan") else 2
    assert counts == {False: 3, True: 3 + needed}
    check_close(states[True], states[False])


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("spec", [P("data"), P(("replica", "data")), P("data", "model")], ids=str)
def test_gathering_at_each_use_gives_the_same_gradients(spec: P, checked: bool) -> None:
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    params = {
        "w": RNG.normal(size=(8, 4)).astype(jnp.bfloat16),
        "z": (RNG.normal(size=(4, 2)) + 1j).astype(np.complex64),
        "b": np.float32(2),
    }
    specs = {"w": spec, "z": P("data"), "b": P()}
    x = RNG.normal(size=(16, 8)).astype(np.float32)
    x[:4] = np.nan  # the rows of the first device, which weighs nothing

    def weighted(p: Any, x: Any) -> Any:
        w = p["w"].astype(jnp.float32)
        total = jnp.mean((x @ jnp.sin(w)) ** 2) * p["b"] + jnp.sum(jnp.abs(p["z"]) ** 2)
        if "model" in str(spec) and checked:
            total = jax.lax.psum(total, "model")
        return total, jnp.where(jnp.isnan(x).any(), 0.0, jnp.float32(x.shape[0]))

    found = {}
    for again in (False, True):
        config = jaxsync.SyncConfig(axis=("replica", "data"), reshard_after_forward=again)
        plan = jaxsync.make_plan(params, mesh, specs, config)
        run = jax.shard_map(
            lambda p, x, plan=plan: jaxsync.value_and_grad(weighted, plan, weighted=True)(p, x)[1],
            mesh=mesh,
            in_specs=(plan.specs, P(("replica", "data"))),
            out_specs=plan.specs,
            check_vma=checked,
        )
        found[again] = jax.device_get(jax.jit(run)(params, x))
    assert all(np.isfinite(np.asarray(g, np.complex64)).all() for g in jax.tree.leaves(found))
    for a, b in zip(jax.tree.leaves(found[True]), jax.tree.leaves(found[False]), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_gradients_of_microbatches_are_summed_as_parts_in_float32() -> None:
    """In bfloat16, 1024 + 4 is 1024: the sum over microbatches must not be rounded on the way."""
    params = {"w": np.zeros(8, jnp.bfloat16)}
    config = jaxsync.SyncConfig(reduce="sum", reshard_after_forward=True)
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}), P("data"), config)
    step = jaxsync.make_train_step(
        lambda p, x: jnp.sum(p["w"].astype(jnp.float32)) * x.sum(), optax.sgd(1.0), plan, accumulate=4
    )
    rows = np.tile(np.array([[128], [0.5], [0.5], [1]], np.float32), (8, 1))
    state = step.init(params)
    carries = [c for c in jaxsync.audit(step, state, rows).in_loop if c.kind == "reduce-scatter"]
    assert len(carries) == 1
    state, _ = step(state, rows)
    # The mean over microbatches of 1024, 4, 4 and 8, summed over devices.
    np.testing.assert_array_equal(np.asarray(state.params["w"], np.float32), np.full(8, -260, np.float32))


def test_small_leaves_that_are_sharded_alike_share_a_bucket_and_large_ones_travel_alone() -> None:
    params = {**PARAMS, "large": np.zeros((8, 20_000), np.float32)}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}), {**FULL, "large": P("data")})
    paths = [[plan.leaves[i].path for i in bucket.leaves] for bucket in plan.buckets]
    assert paths == [
        ["['l1']['b']", "['l1']['w']", "['l2']['b']", "['l2']['w']"],
        ["['large']"],
        ["['odd']", "['scalar']"],
    ]
    assert (plan.num_reduce_scatters, plan.num_all_reduces) == (2, 1)


def test_what_cannot_be_sharded_over_a_data_axis_is_named() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    with pytest.raises(SpecError, match="only float and complex leaves"):
        jaxsync.make_plan({"n": np.arange(8)}, mesh, P("data"))
    with pytest.raises(SpecError, match="must have its data axes after the others"):
        jaxsync.make_plan({"w": np.ones(8, np.float32)}, mesh, P(("data", "model")))
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 8}), FULL)
    with pytest.raises(DataShardedError) as caught:
        jaxsync.make_train_step(loss_fn, TX, plan, transform="pmap")
    assert caught.value.leaves[0] == ("['l1']['b']", str(P("data")))
    placed = jax.device_put(PARAMS["l1"]["w"], NamedSharding(plan.mesh, P("data")))
    with jaxsync.SyncClient(plan.mesh) as client, pytest.raises(DataShardedError):
        client.register_sync_parameters({"w": placed})


@pytest.mark.parametrize("kind", ["sharded", "ZeRO-1"])
def test_checkpoints_load_on_another_sharding_bit_by_bit(kind: str, tmp_path: Any) -> None:
    def make(n: int, specs: Any, divided: bool) -> jaxsync.TrainStep:
        plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": n}), specs)
        return jaxsync.make_train_step(
            loss_fn, jaxsync.shard_optimizer(TX, plan) if divided else TX, plan, donate=False
        )

    here = make(8, FULL if kind == "sharded" else P(), kind == "ZeRO-1")
    state, _ = here(here.init(PARAMS), X)
    want = jax.device_get((state.params, state.opt_state))
    for number, (n, specs, divided) in enumerate(
        [(4, P(), False), (2, MIXED, True), (1, P(), True), (8, FULL, False)]
    ):
        jaxsync.save_checkpoint(tmp_path / str(number), state)
        state = jaxsync.load_checkpoint(tmp_path / str(number), make(n, specs, divided))
        got = jax.device_get((state.params, state.opt_state))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
