"""SyncClient in one process: ways of working, values, lifetimes, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import (
    ArgumentError,
    CallbackError,
    ClosedError,
    DuplicateError,
    JaxsyncError,
    MeshError,
    MissingGradientError,
    NotRegisteredError,
    RegistrationError,
    ReplicaMismatchError,
    SetMismatchError,
    StartConflictError,
    SubmissionError,
    SyncFailedError,
    SyncTimeoutError,
    TicketTimeoutError,
    TracedSubmissionError,
    UnknownNameError,
    WrongThreadError,
)
from jaxsync.exchange import Exchange
from jaxsync.host.launcher import process_launcher
from jaxsync.host.messages import Answer, Forget, Launch, Reject, Warn

pytestmark = pytest.mark.timeout(60)

PARAMS = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def make_client(num_devices: int = 4, params: Any = PARAMS, **config: Any) -> jaxsync.SyncClient:
    """A client whose leaves travel alone; a hang is found after seconds, not a minute."""
    config = {"fuse_max_bytes": 0, "timeout_s": 20.0, **config}
    client = jaxsync.SyncClient(jaxsync.make_mesh({"data": num_devices}), jaxsync.SyncConfig(**config))
    if params is not None:
        client.register_sync_parameters(params)
    return client


@pytest.fixture
def client() -> Iterator[jaxsync.SyncClient]:
    with make_client() as client:
        yield client


def devices_of(client: jaxsync.SyncClient) -> list[jax.Device]:
    return list(client.mesh.devices.flat)


def gradient(value: float, params: Any = PARAMS) -> Any:
    return jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), params)


def finish(client: jaxsync.SyncClient, device: int, value: float, params: Any = PARAMS) -> Any:
    client.submit_gradient_sync(device, gradient(value, params))
    return client.submit_sync_collective(device)


def run_step(client: jaxsync.SyncClient, step: int = 0, params: Any = PARAMS) -> list[Any]:
    """One whole step; checks the mean and returns the tickets."""
    num_devices = client.mesh.size
    tickets = [finish(client, device, device + 10 * step, params) for device in range(num_devices)]
    for ticket in tickets:
        check_equal(ticket.wait(), gradient((num_devices - 1) / 2 + 10 * step, params))
    return tickets


def check_equal(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs each job on a thread of its own: what it returned or raised."""

    def run(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def wait_until(is_so: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Looks again and again, for what has no event of its own."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not is_so():
        assert time.monotonic() < deadline
        pause.wait(0.001)


def error_of(call: Callable[[], Any]) -> Any:
    with pytest.raises(JaxsyncError) as caught:
        call()
    return caught.value


# Ways of working. The truth of each is one device that sees the whole batch.

ROWS = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
TARGETS = (ROWS @ np.arange(5, dtype=np.float32)[:, None]).astype(np.float32)
MODEL = {"w": np.zeros((5, 1), np.float32), "b": np.zeros(1, np.float32)}
RATE = np.float32(0.1)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


grad_fn = jax.jit(jax.grad(loss_fn))


def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def trained_alone(steps: int) -> Any:
    params = jax.device_put(MODEL, jax.devices()[0])
    for _ in range(steps):
        params = descend(params, grad_fn(params, {"x": ROWS, "y": TARGETS}))
    return params


def check_trained(found: list[Any], steps: int) -> None:
    for params in found:
        check_equal(params, found[0])  # replicas are equal to the last bit
        for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(trained_alone(steps)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def rows_of(device: int, num_devices: int) -> Any:
    return {"x": ROWS[device::num_devices], "y": TARGETS[device::num_devices]}


def test_one_thread_for_each_device_trains_like_one_device() -> None:
    with make_client(params=None) as client:

        def train(index: int, device: jax.Device) -> Any:
            params = jax.device_put(MODEL, device)
            batch = jax.device_put(rows_of(index, 4), device)
            for _ in range(5):
                client.register_sync_parameters(params, device=device)
                client.submit_gradient_sync(device, grad_fn(params, batch))
                params = descend(params, client.submit_sync_collective(device).wait())
            assert jax.tree.leaves(params)[0].devices() == {device}
            return params

        jobs = [functools.partial(train, i, device) for i, device in enumerate(devices_of(client))]
        check_trained(in_threads(*jobs), 5)


def test_one_thread_for_all_devices_trains_like_one_device() -> None:
    with make_client(params=None) as client:
        placed = client.register_sync_parameters(MODEL)
        devices = devices_of(client)
        params = [
            jax.tree.map(lambda leaf, i=i: leaf.addressable_shards[i].data, placed)
            for i in range(len(devices))
        ]
        batches = [jax.device_put(rows_of(i, 4), device) for i, device in enumerate(devices)]
        for _ in range(5):
            for device, own, batch in zip(devices, params, batches, strict=True):
                client.submit_gradient_sync(device, grad_fn(own, batch))
            tickets = [client.submit_sync_collective(device) for device in devices]
            params = [descend(own, ticket.wait()) for own, ticket in zip(params, tickets, strict=True)]
        check_trained(params, 5)


@pytest.mark.usefixtures("standard_promotion")
def test_a_compiled_step_hands_its_metrics_to_deferred_callbacks() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), jaxsync.make_plan(MODEL, mesh))
    seen: list[tuple[int, float]] = []
    with jaxsync.SyncClient(mesh) as client:
        state = step.init(MODEL)
        for number in range(20):
            state, metrics = step(state, {"x": ROWS, "y": TARGETS})
            client.defer(lambda n, m: seen.append((n, float(m["loss"]))), number, metrics)
    assert [number for number, _ in seen] == list(range(20))
    losses = [loss for _, loss in seen]
    assert losses == sorted(losses, reverse=True)
    np.testing.assert_allclose(losses[0], loss_fn(MODEL, {"x": ROWS, "y": TARGETS}), rtol=1e-6)


@pytest.mark.usefixtures("standard_promotion")
def test_compiled_steps_and_synced_devices_work_side_by_side(client) -> None:
    """Both launch collectives, from threads of their own, and through one launcher."""
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), jaxsync.make_plan(MODEL, client.mesh))

    def train() -> float:
        state = step.init(MODEL)
        for _ in range(100):
            state, metrics = step(state, {"x": ROWS, "y": TARGETS})
        return float(metrics["loss"])

    def sync(device: int) -> None:
        for number in range(100):
            check_equal(finish(client, device, device + number).wait(), gradient(1.5 + number))

    loss, *synced = in_threads(train, *[functools.partial(sync, device) for device in range(4)])
    assert loss < 1e-2
    assert synced == [None] * 4


def test_several_backward_passes_are_added_up_before_a_sync(client) -> None:
    microbatches = [gradient(value) for value in (1, 2, 4)]
    for device in range(4):
        total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), microbatches)
        client.submit_gradient_sync(device, jax.tree.map(lambda g, d=device: g * np.float32(d), total))
    tickets = [client.submit_sync_collective(device) for device in range(4)]
    check_equal(tickets[0].wait(), gradient(7 * 1.5))


# Values: the same bits as in a compiled program.

MIXED = {
    "emb": jnp.zeros((3, 5), jnp.bfloat16),
    "head": {"b": jnp.zeros(2, jnp.float32), "c": jnp.zeros((2, 3), jnp.complex64)},
    "layers": [
        {"w": jnp.zeros((8, 6), jnp.float32), "b": jnp.zeros(6, jnp.float32)},
        {"w": jnp.zeros((8, 6), jnp.float32), "b": jnp.zeros(6, jnp.bfloat16)},
    ],
    "num_seen": jnp.zeros((), jnp.int32),
    "scale": jnp.zeros((), jnp.float32),
}
MIXED_SPECS = {
    "emb": P(),
    "head": P(),
    "layers": [{"w": P("model"), "b": P()}, {"w": P(None, "model"), "b": P("model")}],
    "num_seen": P(),
    "scale": P(),
}
MESHES = {
    "data": lambda: jaxsync.make_mesh({"data": 8}),
    "data x model": lambda: jaxsync.make_mesh({"data": 4, "model": 2}),
    "data x model, explicit": lambda: jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit)
    ),
    "model x data, permuted": lambda: Mesh(
        np.array(jax.devices())[np.random.default_rng(3).permutation(8)].reshape(2, 4), ("model", "data")
    ),
}


def local_gradients(plan: jaxsync.SyncPlan, seed: int = 0) -> list[dict[int, jax.Array]]:
    """For each device, plan index -> a random gradient of its shard."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> np.ndarray:
        parts = rng.normal(size=(2, *leaf.local_shape)) * 10 ** rng.uniform(-3, 3)
        value = parts[0] + 1j * parts[1] if leaf.kind == "complex" else parts[0]
        return value.astype(jnp.dtype(leaf.dtype))

    return [
        {i: jax.device_put(draw(leaf), device) for i, leaf in enumerate(plan.leaves) if leaf.is_synced}
        for device in plan.mesh.devices.flat
    ]


def synced_in_graph(plan: jaxsync.SyncPlan, gradients: list[dict[int, jax.Array]]) -> list[Any]:
    """For each device, the tree that `sync_gradients` computes in one program."""
    everywhere = P(plan.mesh.axis_names)
    stacked = {
        i: jax.make_array_from_single_device_arrays(
            (plan.mesh.size, *plan.leaves[i].local_shape),
            NamedSharding(plan.mesh, everywhere),
            [own[i][None] for own in gradients],
        )
        for i in gradients[0]
    }

    def sync(values: dict[int, jax.Array]) -> dict[int, jax.Array]:
        leaves = [
            values[i][0] if i in values else jnp.zeros(leaf.local_shape, leaf.dtype)
            for i, leaf in enumerate(plan.leaves)
        ]
        synced = jax.tree.leaves(jaxsync.sync_gradients(jax.tree.unflatten(plan.treedef, leaves), plan))
        return {i: synced[i][None] for i in values}

    run = jax.jit(jax.shard_map(sync, mesh=plan.mesh, in_specs=everywhere, out_specs=everywhere))
    found = run(stacked)
    return [
        jax.tree.unflatten(
            plan.treedef,
            [
                found[i].addressable_shards[device].data[0] if i in found else None
                for i in range(len(plan.leaves))
            ],
        )
        for device in range(plan.mesh.size)
    ]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize(
    "buckets",
    [{}, {"fuse_max_bytes": 0}, {"bucket_max_leaves": 2}, {"reduce_dtype": "own", "bucket_max_bytes": 40}],
    ids=["fused", "alone", "pairs", "own dtype"],
)
def test_results_are_bit_for_bit_those_of_one_program(mesh: str, reduce: Any, buckets: Any) -> None:
    config = jaxsync.SyncConfig(reduce=reduce, timeout_s=20.0, **buckets)
    specs = MIXED_SPECS if "model" in mesh else None
    with jaxsync.SyncClient(MESHES[mesh](), config) as client:
        client.register_sync_parameters(MIXED, specs)
        gradients = local_gradients(client.plan)
        expected = synced_in_graph(client.plan, gradients)
        devices = devices_of(client)
        at_the_end = [
            jax.tree.unflatten(client.plan.treedef, [own.get(i) for i in range(len(client.plan.leaves))])
            for own in gradients
        ]
        for order in ("tree", "shuffled", "shuffled again"):
            if order == "tree":
                for device, tree in zip(devices, at_the_end, strict=True):
                    client.submit_gradient_sync(device, tree)
            else:
                rng = np.random.default_rng(len(order))
                parts = [(d, i) for d in range(len(devices)) for i in gradients[d]]
                for d, i in (parts[k] for k in rng.permutation(len(parts))):
                    client.submit_gradient_sync(devices[d], client.plan.leaves[i].path, gradients[d][i])
            tickets = [client.submit_sync_collective(device) for device in devices]
            for device, ticket, tree in zip(devices, tickets, expected, strict=True):
                found = ticket.wait()
                check_equal(found, tree)
                assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(found))


def test_a_leaf_a_subtree_a_whole_tree_and_partial_trees_say_the_same() -> None:
    params = {"a": {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)}, "b": np.zeros(1, np.float32)}
    ways: list[list[tuple[Any, ...]]] = [
        [
            ("['a']['x']", lambda g: g["a"]["x"]),
            ("['a']['y']", lambda g: g["a"]["y"]),
            ("['b']", lambda g: g["b"]),
        ],
        [("['a']", lambda g: g["a"]), ("", lambda g: {"b": g["b"]})],
        [("", lambda g: g)],
        [("", lambda g: {"a": {"y": g["a"]["y"]}}), ("", lambda g: {"a": {"x": g["a"]["x"]}, "b": g["b"]})],
    ]
    with make_client(params=params) as client:
        for device, way in enumerate(ways):
            own = gradient(device, params)
            for path, part in way:
                client.submit_gradient_sync(device, *((path, part(own)) if path else (part(own),)))
        tickets = [client.submit_sync_collective(device) for device in range(4)]
        for ticket in tickets:
            check_equal(ticket.wait(), gradient(1.5, params))


def test_a_device_may_be_named_by_itself_or_by_its_index(client) -> None:
    names: list[Any] = [0, devices_of(client)[1], 2, devices_of(client)[3]]
    for value, device in enumerate(names):
        client.submit_gradient_sync(device, gradient(value))
    for ticket in [client.submit_sync_collective(device) for device in reversed(names)]:
        check_equal(ticket.wait(), gradient(1.5))


def test_a_single_array_is_a_tree_too() -> None:
    params = np.zeros((2, 2), np.float32)
    with make_client(params=params) as client:
        run_step(client, params=params)


def test_leaves_that_pass_through_are_ignored_and_come_back_none() -> None:
    params = {
        "w": jnp.zeros(2),
        "n": jnp.int32(3),
        "key": jax.random.key(0),
        "raw": jax.random.PRNGKey(1),
        "flag": jnp.array(True),
        "empty": jnp.zeros((0, 3)),
        "none": None,
    }
    with make_client(params=params) as client:
        for device in range(4):
            client.submit_gradient_sync(device, {**params, "w": np.full(2, device, np.float32)})
        for ticket in [client.submit_sync_collective(device) for device in range(4)]:
            found = ticket.wait()
            np.testing.assert_array_equal(found.pop("w"), np.full(2, 1.5, np.float32))
            assert found == {"n": None, "key": None, "raw": None, "flag": None, "empty": None, "none": None}


def test_devices_that_announce_a_part_get_that_part_and_none_for_the_rest() -> None:
    params = {**PARAMS, "v": np.zeros(4, np.float32)}
    with make_client(params=params, fuse_max_bytes=80_000) as client:
        for step, keys in enumerate([("w",), ("v", "b"), ("w", "b", "v"), ()]):
            part = {key: params[key] for key in keys}
            for device in range(4):
                client.register_sync_parameters(part, device=device)
                if keys:
                    client.submit_gradient_sync(device, gradient(device + step, part))
            for ticket in [client.submit_sync_collective(device) for device in range(4)]:
                found = ticket.wait()
                check_equal({k: v for k, v in found.items() if v is not None}, gradient(1.5 + step, part))
                assert found.keys() == params.keys()
        per_step = (6, 7, 13, 0)
        assert client.statistics()["bytes"] == 4 * sum(per_step)


def test_unused_leaves_count_as_zero_where_that_was_asked_for() -> None:
    with make_client(unused="zero") as client:
        client.submit_gradient_sync(0, {"w": gradient(8)["w"]})
        for device in (1, 2):
            client.submit_gradient_sync(device, {"b": gradient(device)["b"]})
        client.register_sync_parameters(PARAMS, device=3)
        for ticket in [client.submit_sync_collective(device) for device in range(4)]:
            check_equal(ticket.wait(), {"w": gradient(2)["w"], "b": gradient(0.75)["b"]})


def test_double_precision_of_the_callers_thread_alone_is_kept() -> None:
    with jax.enable_x64(True):
        params = {"w": np.zeros(3, np.float64)}
        with make_client(params=params) as client:
            for device in range(4):
                client.submit_gradient_sync(device, {"w": np.full(3, 1 + device * 1e-12)})
            for ticket in [client.submit_sync_collective(device) for device in range(4)]:
                expected = np.mean([1 + device * 1e-12 for device in range(4)])
                assert ticket.wait()["w"].dtype == np.float64
                np.testing.assert_allclose(ticket.wait()["w"], np.full(3, expected), rtol=1e-15)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.set_mesh(jaxsync.make_mesh({"other": 8})),
        lambda: jax.default_device(jax.devices()[5]),
        lambda: jax.transfer_guard_device_to_host("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.numpy_dtype_promotion("standard"),
    ],
    ids=["mesh", "device", "transfer guard", "nans", "precision", "promotion"],
)
@pytest.mark.parametrize("fuse_max_bytes", [0, 80_000], ids=["alone", "fused"])
def test_settings_of_the_callers_thread_change_nothing(setting: Any, fuse_max_bytes: int) -> None:
    with setting(), make_client(fuse_max_bytes=fuse_max_bytes) as client:
        for device in range(4):
            client.submit_gradient_sync(device, gradient(np.nan if device == 1 else device))
        tickets = [client.submit_sync_collective(device) for device in range(4)]
        done = client.defer(lambda x: float(x), jnp.float32(2))
        results = [ticket.wait() for ticket in tickets]
        assert done.wait() == 2
    for result in results:
        check_equal(result, gradient(np.nan))


@pytest.mark.parametrize("fuse_max_bytes", [0, 80_000], ids=["alone", "fused"])
def test_weak_types_and_other_trees_of_equal_leaves_compile_nothing_new(
    compiles, fuse_max_bytes: int
) -> None:
    with make_client(fuse_max_bytes=fuse_max_bytes) as client:
        devices = devices_of(client)
        place = functools.partial(jax.device_put, gradient(1))
        weak = [jax.tree.map(lambda x: jnp.full(x.shape, 1.0), place(device)) for device in devices]
        run_step(client)
        compiles.clear()
        for _ in range(3):
            for device, tree in zip(devices, weak, strict=True):
                client.submit_gradient_sync(device, jax.device_put(tree, device))
            for ticket in [client.submit_sync_collective(device) for device in devices]:
                check_equal(ticket.wait(), gradient(1))
    assert compiles == []


# Launches.


def test_buckets_are_launched_before_all_gradients_are_in(client) -> None:
    for device in range(4):
        client.submit_gradient_sync(device, "['b']", gradient(device)["b"])
    for device in range(3):
        client.submit_gradient_sync(device, "['w']", gradient(device)["w"])
    wait_until(lambda: client.statistics()["launches"] == 1)
    assert "of 2 buckets 1 are launched" in client.describe()
    assert [e["what"] for e in json.loads(client.record()) if e["kind"] == "launch"] == ["bucket 0"]
    client.submit_gradient_sync(3, "['w']", gradient(3)["w"])
    for ticket in [client.submit_sync_collective(device) for device in range(4)]:
        check_equal(ticket.wait(), gradient(1.5))
    assert client.statistics()["launches"] == 2


def test_a_step_is_compiled_as_a_whole_and_bucket_by_bucket_and_in_no_other_way(compiles) -> None:
    """One program if all buckets of a step can be launched at once, else one for each."""
    params = {name: np.zeros(size, np.float32) for name, size in (("a", 7), ("b", 11), ("c", 13))}
    with make_client(params=params) as client:
        placed = [jax.device_put(gradient(i, params), device) for i, device in enumerate(devices_of(client))]
        jax.block_until_ready(placed)

        def send(*parts: str) -> None:
            for part in parts:
                expected = client.statistics()["launches"] + len(part)
                for device in range(4):
                    client.submit_gradient_sync(device, {name: placed[device][name] for name in part})
                wait_until(lambda n=expected: client.statistics()["launches"] == n)
            for ticket in [client.submit_sync_collective(device) for device in range(4)]:
                check_equal(ticket.wait(), gradient(1.5, params))

        compiles.clear()
        send("abc")
        assert len(compiles) == 1
        send("a", "b", "c")
        assert len(compiles) == 4
        send("a", "bc")
        send("abc")
        assert len(compiles) == 4


def test_gradients_may_be_handed_over_before_they_are_computed() -> None:
    with make_client(params={"x": np.zeros((), np.float32)}) as client:
        for device, place in enumerate(devices_of(client)):
            client.submit_gradient_sync(device, {"x": heavy(float(device), place)})
        for ticket in [client.submit_sync_collective(device) for device in range(4)]:
            assert float(ticket.wait()["x"]) == 1.5


def test_one_program_in_flight_is_enough() -> None:
    with make_client(max_in_flight=1) as client:
        for step in range(10):
            run_step(client, step)


def test_statistics_count_what_has_happened(client) -> None:
    for step in range(3):
        run_step(client, step)
    client.defer(lambda: None).wait()
    # The count follows the answer, on the loop's thread.
    wait_until(lambda: client.statistics()["steps"] == 3 and client.statistics()["callbacks"] == 1)
    assert client.statistics() == {
        "submissions": 3 * 4 * 2,
        "launches": 3 * 2,
        "bytes": 3 * 4 * 9,
        "steps": 3,
        "callbacks": 1,
    }


LAUNCH_ORDER = """
import sys
import numpy as np
from jaxsync.host.messages import Launch, Submit, Sync, Finish
from jaxsync.host.state import Setup, State, step

buckets = (0b11, 0b100, 0b11000, 0b100000)
setup = Setup(num_devices=4, buckets=buckets, is_strict=True, timeout_s=60, stall_s=10)
order = []
for seed in range(20):
    rng = np.random.default_rng([int(sys.argv[1]), seed])
    state = State(setup=setup)
    for number in range(3):
        parts = [(device, 1 << leaf) for device in range(4) for leaf in range(6)]
        messages = [Submit(device=parts[i][0], leaves=parts[i][1]) for i in rng.permutation(len(parts))]
        messages += [Sync(device=int(d), ticket=int(d)) for d in rng.permutation(4)]
        messages += [Finish(step=number)] * 4
        for message in messages:
            state, effects = step(state, message)
            order += [(e.step, e.bucket) for e in effects if isinstance(e, Launch)]
assert not state.steps
print(order)
"""


def test_every_hash_seed_and_every_order_of_arrival_launch_in_one_order(run_python) -> None:
    runs = [run_python(LAUNCH_ORDER, str(seed), PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    expected = [(step, bucket) for step in range(3) for bucket in range(4)] * 20
    for done in runs:
        assert done.stdout.strip() == str(expected), done.stderr


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_no_step_takes_gradients_of_another(num_devices: int) -> None:
    """With threads that are switched all the time, and values that tell step and device."""
    num_steps = 300
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with make_client(num_devices, fuse_max_bytes=80_000) as client:

            def work(device: int) -> int:
                previous = None
                for step in range(num_steps):
                    ticket = finish(client, device, device + num_devices * step)
                    if previous is not None:  # so that devices lead and lag by a step
                        check(previous, step - 1)
                    previous = ticket
                check(previous, num_steps - 1)
                return num_steps

            def check(ticket: Any, step: int) -> None:
                value = (num_devices - 1) / 2 + num_devices * step
                for leaf in jax.tree.leaves(ticket.wait()):
                    np.testing.assert_array_equal(np.asarray(leaf), np.full(leaf.shape, value, np.float32))

            jobs = [functools.partial(work, device) for device in range(num_devices)]
            assert in_threads(*jobs) == [num_steps] * num_devices
    finally:
        sys.setswitchinterval(interval)


# Registration.


def test_registering_an_equal_tree_again_keeps_all_programs(compiles) -> None:
    with make_client() as client:
        run_step(client)
        client.register_sync_parameters(PARAMS)
        compiles.clear()
        for step in range(3):
            client.register_sync_parameters({key: value + 1 for key, value in PARAMS.items()})
            run_step(client, step)
    with make_client() as other:  # an equal client in the same process
        run_step(other)
    assert compiles == []


def test_a_registered_tree_of_equal_paths_and_another_structure_is_another_tree(client) -> None:
    value = np.zeros(2, np.float32)
    for tree in ([value, value], (value, value), {"a": value, "none": None}, {"a": value}):
        client.register_sync_parameters(tree)
        run_step(client, params=tree)


def test_registered_parameters_are_copies(client) -> None:
    on_mesh = NamedSharding(client.mesh, P())
    given = {
        "numpy": np.ones(300_000, np.float32),
        "one device": jnp.ones(3),
        "on the mesh": jax.device_put(np.ones(3, np.float32), on_mesh),
        "key": jax.random.key(3),
    }
    placed = client.register_sync_parameters(given)
    assert all(leaf.sharding.is_equivalent_to(on_mesh, leaf.ndim) for leaf in jax.tree.leaves(placed))
    given["numpy"][:] = 7
    given["one device"].delete()
    given["on the mesh"].delete()
    for key in ("numpy", "one device", "on the mesh"):
        np.testing.assert_array_equal(placed[key], np.ones(placed[key].shape, np.float32))
    again = client.register_sync_parameters(placed)
    for leaf in jax.tree.leaves(again):
        leaf.delete()
    np.testing.assert_array_equal(placed["one device"], np.ones(3, np.float32))
    np.testing.assert_array_equal(jax.random.key_data(placed["key"]), jax.random.key_data(given["key"]))


def test_other_parameters_wait_for_the_open_step(client) -> None:
    ticket = finish(client, 0, 0)
    error = error_of(lambda: client.register_sync_parameters({"other": np.zeros(2, np.float32)}))
    assert type(error) is StartConflictError
    assert error.differences == ("step 0 is open: other parameters must wait",)
    tickets = [ticket, *[finish(client, device, device) for device in (1, 2, 3)]]
    for waiting in tickets:
        check_equal(waiting.wait(), gradient(1.5))
    other = {"other": np.zeros(2, np.float32)}
    client.register_sync_parameters(other)
    run_step(client, 1, other)


def test_replicas_that_differ_and_leaves_that_are_no_arrays_are_not_registered(client) -> None:
    pieces = [jax.device_put(np.full(2, i, np.float32), d) for i, d in enumerate(devices_of(client))]
    unequal = jax.make_array_from_single_device_arrays((2,), NamedSharding(client.mesh, P()), pieces)
    assert type(error_of(lambda: client.register_sync_parameters({"w": unequal}))) is ReplicaMismatchError
    with make_client(params=None) as other:
        for call in (
            lambda: client.register_sync_parameters({"f": print}),
            lambda: other.register_sync_parameters({"f": print}, device=0),
        ):
            error = error_of(call)
            assert type(error) is RegistrationError
            assert error.leaves == (("['f']", "builtin_function_or_method"),)
    run_step(client)


@pytest.mark.parametrize("attempt", range(10))
def test_devices_that_announce_at_once_register_once(attempt: int) -> None:
    with make_client(params=None) as client:
        barrier = threading.Barrier(4)

        def begin(device: int) -> Any:
            barrier.wait()
            client.register_sync_parameters(PARAMS, device=device)
            return finish(client, device, device).wait()

        for found in in_threads(*[functools.partial(begin, device) for device in range(4)]):
            check_equal(found, gradient(1.5))


@pytest.mark.parametrize(
    ("mesh", "axis", "problem"),
    [
        (lambda: jaxsync.make_mesh({"data": 4}), "batch", "SyncConfig.axis names 'batch', which the mesh"),
        (lambda: AbstractMesh((4,), ("data",)), "data", "it is an AbstractMesh: there are no devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_and_leaves_no_thread(mesh: Any, axis: str, problem: str) -> None:
    before = threading.enumerate()
    error = error_of(lambda: jaxsync.SyncClient(mesh(), jaxsync.SyncConfig(axis=axis)))
    assert type(error) is MeshError
    assert error.problems[0].startswith(problem)
    assert threading.enumerate() == before


# Tickets.


def test_several_waiters_of_one_ticket_get_the_same_answer(client) -> None:
    ticket = finish(client, 0, 0)
    others = [lambda d=d: finish(client, d, d) and None for d in (1, 2, 3)]
    found = in_threads(*[ticket.wait] * 5, *others)
    assert found[5:] == [None] * 3
    for tree in found[:5]:
        assert tree is found[0]
        check_equal(tree, gradient(1.5))


def test_a_waiter_that_timed_out_may_wait_again(client) -> None:
    ticket = finish(client, 0, 0)
    for _ in range(2):
        error = error_of(lambda: ticket.wait(timeout=0.01))
        assert type(error) is TicketTimeoutError
        assert (error.what_for, error.timeout_s) == (f"the sync of {devices_of(client)[0]}", 0.01)
    for device in (1, 2, 3):
        finish(client, device, device)
    check_equal(ticket.wait(timeout=20), gradient(1.5))
    check_equal(ticket.wait(), gradient(1.5))


def test_tickets_can_be_awaited_and_awaits_cancelled(client) -> None:
    async def main() -> None:
        ticket = finish(client, 0, 0)

        async def wait() -> Any:
            return await ticket

        cancelled = [asyncio.create_task(wait()) for _ in range(3)]
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        outcomes = await asyncio.gather(*cancelled, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 3
        tickets = [finish(client, device, device) for device in (1, 2, 3)]
        for tree in [await waiting, *[await other for other in tickets], await ticket]:
            check_equal(tree, gradient(1.5))

    asyncio.run(main())


def test_an_await_of_a_step_that_fails_raises(client) -> None:
    cause = ValueError("bad row")

    async def main() -> None:
        ticket = finish(client, 0, 0)
        task = asyncio.ensure_future(ticket)
        await asyncio.sleep(0)
        client.abort(cause, 1)
        with pytest.raises(SyncFailedError) as caught:
            await task
        assert caught.value.__cause__ is cause

    asyncio.run(main())


def test_each_waiter_gets_an_error_of_its_own(client) -> None:
    ticket = finish(client, 0, 0)
    client.abort(ValueError())
    first, second = in_threads(ticket.wait, ticket.wait)
    assert str(first) == str(second)
    assert first is not second


# Deferred callbacks.


def heavy(value: float, device: jax.Device | None = None) -> jax.Array:
    """An array that is not ready yet when it is returned."""

    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, m: (m @ m) / jnp.float32(600), x).sum() * 0 + jnp.float32(
            value
        )

    return compute(jax.device_put(np.ones((600, 600), np.float32), device))


def test_callbacks_run_in_order_and_see_numpy_values() -> None:
    seen: list[Any] = []
    with make_client() as client:
        for number in range(50):
            tree = {"x": jnp.full(2, float(number)), "n": number}
            client.defer(lambda a, b: seen.append((type(a["x"]), a["x"][0], a["n"], b)), tree, "text")
    assert [(kind, float(x), n, text) for kind, x, n, text in seen] == [
        (np.ndarray, float(number), number, "text") for number in range(50)
    ]


def test_an_array_that_is_deleted_before_its_callback_runs_is_an_error_of_the_callback(client) -> None:
    gate, array = threading.Event(), jnp.ones(3)
    client.defer(lambda: gate.wait(20) and None)
    ticket = client.defer(lambda x: None, array)
    array.delete()  # as a step does to a state it was given
    gate.set()
    error = error_of(ticket.wait)
    assert type(error) is CallbackError
    assert "deleted" in str(error.__cause__)
    run_step(client)


def test_a_ticket_of_defer_has_what_the_callback_returned(client) -> None:
    ticket = client.defer(lambda x: float(x) + 1, jnp.float32(2))
    assert ticket.wait() == 3
    assert ticket.done()
    assert client.defer(threading.current_thread).wait().name == "jaxsync-loop"


def test_a_callback_is_named_without_its_repr(client) -> None:
    """The repr of a partial function or of an object may wait for arrays, and print them."""

    class Shy:
        def __call__(self) -> None:
            raise OSError

        def __repr__(self) -> str:
            raise AssertionError("asked for")

    error = error_of(client.defer(Shy()).wait)
    assert error.callbacks == (f"{Shy.__qualname__}: OSError",)
    secret = jnp.full(3, 12345.0)
    ticket = client.defer(functools.partial(jnp.add, secret), "text")
    assert "12345" not in repr(ticket)
    assert type(error_of(ticket.wait)) is CallbackError
    run_step(client)


def test_callbacks_wait_for_arrays_that_are_not_ready(client) -> None:
    order: list[float] = []
    for value in (1.0, 2.0):
        client.defer(lambda x: order.append(float(x)), heavy(value))
    client.defer(lambda: order.append(3.0)).wait()
    assert order == [1.0, 2.0, 3.0]


def test_callbacks_run_while_a_step_is_open_and_before_anything_is_registered() -> None:
    with make_client(params=None) as client:
        assert client.defer(lambda: 1).wait() == 1
        client.register_sync_parameters(PARAMS)
        finish(client, 0, 0)
        assert client.defer(lambda: 2).wait() == 2


def test_what_a_callback_raises_its_ticket_raises_and_close_does_not_repeat() -> None:
    ran: list[int] = []
    cause = OSError("disk full")

    def fail() -> None:
        raise cause

    with make_client() as client:
        tickets = [client.defer(fail), client.defer(ran.append, 1)]
        error = error_of(tickets[0].wait)
        assert type(error) is CallbackError
        assert error.__cause__ is cause
        assert error.callbacks == (f"{fail.__qualname__}: OSError",)
        tickets[1].wait()
        run_step(client)  # a callback that raised breaks no step
    assert ran == [1]


def test_what_nobody_has_seen_of_raising_callbacks_close_raises_once() -> None:
    ran: list[int] = []
    client = make_client()
    for cause in (OSError("first"), KeyError("second")):
        client.defer(lambda cause=cause: (_ for _ in ()).throw(cause))
        client.defer(ran.append, 1)
    error = error_of(client.close)
    assert type(error) is CallbackError
    assert repr(error.__cause__) == "OSError('first')"
    assert [text.split(": ")[-1] for text in error.callbacks] == ["OSError", "KeyError"]
    assert ran == [1, 1]
    client.close()


def test_of_several_closers_one_gets_what_callbacks_raised() -> None:
    client = make_client()
    client.defer(lambda: 1 / 0)
    outcomes = in_threads(*[client.close] * 8)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["CallbackError"] + ["NoneType"] * 7


def test_a_callback_that_would_wait_for_its_own_loop_raises(client) -> None:
    pending = finish(client, 0, 0)
    calls = {
        f"waiting for the sync of {devices_of(client)[0]}": pending.wait,
        "close": client.close,
    }
    for function, call in calls.items():
        error = error_of(client.defer(call).wait)
        assert type(error) is CallbackError
        assert type(error.__cause__) is WrongThreadError
        assert error.__cause__.function == function

    async def main() -> None:
        await pending

    error = error_of(client.defer(lambda: asyncio.run(main())).wait)
    assert type(error.__cause__) is WrongThreadError


def test_a_callback_may_defer_look_and_hand_over_gradients(client) -> None:
    def work() -> Any:
        finish(client, 0, 0)
        return client.defer(lambda: client.statistics()["submissions"])

    assert client.defer(work).wait().wait() == 2
    assert "1 callbacks wait" in client.defer(client.describe).wait()


def test_defer_waits_while_a_thousand_callbacks_do(client) -> None:
    gate, entered = threading.Event(), threading.Event()

    def first() -> None:
        entered.set()
        gate.wait(20)

    client.defer(first)
    entered.wait(20)
    seen: list[int] = []
    for number in range(999):
        client.defer(seen.append, number)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(client.defer, seen.append, 999)
        with pytest.raises(TimeoutError):
            last.result(timeout=0.1)
        gate.set()
        last.result(timeout=20).wait()
    assert seen == list(range(1000))


def test_who_waits_in_defer_when_the_client_is_closed_is_told() -> None:
    client = make_client()
    gate, entered = threading.Event(), threading.Event()
    client.defer(lambda: (entered.set(), gate.wait(20)))
    entered.wait(20)
    tickets = [client.defer(lambda: None) for _ in range(999)]
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(client.defer, print)
        closing = pool.submit(client.close, 0.2)
        wait_until(lambda: client.is_closed)
        gate.set()
        assert type(blocked.exception(timeout=20)) is ClosedError
        assert type(closing.exception(timeout=20)) in (type(None), TimeoutError)
    client.close()
    for ticket in tickets:
        assert type(error_of(ticket.wait)) is ClosedError


# Looking on.


def test_looking_on_works_while_others_wait_and_after_close() -> None:
    client = make_client()
    run_step(client)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(finish(client, device, 0).wait) for device in (0, 1, 2)]
        text = client.describe()
        assert text.startswith(
            "SyncClient over mesh (data=4)\nnext step 1\nstep 1: of 2 buckets 0 are launched"
        )
        owed = f"{devices_of(client)[3]} has not synced, nor handed over the gradients of ['b'], ['w']"
        assert owed in text
        kinds = {event["kind"] for event in json.loads(client.record())}
        assert kinds == {"sync", "launch", "finish", "answer"}
        assert client.statistics()["launches"] == 2
        client.close()
        assert [type(future.exception(timeout=20)) for future in waiting] == [ClosedError] * 3
    assert "broken: closed" in client.describe()
    assert client.statistics()["launches"] == 2
    assert json.loads(client.record())[-1]["kind"] == "reject"


def test_open_steps_say_who_has_synced_and_who_owes_what(client) -> None:
    devices = devices_of(client)
    assert client.open_steps() == ()
    first, second = finish(client, 1, 1), finish(client, 2, 2)
    client.submit_gradient_sync(0, gradient(0))
    client.submit_gradient_sync(3, "['b']", gradient(3)["b"])
    wait_until(lambda: client.statistics()["launches"] == 1)
    ahead = finish(client, 2, 12)
    one, other = client.open_steps()
    assert (one.number, one.num_buckets, one.num_launched) == (0, 2, 1)
    assert one.tickets == {devices[1]: first, devices[2]: second}
    assert one.owed == {devices[0]: (), devices[3]: ("['w']",)}
    assert (other.number, other.num_launched, other.num_finished) == (1, 0, 0)
    assert other.tickets == {devices[2]: ahead}
    assert other.owed == dict.fromkeys([devices[0], devices[1], devices[3]], ("['b']", "['w']"))
    wait_until(lambda: client.open_steps()[0].waited_s > 0)
    assert str(other) in client.describe()
    client.submit_sync_collective(0)
    client.submit_gradient_sync(3, "['w']", gradient(3)["w"])
    client.submit_sync_collective(3)
    for device in (0, 1, 3):
        finish(client, device, 10 + device)
    check_equal(first.wait(), gradient(1.5))
    check_equal(ahead.wait(), gradient(11.5))
    assert client.open_steps() == ()


def test_the_ticket_of_an_interrupted_call_is_among_those_of_its_open_step(client) -> None:
    for device in range(3):
        finish(client, device, device)  # and nobody has the tickets
    [step] = client.open_steps()
    finish(client, 3, 3)
    for device, ticket in step.tickets.items():
        found = ticket.wait()
        check_equal(found, gradient(1.5))
        assert found["b"].devices() == {device}


def test_no_step_is_open_after_a_failure_and_after_close() -> None:
    client = make_client()
    finish(client, 0, 0)
    client.abort(ValueError())
    assert client.open_steps() == ()
    client.close()
    assert client.open_steps() == ()


def test_devices_owe_only_what_the_others_have_announced(client) -> None:
    for device in range(3):
        client.register_sync_parameters({"b": PARAMS["b"]}, device=device)
    [step] = client.open_steps()
    assert step.owed == dict.fromkeys(devices_of(client), ("['b']",))
    assert "['w']" not in client.describe()


def test_a_stall_is_reported_once_and_the_step_goes_on(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="jaxsync"), make_client(stall_warning_s=0.05) as client:
        tickets = [finish(client, device, device) for device in (0, 1)]
        wait_until(lambda: bool(caplog.records))
        with pytest.raises(TicketTimeoutError):
            tickets[0].wait(timeout=0.2)
        tickets += [finish(client, device, device) for device in (2, 3)]
        for ticket in tickets:
            check_equal(ticket.wait(), gradient(1.5))
    [record] = caplog.records
    names = ", ".join(map(str, devices_of(client)[2:]))
    assert record.getMessage() == (
        f"step 0 has waited for 0.05 s: {names} have not synced, "
        "nor handed over the gradients of ['b'], ['w']"
    )


# Refusals: the caller is told, and the step of the others goes on.


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda client: jnp.zeros(3), "lives on {0}, not on {1}"),
        (
            lambda client: client.register_sync_parameters(PARAMS)["b"],
            "lives on {0}, {1}, {2}, {3}, not on {1}",
        ),
        (lambda client: np.zeros(4, np.float32), "has shape (4,); wanted (3,)"),
        (lambda client: np.zeros(3, np.float16), "has dtype float16; wanted float32"),
        (lambda client: jnp.zeros(3, jnp.bfloat16), "has dtype bfloat16; wanted float32"),
        (lambda client: 1.5, "is a float, no array"),
        (lambda client: "text", "is a str, no array"),
        (lambda client: jax.ShapeDtypeStruct((3,), "float32"), "is a ShapeDtypeStruct, no array"),
        (lambda client: deleted(client), "was deleted or donated"),
    ],
    ids=["elsewhere", "everywhere", "shape", "dtype", "dtype of jax", "float", "str", "struct", "deleted"],
)
def test_a_gradient_that_does_not_fit_is_named_with_its_leaf_and_device(client, value, problem: str) -> None:
    names = [str(device) for device in devices_of(client)]
    tree = {**gradient(1), "b": value(client)}
    for call in (
        lambda: client.submit_gradient_sync(1, tree),
        lambda: client.submit_gradient_sync(1, "['b']", tree["b"]),
    ):
        error = error_of(call)
        assert type(error) is SubmissionError
        assert error.device == names[1]
        assert error.problems == ("grads['b'] " + problem.format(*names),)
    run_step(client)


def deleted(client: jaxsync.SyncClient) -> jax.Array:
    array = jax.device_put(np.zeros(3, np.float32), devices_of(client)[1])
    array.delete()
    return array


def test_a_leaf_that_was_not_announced_is_named(client) -> None:
    for device in range(4):
        client.register_sync_parameters({"b": PARAMS["b"]}, device=device)
    error = error_of(lambda: client.submit_gradient_sync(2, gradient(2)))
    assert type(error) is SubmissionError
    assert error.problems == ("grads['w'] was not announced for step 0",)
    for device in range(4):
        client.submit_gradient_sync(device, "['b']", gradient(device)["b"])
    for ticket in [client.submit_sync_collective(device) for device in range(4)]:
        check_equal(ticket.wait()["b"], gradient(1.5)["b"])


@pytest.mark.parametrize("grad", [None, {}])
def test_handing_over_nothing_is_refused(client, grad: Any) -> None:
    for call, problem in (
        (lambda: client.submit_gradient_sync(0, "['b']", grad), "grads['b'] holds no gradient"),
        (lambda: client.submit_gradient_sync(0, {"b": grad}), "grads holds no gradient"),
    ):
        error = error_of(call)
        assert type(error) is SubmissionError
        assert error.problems == (problem,)
    assert type(error_of(lambda: client.submit_gradient_sync(0, "['c']", grad))) is UnknownNameError
    run_step(client)


@pytest.mark.parametrize("device", [-1, 4, True, None, "cpu", 1.0])
def test_an_unknown_device_is_named_and_those_there_are_listed(client, device: Any) -> None:
    calls = [
        lambda: client.submit_gradient_sync(device, gradient(0)),
        lambda: client.submit_sync_collective(device),
    ]
    if device is not None:  # where None has a meaning of its own
        calls.append(lambda: client.register_sync_parameters(PARAMS, device=device))
        calls.append(lambda: client.abort(ValueError(), device))
    for call in calls:
        error = error_of(call)
        assert type(error) is UnknownNameError
        assert (error.kind, error.names) == ("device", (str(device),))
        assert error.known == tuple(map(str, devices_of(client)))
    run_step(client)


def test_a_device_outside_the_mesh_is_unknown(client) -> None:
    error = error_of(lambda: client.submit_sync_collective(jax.devices()[5]))
    assert (type(error), error.names) == (UnknownNameError, (str(jax.devices()[5]),))


def test_an_unknown_leaf_is_named_and_those_there_are_listed(client) -> None:
    for call, names in (
        (lambda: client.submit_gradient_sync(0, "['x']", np.zeros(3)), ("['x']",)),
        (lambda: client.submit_gradient_sync(0, "['w']", {"x": np.zeros(3)}), ("['w']['x']",)),
        (lambda: client.submit_gradient_sync(0, {**gradient(0), "y": 1, "x": 1}), ("['x']", "['y']")),
    ):
        error = error_of(call)
        assert type(error) is UnknownNameError
        assert (error.kind, error.names, error.known) == ("leaf", names, ("['b']", "['w']"))
    run_step(client)


def test_an_announcement_after_a_gradient_is_told_its_place(client) -> None:
    client.submit_gradient_sync(1, "['w']", gradient(1)["w"])
    error = error_of(lambda: client.register_sync_parameters(PARAMS, device=1))
    assert (type(error), error.leaves) == (DuplicateError, ("['w']",))
    assert "its announcement comes before the first of them" in error.what()
    client.register_sync_parameters(PARAMS, device=0)
    error = error_of(lambda: client.register_sync_parameters(PARAMS, device=0))
    assert (type(error), error.leaves) == (DuplicateError, ())
    assert error.what().endswith("did that before in step 0.")
    assert error.fix().startswith("announce once a step, before the first gradient")


@pytest.mark.parametrize(
    "again",
    [
        lambda client: client.submit_gradient_sync(1, "['w']", np.full((2, 3), 50, np.float32)),
        lambda client: client.submit_gradient_sync(1, gradient(50)),
        lambda client: client.register_sync_parameters(PARAMS, device=1),
    ],
    ids=["leaf", "tree", "announcement"],
)
def test_what_a_device_does_twice_is_refused_and_the_sums_stay_right(client, again: Any) -> None:
    client.submit_gradient_sync(1, "['w']", gradient(1)["w"])
    error = error_of(lambda: again(client))
    assert type(error) is DuplicateError
    assert (error.device, error.step) == (str(devices_of(client)[1]), 0)
    client.submit_gradient_sync(1, "['b']", gradient(1)["b"])
    tickets = [client.submit_sync_collective(1), *[finish(client, device, device) for device in (0, 2, 3)]]
    for ticket in tickets:
        check_equal(ticket.wait(), gradient(1.5))
    run_step(client, 1)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
@pytest.mark.parametrize("method", ["submit_gradient_sync", "register_sync_parameters", "defer"])
def test_calls_with_traced_values_are_refused(client, transform: Any, method: str) -> None:
    calls = {
        "submit_gradient_sync": lambda x: client.submit_gradient_sync(0, "['b']", x),
        "register_sync_parameters": lambda x: client.register_sync_parameters({"b": x}),
        "defer": lambda x: client.defer(print, {"x": x}),
    }

    def traced(x: jax.Array) -> jax.Array:
        calls[method](x)
        return x.sum()

    argument = jnp.ones((2, 3)) if transform is jax.vmap else jnp.ones(3)
    error = error_of(lambda: transform(traced)(argument))
    assert type(error) is TracedSubmissionError
    assert error.function == method
    run_step(client)


# Failures: all are told.


def test_a_step_that_is_not_complete_in_time_fails_for_all_and_says_who_owes_what() -> None:
    client = make_client(timeout_s=0.3)
    client.submit_gradient_sync(3, "['b']", gradient(3)["b"])
    tickets = [finish(client, device, device) for device in (0, 1)]
    names = list(map(str, devices_of(client)))
    for error in in_threads(
        *[ticket.wait for ticket in tickets], lambda: wait_and_submit(client, tickets[0])
    ):
        assert type(error) is SyncTimeoutError
        assert isinstance(error, TimeoutError)
        assert (error.step, error.timeout_s) == (0, 0.3)
        assert error.owed == (
            f"{names[2]} has not synced, nor handed over the gradients of ['b'], ['w']",
            f"{names[3]} has not synced, nor handed over the gradients of ['w']",
        )
        assert {"sync", "reject"} <= set(error.events.split())
        assert error.events in str(error)
    assert "broken: timeout in step 0" in client.describe()
    client.close()


def wait_and_submit(client: jaxsync.SyncClient, ticket: Any) -> Any:
    ticket.wait_until_done()
    return client.submit_gradient_sync(2, gradient(2))


def test_the_time_of_earlier_steps_does_not_count_for_a_later_one() -> None:
    with make_client(timeout_s=1.0) as client:
        for step in range(4):
            tickets = [finish(client, device, device + step) for device in range(3)]
            with pytest.raises(TicketTimeoutError):
                tickets[0].wait(timeout=0.4)
            check_equal(finish(client, 3, 3 + step).wait(), gradient(1.5 + step))


def test_the_time_compiling_takes_does_not_count() -> None:
    with make_client(params=None, timeout_s=0.4, fuse_max_bytes=80_000, bucket_max_leaves=80) as client:
        for first in (1, 2):  # the programs of the second tree have the leaves of the first
            params = {f"w{i}": np.zeros(first + i, np.float32) for i in range(80)}
            client.register_sync_parameters(params)
            run_step(client, params=params)


def test_the_time_that_others_keep_the_launcher_does_not_count() -> None:
    """As a train step does while it compiles."""
    gate, entered = threading.Event(), threading.Event()

    def hold() -> Any:
        return process_launcher().launch(lambda: (entered.set(), gate.wait(20)), None, lambda _: ())

    with make_client(timeout_s=0.3) as client, ThreadPoolExecutor(1) as pool:
        run_step(client)
        pool.submit(hold)
        entered.wait(20)
        tickets = [finish(client, device, device) for device in range(4)]
        with pytest.raises(TicketTimeoutError):
            tickets[0].wait(timeout=0.6)
        gate.set()
        for ticket in tickets:
            check_equal(ticket.wait(), gradient(1.5))


def test_the_time_a_callback_takes_does_not_count() -> None:
    gate, entered = threading.Event(), threading.Event()
    with make_client(timeout_s=0.3) as client:
        run_step(client)
        client.defer(lambda: (entered.set(), gate.wait(20)))
        entered.wait(20)
        tickets = [finish(client, device, device) for device in range(4)]
        with pytest.raises(TicketTimeoutError):
            tickets[0].wait(timeout=0.6)
        gate.set()
        for ticket in tickets:
            check_equal(ticket.wait(), gradient(1.5))


@pytest.mark.parametrize(
    "odd",
    [
        lambda client: client.register_sync_parameters({"b": PARAMS["b"]}, device=3),
        lambda client: client.register_sync_parameters({}, device=3),
        lambda client: client.register_sync_parameters({**PARAMS, "x": np.zeros(2)}, device=3),
        lambda client: client.register_sync_parameters({**PARAMS, "b": np.zeros(4, np.float32)}, device=3),
        lambda client: client.register_sync_parameters({**PARAMS, "b": np.zeros(3, np.float64)}, device=3),
        lambda client: client.submit_sync_collective(3).wait(),
    ],
    ids=["fewer leaves", "no leaves", "more leaves", "shape", "dtype", "nothing"],
)
def test_devices_that_differ_fail_all_before_any_launch(client, odd: Any) -> None:
    tickets = [finish(client, device, device) for device in range(3)]
    errors = [error_of(lambda: odd(client)), *in_threads(*[ticket.wait for ticket in tickets])]
    assert {type(error) for error in errors} == {SetMismatchError}
    assert len({str(error) for error in errors}) == 1
    assert str(devices_of(client)[3]) in errors[0].problems[0]
    assert client.statistics()["launches"] == 0
    for call in (
        lambda: client.submit_gradient_sync(0, gradient(0)),
        lambda: client.submit_sync_collective(0),
        lambda: client.register_sync_parameters(PARAMS, device=0),
        lambda: client.register_sync_parameters([np.zeros(1, np.float32)]),
        lambda: client.defer(print),
    ):
        assert type(error_of(call)) is SetMismatchError


def test_a_whole_submission_among_partial_announcements_fails_its_sender_too(client) -> None:
    client.register_sync_parameters({"b": PARAMS["b"]}, device=0)
    error = error_of(lambda: client.submit_gradient_sync(1, gradient(1)))
    assert type(error) is SetMismatchError
    names = list(map(str, devices_of(client)))
    assert error.problems == (f"{names[1]} announces ['w'], which {names[0]} does not",)


def test_a_missing_gradient_fails_all_while_they_wait(client) -> None:
    tickets = [finish(client, device, device) for device in range(3)]
    client.submit_gradient_sync(3, "['w']", gradient(3)["w"])
    *errors, _ = in_threads(*[t.wait for t in tickets], lambda: client.submit_sync_collective(3))
    for error in errors:
        assert type(error) is MissingGradientError
        assert (error.step, error.device, error.leaves) == (0, str(devices_of(client)[3]), ("['b']",))


def test_an_abort_reaches_waiters_and_later_calls_and_the_first_cause_wins(client) -> None:
    first, second = OSError("first"), OSError("second")
    tickets = [finish(client, device, device) for device in range(3)]
    *errors, _ = in_threads(
        *[ticket.wait for ticket in tickets], lambda: (client.abort(first, 3), client.abort(second, 0))
    )
    errors += [
        error_of(lambda: client.submit_gradient_sync(3, gradient(3))),
        error_of(lambda: client.submit_sync_collective(3)),
        error_of(lambda: client.register_sync_parameters(PARAMS, device=3)),
        error_of(lambda: client.defer(print)),
    ]
    for error in errors:
        assert type(error) is SyncFailedError
        assert error.__cause__ is first
        assert (error.devices, error.reason) == ((str(devices_of(client)[3]),), "OSError was raised")


@pytest.mark.parametrize("error", ["text", ValueError, None])
def test_an_abort_without_an_exception_is_refused_and_nobody_else_is_told(client, error: Any) -> None:
    refused = error_of(lambda: client.abort(error))
    assert type(refused) is ArgumentError
    assert (refused.argument, refused.got) == ("error", type(error).__name__)
    run_step(client)


def test_an_abort_with_an_error_of_jaxsync_is_told_as_it_is(client) -> None:
    ticket = finish(client, 0, 0)
    try:
        raise SubmissionError(device="mine", problems=("rotten",)) from OSError("disk full")
    except SubmissionError as error:
        client.abort(error, 1)
    for told in (error_of(ticket.wait), error_of(lambda: client.submit_sync_collective(1))):
        assert type(told) is SubmissionError
        assert told.problems == ("rotten",)
        assert repr(told.__cause__) == "OSError('disk full')"


def test_an_exception_that_leaves_the_with_block_is_the_cause_for_those_who_wait() -> None:
    cause, client = KeyError("mine"), make_client()
    ticket = finish(client, 0, 0)

    def leave() -> None:
        with client:
            raise cause

    error, left = in_threads(ticket.wait, leave)
    assert left is cause
    assert type(error) is SyncFailedError
    assert error.__cause__ is cause
    assert client.is_closed


def test_an_exception_that_leaves_the_with_block_carries_what_callbacks_raised() -> None:
    cause = KeyError("mine")

    def leave() -> None:
        with make_client() as client:
            client.defer(lambda: 1 / 0)
            raise cause

    with pytest.raises(KeyError):
        leave()
    [note] = cause.__notes__
    assert note.startswith("1 deferred callback raised.")


def test_an_exception_that_leaves_the_with_block_is_not_hidden_by_a_callback_that_does_not_end() -> None:
    gate, entered, cause, client = threading.Event(), threading.Event(), KeyError("mine"), make_client()

    def leave() -> None:
        with client:
            client.defer(lambda: (entered.set(), gate.wait(20)))
            entered.wait(20)
            raise cause

    client.close = functools.partial(client.close, 0.1)
    [left] = in_threads(leave)
    assert left is cause
    [note] = cause.__notes__
    assert note.startswith("close: the loop did not end within 0.1 s: a callback still runs, or a call that ")
    gate.set()
    client.close()


class Faulty(Exchange):
    """An exchange that breaks where a test tells it to."""

    breaks: str = ""

    def _break(self, where: str) -> None:
        if where == Faulty.breaks:
            raise OSError(f"broken in {where}")

    def perform(self, effect: Any) -> None:
        self._break(f"perform {type(effect).__name__}")
        super().perform(effect)

    def poll(self) -> bool:
        self._break("poll")
        return super().poll()

    def paused_s(self) -> float:
        self._break("paused_s")
        return super().paused_s()

    def crash(self, error: BaseException, effect: Any = None) -> Any:
        self._break("crash")
        return super().crash(error, effect)


@pytest.fixture
def faulty(monkeypatch) -> Iterator[jaxsync.SyncClient]:
    monkeypatch.setattr("jaxsync.client.Exchange", Faulty)
    monkeypatch.setattr(Faulty, "breaks", "")
    client = make_client()
    yield client
    Faulty.breaks = ""
    client.close()


@pytest.mark.parametrize("where", ["poll", "paused_s", f"perform {Launch.__name__}"])
def test_an_exception_of_the_loop_reaches_every_waiter_with_its_cause(faulty, where: str) -> None:
    tickets = [finish(faulty, device, device) for device in range(3)]
    Faulty.breaks = where
    if where.startswith("perform"):
        tickets.append(finish(faulty, 3, 3))
    for error in in_threads(*[ticket.wait for ticket in tickets]):
        assert type(error) is SyncFailedError
        assert repr(error.__cause__) == f"OSError('broken in {where}')"
    assert type(error_of(lambda: faulty.submit_sync_collective(3))) is SyncFailedError


def test_an_answer_that_breaks_is_an_error_for_its_waiter_and_all_later_calls(faulty) -> None:
    Faulty.breaks = f"perform {Answer.__name__}"
    tickets = [finish(faulty, device, device) for device in range(4)]
    for error in in_threads(*[ticket.wait for ticket in tickets]):
        assert type(error) is SyncFailedError
        assert "broken in perform Answer" in repr(error.__cause__)
    assert type(error_of(lambda: faulty.submit_sync_collective(3))) is SyncFailedError


def test_a_rejection_that_breaks_still_tells_the_first_cause(faulty) -> None:
    cause = ValueError("the first")
    tickets = [finish(faulty, device, device) for device in range(3)]
    Faulty.breaks = f"perform {Reject.__name__}"
    faulty.abort(cause)
    for error in in_threads(*[ticket.wait for ticket in tickets]):
        assert type(error) is SyncFailedError
        assert error.__cause__ is cause


def test_a_forgetting_that_breaks_fails_the_next_call_and_nothing_before(faulty) -> None:
    Faulty.breaks = f"perform {Forget.__name__}"
    run_step(faulty)
    wait_until(lambda: "broken: crash" in faulty.describe())
    error = error_of(lambda: faulty.submit_sync_collective(0))
    assert repr(error.__cause__) == "OSError('broken in perform Forget')"


def test_a_warning_that_breaks_is_a_failure_with_its_cause(monkeypatch) -> None:
    monkeypatch.setattr("jaxsync.client.Exchange", Faulty)
    monkeypatch.setattr(Faulty, "breaks", f"perform {Warn.__name__}")
    client = make_client(stall_warning_s=0.05)
    error = error_of(finish(client, 0, 0).wait)
    assert type(error) is SyncFailedError
    assert repr(error.__cause__) == "OSError('broken in perform Warn')"
    client.close()


def test_an_exception_while_an_exception_is_noted_still_reaches_every_waiter(faulty, monkeypatch) -> None:
    tickets = [finish(faulty, device, device) for device in range(3)]
    monkeypatch.setattr(Faulty, "poll", lambda self: 1 / 0)
    Faulty.breaks = "crash"
    for error in in_threads(*[ticket.wait for ticket in tickets]):
        assert type(error) is SyncFailedError
        assert error.reason == "an exception"


# Registering other parameters while calls and answers are under way.

OTHERS = {"w": np.zeros(3, np.float32), "z": np.zeros((2, 3), np.float32)}  # the indices and shapes of PARAMS


class Late(np.ndarray):
    """A gradient that lets something happen while it is looked at."""

    then: Callable[[], object]

    @property
    def sharding(self) -> Any:
        then, self.then = self.then, lambda: None
        then()
        raise AttributeError


def late(value: np.ndarray, then: Callable[[], object]) -> Late:
    array = value.view(Late)
    array.then = then
    return array


def test_gradients_of_parameters_that_others_replaced_meanwhile_are_not_taken_for_those(client) -> None:
    """Leaf 0 of the one is leaf 0 of the other, of the same shape."""
    register = functools.partial(client.register_sync_parameters, OTHERS)
    error = error_of(lambda: client.submit_gradient_sync(0, {"b": late(gradient(9)["b"], register)}))
    assert type(error) is UnknownNameError
    assert (error.names, error.known) == (("['b']",), ("['w']", "['z']"))
    run_step(client, params=OTHERS)


def test_a_gradient_that_fits_what_others_registered_meanwhile_counts_there(client) -> None:
    params = {"a": np.zeros(5, np.float32), **PARAMS}  # 'b' and 'w' have other indices
    own = gradient(0, params)
    register = functools.partial(client.register_sync_parameters, params)
    client.submit_gradient_sync(0, "['b']", late(own["b"], register))
    client.submit_gradient_sync(0, {"a": own["a"], "w": own["w"]})
    tickets = [client.submit_sync_collective(0), *[finish(client, d, d, params) for d in (1, 2, 3)]]
    for ticket in tickets:
        check_equal(ticket.wait(), gradient(1.5, params))


def test_an_announcement_of_parameters_that_others_replaced_meanwhile_is_not_taken_for_those(client) -> None:
    class Shaped:
        dtype = np.dtype(np.float32)

        @property
        def shape(self) -> tuple[int, ...]:
            client.register_sync_parameters(OTHERS)
            return (3,)

    error = error_of(lambda: client.register_sync_parameters({"b": Shaped()}, device=0))
    assert type(error) is SetMismatchError
    assert error.problems == (f"{devices_of(client)[0]}: ['b'] is not registered",)


def test_answers_have_the_structure_of_their_step_whatever_was_registered_since(faulty, monkeypatch) -> None:
    """A step is complete, and other parameters can be registered, before its tickets are answered."""
    perform = Faulty.perform

    def register_first(self: Any, effect: Any) -> None:
        if isinstance(effect, Answer) and faulty.plan.leaves[0].path == "['b']":
            faulty.register_sync_parameters([np.zeros(3, np.float32)])
        perform(self, effect)

    monkeypatch.setattr(Faulty, "perform", register_first)
    run_step(faulty)
    run_step(faulty, 1, [np.zeros(3, np.float32)])


# Memory.


def test_live_arrays_stay_flat_over_many_steps(client) -> None:
    def live() -> int:
        process_launcher().drain()  # it keeps an output of each program that nobody has waited for
        gc.collect()
        return len(jax.live_arrays())

    for step in range(3):
        run_step(client, step)
    before = live()
    for step in range(200):
        tickets = [finish(client, device, step) for device in range(4)]
        tickets[0].wait_until_done()  # and nobody looks at the answer
    del tickets
    run_step(client, 7)
    assert live() <= before


def kept_gradients(client: jaxsync.SyncClient, device: int) -> list[weakref.ref[jax.Array]]:
    grads = jax.device_put(gradient(device), devices_of(client)[device])
    client.submit_gradient_sync(device, grads)
    return [weakref.ref(leaf) for leaf in jax.tree.leaves(grads)]


def is_gone(refs: list[Any]) -> bool:
    gc.collect()
    return all(ref() is None for ref in refs)


def test_no_gradient_is_kept_after_its_launch(client) -> None:
    refs = [ref for device in range(4) for ref in kept_gradients(client, device)]
    wait_until(lambda: client.statistics()["launches"] == 2)
    wait_until(lambda: is_gone(refs))
    for ticket in [client.submit_sync_collective(device) for device in range(4)]:
        check_equal(ticket.wait(), gradient(1.5))


def test_no_gradient_is_kept_after_a_failure(client) -> None:
    refs = kept_gradients(client, 0) + kept_gradients(client, 1)
    client.abort(ValueError())
    wait_until(lambda: is_gone(refs))


def test_an_abort_that_comes_second_is_not_kept(client) -> None:
    class Own(Exception):
        pass

    first, second = Own("first"), Own("second")
    client.abort(first)
    client.abort(second)
    ref = weakref.ref(second)
    del second
    assert is_gone([ref])
    assert error_of(lambda: client.defer(print)).__cause__ is first


def test_no_gradient_is_kept_by_a_launch_that_failed(client) -> None:
    lost = jax.device_put(gradient(3), devices_of(client)[3])
    client.submit_gradient_sync(3, lost)
    lost["b"].delete()
    refs = [ref for device in range(3) for ref in kept_gradients(client, device)]
    error = error_of(client.submit_sync_collective(3).wait)
    assert type(error) is SyncFailedError
    assert error.__cause__.__notes__ == [f"gradient ['b'] of {devices_of(client)[3]}"]
    wait_until(lambda: is_gone(refs))


def test_no_gradient_or_deferred_array_is_kept_after_close() -> None:
    client = make_client()
    refs = kept_gradients(client, 0)
    ticket = client.submit_sync_collective(0)
    gate, entered = threading.Event(), threading.Event()
    client.defer(lambda: (entered.set(), gate.wait(20)))
    entered.wait(20)
    array = jnp.ones(3) + 1
    refs.append(weakref.ref(array))
    waiting = client.defer(print, array)
    del array
    with pytest.raises(TimeoutError):
        client.close(timeout=0.1)
    gate.set()
    client.close()
    assert [type(error_of(t.wait)) for t in (ticket, waiting)] == [ClosedError] * 2
    wait_until(lambda: is_gone(refs))


def test_a_callback_that_raised_keeps_no_arrays(client) -> None:
    array = jnp.ones(3) + 1
    refs = [weakref.ref(array)]
    ticket = client.defer(lambda x: 1 / 0, array)
    del array
    assert type(error_of(ticket.wait)) is CallbackError
    wait_until(lambda: is_gone(refs))


def test_an_answered_ticket_keeps_its_own_devices_gradients_only(client) -> None:
    tickets = run_step(client)
    found = [ticket.wait() for ticket in tickets]
    others = [weakref.ref(leaf) for tree in found[1:] for leaf in jax.tree.leaves(tree)]
    own = [weakref.ref(leaf) for leaf in jax.tree.leaves(found[0])]
    del found, tickets[1:]
    process_launcher().drain()
    wait_until(lambda: is_gone(others))
    assert all(ref() is not None for ref in own)


# Closing.


CALLS: dict[str, Callable[[Any], Any]] = {
    "register_sync_parameters": lambda client: client.register_sync_parameters(PARAMS),
    "register_sync_parameters, device": lambda client: client.register_sync_parameters(PARAMS, device=0),
    "submit_gradient_sync": lambda client: client.submit_gradient_sync(0, gradient(0)),
    "submit_sync_collective": lambda client: client.submit_sync_collective(0),
    "defer": lambda client: client.defer(print),
    "abort": lambda client: client.abort(ValueError()),
    "entering the client": lambda client: client.__enter__(),
}
LOOKS = {"describe", "open_steps", "statistics", "record", "plan", "is_closed", "config", "mesh"}


@pytest.mark.parametrize("call", CALLS)
def test_after_close_every_call_that_would_do_something_raises(call: str) -> None:
    client = make_client()
    client.close()
    error = error_of(lambda: CALLS[call](client))
    assert type(error) is ClosedError
    assert error.function == call.split(",")[0]


def test_every_public_method_is_a_call_that_raises_after_close_or_a_look() -> None:
    client = make_client()
    client.close()
    public = {name for name in [*dir(client), *vars(client)] if not name.startswith("_")}
    assert public == {call.split(",")[0] for call in CALLS if " " not in call} | LOOKS | {"close"}


def test_calls_before_registration_raise() -> None:
    with make_client(params=None) as client:
        for function, call in {
            "submit_gradient_sync": lambda: client.submit_gradient_sync(0, gradient(0)),
            "submit_sync_collective": lambda: client.submit_sync_collective(0),
            "client.plan": lambda: client.plan,
        }.items():
            error = error_of(call)
            assert type(error) is NotRegisteredError
            assert error.function == function


@pytest.mark.parametrize("num_closers", [1, 8])
def test_closers_all_return_and_pending_tickets_say_what_was_pending(num_closers: int) -> None:
    before = set(threading.enumerate())
    client = make_client()
    [thread] = set(threading.enumerate()) - before
    tickets = [finish(client, device, device) for device in (0, 2)]
    assert in_threads(*[client.close] * num_closers) == [None] * num_closers
    assert not thread.is_alive()
    client.close()
    names = list(map(str, devices_of(client)))
    for device, ticket in zip((0, 2), tickets, strict=True):
        error = error_of(ticket.wait)
        assert type(error) is ClosedError
        assert error.pending == (
            f"the sync of {names[device]}",
            f"{names[1]}, {names[3]} have not synced, nor handed over the gradients of ['b'], ['w']",
        )


def test_closing_again_from_new_threads_is_fine() -> None:
    """A new thread may be given the ident of the loop's, which has ended."""
    client = make_client()
    pending = finish(client, 0, 0)
    client.close()
    for _ in range(20):
        assert in_threads(client.close) == [None]
        assert type(in_threads(pending.wait)[0]) is ClosedError


def test_tickets_answered_before_close_keep_their_answer() -> None:
    client = make_client()
    tickets = run_step(client)
    done = client.defer(lambda: 5)
    client.close()
    for ticket in tickets:
        check_equal(ticket.wait(), gradient(1.5))
    assert done.wait() == 5


def test_close_runs_callbacks_whose_arrays_become_ready() -> None:
    seen: list[float] = []
    client = make_client()
    client.defer(lambda x: seen.append(float(x)), heavy(4.0))
    client.defer(lambda: seen.append(5.0))
    client.close(timeout=30)
    assert seen == [4.0, 5.0]


def test_close_is_bounded_when_a_callback_does_not_end() -> None:
    gate, entered = threading.Event(), threading.Event()
    client = make_client()
    running = client.defer(lambda: (entered.set(), gate.wait(20), 7)[-1])
    after = client.defer(lambda: None)
    entered.wait(20)
    with pytest.raises(TimeoutError, match=r"the loop did not end within 0.1 s: a callback still runs"):
        client.close(timeout=0.1)
    assert client.is_closed
    gate.set()
    client.close()
    assert running.wait() == 7
    error = error_of(after.wait)
    assert type(error) is ClosedError
    assert error.pending[0].startswith("the callback test_close_is_bounded")


def test_a_client_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    client = make_client()
    run_step(client)
    [thread] = set(threading.enumerate()) - before
    del client
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# start.


def test_start_returns_the_open_client_for_the_same_settings() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    with jaxsync.start(mesh) as client:
        assert jaxsync.start(jaxsync.make_mesh({"data": 4}), jaxsync.SyncConfig()) is client
        for other, config, difference in (
            (jaxsync.make_mesh({"data": 8}), None, "mesh: open with (data=4), asked for (data=8)"),
            (mesh, jaxsync.SyncConfig(reduce="sum"), "config: open with SyncConfig"),
        ):
            error = error_of(lambda other=other, config=config: jaxsync.start(other, config))
            assert type(error) is StartConflictError
            assert error.differences[0].startswith(difference)
    with jaxsync.start(mesh, jaxsync.SyncConfig(reduce="sum")) as other:
        assert other is not client


def test_start_makes_a_new_client_when_the_old_one_was_dropped() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    dropped = weakref.ref(jaxsync.start(mesh))
    gc.collect()
    assert dropped() is None
    with jaxsync.start(mesh, jaxsync.SyncConfig(reduce="sum")) as client:
        client.register_sync_parameters(PARAMS)


def test_concurrent_starts_give_one_client() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    barrier = threading.Barrier(4)
    found: list[list[Any]] = [[], [], [], []]

    def begin(index: int) -> None:
        for _ in range(200):
            barrier.wait()
            found[index].append(jaxsync.start(mesh))
            if barrier.wait() == 0:
                found[index][-1].close()
            barrier.wait()

    assert in_threads(*[functools.partial(begin, index) for index in range(4)]) == [None] * 4
    for clients in zip(*found, strict=True):
        assert len(set(map(id, clients))) == 1
    assert len({id(client) for client in found[0]}) == 200


# Documents.


def test_every_test_that_the_guarantees_name_exists() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    for path, name in named:
        assert (root / path).exists(), path
        pattern = rf"^(def {name}\(|{name} = )"
        assert not name or re.search(pattern, (root / path).read_text(), re.MULTILINE), f"{path}::{name}"
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 26))
    assert list(itertools.filterfalse(lambda row: "`" in row, rows)) == []
