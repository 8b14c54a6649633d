"""TrainStep in several processes: the numbers of one process with as many devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.timeout(200)

# Run as it is in every process, and here for the numbers of one process.
JOB = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxsync
from jax.sharding import NamedSharding, PartitionSpec as P

def errors(params, batch, axis=None):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]
    return ((out if axis is None else jax.lax.psum(out, axis)) - batch["y"]) ** 2

def loss_fn(params, batch):
    return jnp.mean(errors(params, batch))

def weighted_loss(params, batch):
    weight = batch["weight"].sum()
    return jnp.sum(errors(params, batch) * batch["weight"]) / jnp.maximum(weight, 1), weight

def model_loss(params, batch):
    return jnp.mean(errors(params, batch, "model"))

HOSTS = ("host", "device")
MODES = {
    "replicated": {},
    "ZeRO-1": {"is_sharded": True},
    "FSDP": {"specs": {"w": P("data"), "b": P(), "v": P("data")}},
    "accumulate": {"accumulate": 2},
    "weighted": {"loss_fn": weighted_loss, "weighted": True},
    "data x model": {
        "loss_fn": model_loss,
        "specs": {"w": P(None, "model"), "b": P("model"), "v": P("model")},
        "axes": {"data": 2, "model": 2},
    },
    "FSDP, resharded after forward": {
        "specs": {"w": P("data"), "b": P(), "v": P("data")},
        "config": {"reshard_after_forward": True},
        "accumulate": 2,
    },
    "two levels": {"axes": {"host": 2, "device": 2}, "config": {"axis": HOSTS, "inner_axis": "device"}},
    "bfloat16 wire": {"config": {"wire_dtype": "bfloat16"}},
    "two levels, bfloat16 wire": {
        "axes": {"host": 2, "device": 2},
        "config": {"axis": HOSTS, "inner_axis": "device", "wire_dtype": "bfloat16"},
    },
}

def make_params(seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(4, 8)), "b": rng.normal(size=8), "v": rng.normal(size=8)}
    return {name: value.astype(np.float32) for name, value in params.items()}

def make_batches():
    rng = np.random.default_rng(1)
    for _ in range(3):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        yield {"x": x, "y": np.sin(x.sum(axis=1)), "weight": (rng.random(16) > 0.3).astype(np.float32)}

def train(
    loss_fn=loss_fn, specs=None, axes=None, is_sharded=False, seed=0, place=None, config=None, **options
):
    params, config = make_params(seed), jaxsync.SyncConfig(**config or {})
    plan = jaxsync.make_plan(params, jaxsync.make_mesh(axes or {"data": 4}), specs, config)
    tx = optax.adamw(1e-2)
    tx = jaxsync.shard_optimizer(tx, plan) if is_sharded else tx
    step = jaxsync.make_train_step(loss_fn, tx, plan, **options)
    state, losses = step.init(params), []
    for batch in make_batches():
        state, metrics = step(state, batch if place is None else place(plan, batch))
        losses.append(float(metrics["loss"]))
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(plan.mesh, P()))(state.params)
    return {"losses": losses, **{name: np.asarray(value).tolist() for name, value in whole.items()}}
"""

# Only the rows of this process, as a loader that reads its own files has them.
OWN_ROWS = """
def own_rows(plan, batch):
    sharding = NamedSharding(plan.mesh, plan.batch_spec)
    rows = slice(ME * 16 // NUM, (ME + 1) * 16 // NUM)
    return {k: jax.make_array_from_process_local_data(sharding, x[rows]) for k, x in batch.items()}
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The numbers of one process: each mode over four of its devices."""
    namespace: dict[str, Any] = {}
    exec(JOB, namespace)
    with jax.numpy_dtype_promotion("standard"):  # as optax wants it
        return {name: namespace["train"](**options) for name, options in namespace["MODES"].items()}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], rtol: float = 2e-6) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        # Sums of four float32 in another order: gloo adds process by process.
        np.testing.assert_allclose(found[name], wanted[name], rtol=rtol, atol=rtol / 10, err_msg=name)


def test_two_processes_of_two_devices_train_like_one_in_every_mode(
    run_job: Callable[..., Any], alone: dict[str, Any]
) -> None:
    """Starting from each process's own seed, since the values of the first one count."""
    code = """
    import json
    jaxsync.simulate_devices(2)
    jaxsync.initialize()
    found = {name: train(seed=ME, **options) for name, options in MODES.items()}
    found["own rows"] = train(place=own_rows)
    print(json.dumps(found))
    """
    ended = run_job(code, 2, before=JOB + OWN_ROWS, limit_s=150)
    assert [process.code for process in ended] == [0, 0], ended
    found = [json.loads(process.out) for process in ended]
    assert found[0] == found[1]
    assert_close(found[0].pop("own rows"), alone["replicated"])
    for name, wanted in alone.items():
        # One unit in the last place of a float32 can be one of a bfloat16, and adamw divides by its size.
        assert_close(found[0][name], wanted, rtol=1e-2 if "bfloat16" in name else 2e-6)


def test_four_processes_train_like_one(run_job: Callable[..., Any], alone: dict[str, Any]) -> None:
    code = """
    import json
    jaxsync.initialize()
    print(json.dumps({name: train(**MODES[name]) for name in ("replicated", "FSDP", "two levels")}))
    """
    ended = run_job(code, 4, before=JOB, limit_s=150)
    assert [process.code for process in ended] == [0] * 4, ended
    for process in ended:
        for name, found in json.loads(process.out).items():
            assert_close(found, alone[name])


def test_what_a_step_gives_can_be_read_in_every_process(run_job: Callable[..., Any]) -> None:
    """Parameters, keys, checks of replicas; a state from the host; equal values without a broadcast."""
    code = """
    from jaxsync.placement import check_replicas_equal
    jaxsync.initialize()
    params = make_params(seed=ME) | {"key": jax.random.key(ME), "n": np.array([-0.0, np.nan], "bfloat16")}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 2}))
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    state = step.init(params)
    check_replicas_equal(state)
    first = {k: v.addressable_data(0) for k, v in state.params.items()}
    assert np.array_equal(first["w"], make_params(0)["w"])
    assert np.array_equal(jax.random.key_data(first["key"]), jax.random.key_data(jax.random.key(0)))
    assert np.asarray(first["n"]).tobytes() == params["n"].tobytes()  # bit for bit
    try:
        step.init(params, broadcast=False)
    except DisagreementError as error:
        print(error)
    same = {name: first[name] for name in params}
    batch = next(make_batches())
    state, metrics = step(step.init(same, broadcast=False), batch)
    host = jax.device_get(jax.tree.map(lambda x: x.addressable_data(0), state))
    other = {**first, "b": np.full(8, 3, np.float32)}
    state = state.replace(params=jax.device_get(other), opt_state=state.opt_state)
    assert np.array_equal(state.params["b"].addressable_data(0), other["b"])
    again, metrics = step(host, batch)
    print(float(metrics["loss"]), bool(metrics["finite"]), int(again.step))
    """
    code = code.replace('"bfloat16"', "jnp.bfloat16")
    ended = run_job(code, 2, before=JOB)
    assert [process.code for process in ended] == [0, 0], ended
    assert ended[0].out == ended[1].out
    lines = ended[0].out.splitlines()
    assert lines[0] == (
        "The processes do not agree on the values of the parameters, so nothing was launched."
    )
    assert [line.split(":")[0].strip() for line in lines[1:5]] == [
        f"- value of {path}" for path in ("['b']", "['key']", "['v']", "['w']")
    ]
    assert lines[-1].endswith("True 2")
