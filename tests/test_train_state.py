"""TrainState: kept packed, shown as the user's trees."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import DeletedArrayError, ReplicaMismatchError, TreeMismatchError

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(3, np.float32),
    "big": np.zeros((200, 200), np.float32),
    "n": np.int32(4),
}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean(x @ params["w"] + params["b"]) + params["big"].sum() * jnp.float32(1e-3)


def make_step(**options: Any) -> jaxsync.TrainStep:
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 8}))
    return jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan, **options)


X = np.ones((16, 2), np.float32)


def test_small_leaves_are_kept_in_one_array_and_shown_as_they_were() -> None:
    state = make_step().init(PARAMS)
    assert [x.shape for x in state.packed_params.arrays] == [(9,), (200, 200)]
    assert len(jax.tree.leaves(state)) == 1 + 3 + 1 + 2 + 2
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(PARAMS), strict=True
    ):
        np.testing.assert_array_equal(got, want, err_msg=str(path))
        assert got.sharding.spec == P()
        assert len(got.sharding.device_set) == 8
    wanted = optax.adam(1e-2).init({**PARAMS, "n": None})
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(wanted)
    assert state.opt_state[0].mu["w"].shape == (2, 3)


def test_looking_at_parameters_compiles_once_and_copies_nothing_large() -> None:
    step = make_step(donate=False)
    state = step.init(PARAMS)
    _ = state.params
    before = len(jax.live_arrays())
    shown = state.params
    assert len(jax.live_arrays()) == before + 2  # w and b; the large leaf and the int are the state's own
    assert shown["n"] is state.packed_params.rest[0]
    assert shown["big"] is state.packed_params.arrays[1]


def test_what_was_shown_outlives_the_state_where_it_is_a_copy() -> None:
    step = make_step()
    state = step.init(PARAMS)
    shown = state.params
    step(state, X)
    np.testing.assert_array_equal(shown["w"], PARAMS["w"])
    assert shown["big"].is_deleted()  # the large leaf is the state's own, and was donated with it
    with pytest.raises(DeletedArrayError, match=r"state.params\['b'\]|state.params"):
        _ = state.params
    with pytest.raises(DeletedArrayError):
        state.replace(params=PARAMS)


def test_replaced_parameters_are_copies_in_the_place_of_the_old() -> None:
    step = make_step()
    state = step.init(PARAMS)
    state, _ = step(state, X)
    mine = {**PARAMS, "w": PARAMS["w"] + 1}
    count = int(state.opt_state[0].count)
    new = state.replace(params=mine)
    mine["w"][:] = 99
    np.testing.assert_array_equal(new.params["w"], PARAMS["w"] + 1)
    assert int(new.opt_state[0].count) == count == 1
    assert [x.sharding for x in jax.tree.leaves(new)] == [x.sharding for x in jax.tree.leaves(state)]
    cleared = new.replace(opt_state=jax.tree.map(np.zeros_like, jax.device_get(new.opt_state)))
    assert float(jnp.abs(cleared.opt_state[0].mu["w"]).sum()) == 0
    step(cleared, X)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({**PARAMS, "b": np.ones(4, np.float32)}, "state.params['b'] has shape (4,); wanted (3,)"),
        ({**PARAMS, "b": np.ones(3, np.float16)}, "state.params['b'] has dtype float16; wanted float32"),
        ({**PARAMS, "b": "text"}, "state.params['b'] is a str, no array"),
        ({**PARAMS, "extra": np.ones(3, np.float32)}, "state.params['extra'] is not in the state"),
        ({key: PARAMS[key] for key in ("w", "big", "n")}, "state.params['b'] is missing"),
    ],
)
def test_parameters_that_do_not_fit_are_named(params: Any, problem: str) -> None:
    state = make_step().init(PARAMS)
    with pytest.raises(TreeMismatchError) as caught:
        state.replace(params=params)
    assert caught.value.problems == (problem,)


def test_numbers_and_64_bits_stand_for_the_arrays_that_jax_makes_of_them() -> None:
    state = make_step().init(PARAMS)
    adam, *rest = state.opt_state
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64) + 1, adam.mu)
    new = state.replace(params={**PARAMS, "n": 7}, opt_state=(adam._replace(count=3, mu=wide), *rest))
    assert (int(new.params["n"]), int(new.opt_state[0].count), float(new.opt_state[0].mu["b"][0])) == (
        7,
        3,
        1,
    )
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]


def test_a_state_of_another_layout_is_refused() -> None:
    plan = jaxsync.make_plan(
        PARAMS, jaxsync.make_mesh({"data": 8}), config=jaxsync.SyncConfig(fuse_max_bytes=0)
    )
    other = jaxsync.make_train_step(loss_fn, optax.adam(1e-2), plan).init(PARAMS)
    with pytest.raises(TreeMismatchError, match=r"start from step.init\(state.params\)"):
        make_step()(other, X)


def test_parameters_can_be_shown_inside_a_program_and_on_the_host() -> None:
    state = make_step().init(PARAMS)
    total = jax.jit(lambda state: state.params["w"].sum() + state.opt_state[0].nu["b"].sum())(state)
    assert float(total) == 15
    host = jax.device_get(state)
    np.testing.assert_array_equal(host.params["w"], PARAMS["w"])
    assert type(host.params["w"]) is np.ndarray


def test_a_scalar_among_fused_leaves_is_shown_on_explicit_meshes() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    params = {"s": np.float32(1), "w": np.ones(3, np.float32)}
    plan = jaxsync.make_plan(params, mesh)
    step = jaxsync.make_train_step(lambda p, b: jnp.mean(b @ p["w"]) * p["s"], optax.sgd(0.1), plan)
    state, _ = step(step.init(params), np.ones((16, 3), np.float32))
    np.testing.assert_allclose(state.params["s"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


def test_the_abstract_state_of_sharded_parameters_is_made_on_explicit_meshes() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    params = {"t": np.ones(16, np.float32), "w": np.ones((3, 2), np.float32)}
    plan = jaxsync.make_plan(params, mesh, {"t": P("data"), "w": P()})
    tx = jaxsync.shard_optimizer(optax.adam(0.1), plan)
    step = jaxsync.make_train_step(lambda p, b: jnp.mean(b @ p["w"]) + p["t"].sum(), tx, plan)
    made, abstract = step.init(params), step.abstract_state()
    assert jax.tree.structure(made) == jax.tree.structure(abstract)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.shard_shape(x.shape) == y.sharding.shard_shape(y.shape)
    again = jaxsync.make_train_step(lambda p, b: jnp.mean(b @ p["w"]) + p["t"].sum(), tx, plan)
    assert int(again(made, np.ones((16, 3), np.float32))[0].step) == 1  # the structure it has not made itself


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_replicas_that_differ_are_refused_before_they_train_apart(part: str) -> None:
    state = make_step().init(PARAMS)
    sharding = state.params["b"].sharding
    pieces = [jax.device_put(np.full(3, i == 5, np.float32), d) for i, d in enumerate(jax.devices())]
    drifted = jax.make_array_from_single_device_arrays((3,), sharding, pieces)
    adam, *rest = state.opt_state
    new = {
        "params": {**PARAMS, "b": drifted},
        "opt_state": (adam._replace(nu={**adam.nu, "b": drifted}), *rest),
    }
    with pytest.raises(ReplicaMismatchError) as caught:
        state.replace(**{part: new[part]})
    path = {"params": "state.params['b']", "opt_state": "state.opt_state[0].nu['b']"}[part]
    first, other = jax.devices()[0], jax.devices()[5]
    assert caught.value.places() == [f"{path}: {first} and {other} differ"]


@pytest.mark.parametrize("where", ["host", "devices"])
def test_a_pickled_state_goes_on_as_the_other_does(where: str) -> None:
    plan = jaxsync.make_plan(PARAMS, jaxsync.make_mesh({"data": 8}))
    for tx in (optax.adam(1e-2), jaxsync.shard_optimizer(optax.adam(1e-2), plan)):
        step = jaxsync.make_train_step(loss_fn, tx, plan, donate=False)
        state, _ = step(step.init(PARAMS), X)
        travels = jax.device_get(state) if where == "host" else state
        arrived = pickle.loads(pickle.dumps(travels))
        assert jax.tree.structure(arrived) == jax.tree.structure(state)
        for got, want in zip(
            jax.tree.leaves(step(arrived, X)[0]), jax.tree.leaves(step(state, X)[0]), strict=True
        ):
            np.testing.assert_array_equal(got, want)
            assert got.sharding.is_equivalent_to(want.sharding, want.ndim)


def test_a_pickled_plan_is_the_same_and_needs_the_devices_of_its_mesh(run_python, tmp_path) -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"), axis_types=(kind, kind))
        plan = jaxsync.make_plan(PARAMS, mesh)
        arrived = pickle.loads(pickle.dumps(plan))
        assert (arrived, arrived.mesh.axis_types) == (plan, mesh.axis_types)
    abstract = jaxsync.make_plan(PARAMS, mesh.abstract_mesh)
    assert pickle.loads(pickle.dumps(abstract)) == abstract
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    code = """
        import pickle, sys, jaxsync
        jaxsync.simulate_devices(2)
        try:
            pickle.load(open(sys.argv[1], "rb"))
        except jaxsync.errors.DeviceCountError as error:
            print(error.what())
    """
    done = run_python(code, str(tmp_path / "plan"))
    assert done.stdout.startswith("The mesh needs 8 devices; JAX has 2 (platform cpu; it has no device of n")
