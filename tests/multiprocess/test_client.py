"""SyncClient over a mesh that several processes share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxsync

pytestmark = pytest.mark.timeout(120)

# Also run here, for the numbers of one process.
JOB = """
import random
import jax, jax.numpy as jnp, numpy as np, jaxsync

SHAPES = {"w": (3, 2), "b": (2,), "big": (30_000,)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

def gradient(step, place):
    rng = np.random.default_rng([step, place])
    return {name: rng.normal(size=value.shape).astype(np.float32) for name, value in PARAMS.items()}

def sync_steps(client, places, shuffle, steps=range(4)):
    # Devices and leaves in any order; steps in order.
    for step in steps:
        pieces = [(place, name) for place in places for name in PARAMS]
        shuffle(pieces)
        for place, name in pieces:
            device = client.mesh.devices.flat[place]
            value = jax.device_put(gradient(step, place)[name], device)
            client.submit_gradient_sync(place, f"['{name}']", value)
        tickets = [client.submit_sync_collective(client.mesh.devices.flat[place]) for place in places]
        yield [jax.device_get(ticket.wait()) for ticket in tickets]

def digest(synced):
    return {k: [float(np.sum(x, dtype=np.float64)), float(x.flat[0])] for k, x in synced.items()}
"""


def test_gradients_of_all_processes_are_summed_whatever_their_order(run_job: Callable[..., Any]) -> None:
    """Then parts of the tree, and at last a set that the others do not announce: refused on all."""
    namespace: dict[str, Any] = {}
    exec(JOB, namespace)
    with jaxsync.SyncClient(jaxsync.make_mesh({"data": 4})) as client:
        client.register_sync_parameters(namespace["PARAMS"])
        wanted = [
            namespace["digest"](synced[0])
            for synced in namespace["sync_steps"](client, range(4), lambda pieces: None)
        ]
    code = """
    import json
    jaxsync.simulate_devices(2)
    jaxsync.initialize(collective_timeout_s=5)
    mesh = jaxsync.make_mesh({"data": 4})
    mine = [place for place, device in enumerate(mesh.devices.flat) if device.process_index == ME]
    client = jaxsync.start(mesh)
    mixed = {name: value + ME for name, value in PARAMS.items()}
    placed = client.register_sync_parameters(mixed)
    print(json.dumps({"placed": float(placed["w"].addressable_data(1).max())}))
    found = []
    for synced in sync_steps(client, mine, random.Random(ME).shuffle):
        assert all(np.array_equal(synced[0][name], synced[1][name]) for name in PARAMS)
        found.append(digest(synced[0]))
    print(json.dumps({"found": found}))

    def sync_part(names):
        part = {name: PARAMS[name] for name in names}
        for place in mine:
            client.register_sync_parameters(part, device=place)
            for k, x in part.items():
                grad = jax.device_put(x + place, mesh.devices.flat[place])
                client.submit_gradient_sync(place, {k: grad})
        tickets = [client.submit_sync_collective(place) for place in mine]
        return [ticket.wait(30) for ticket in tickets][0]

    part = sync_part(["b"])
    print(json.dumps({"part": [np.asarray(part["b"]).tolist(), part["w"] is None]}))
    foreign = []
    for device in (3 - mine[0], mesh.devices.flat[3 - mine[0]]):
        for call in (
            lambda: client.register_sync_parameters(PARAMS, device=device),
            lambda: client.submit_gradient_sync(device, PARAMS),
            lambda: client.submit_sync_collective(device),
        ):
            try:
                call()
            except ForeignDeviceError as error:
                foreign.append([error.function, error.owner, error.process])
    print(json.dumps({"foreign": foreign}))
    total = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))(placed["w"])
    rows = jax.NamedSharding(mesh, jax.P("data"))
    sharded = jax.make_array_from_callback((4,), rows, lambda index: np.zeros(1))
    try:
        client.defer(print, total, sharded)
    except ArgumentError as error:
        print(json.dumps({"defer": str(error).splitlines()[0]}))
    seen = [client.defer(lambda x: float(x.sum()), total).wait(10)]
    seen.append(client.defer(lambda x: "here", total, on="first").wait(10))
    print(json.dumps({"seen": seen}))
    empty = sync_part([])
    print(json.dumps({"empty": [x is None for x in empty.values()]}))
    again = sync_steps(client, mine, random.Random(ME).shuffle, range(4, 5))
    print(json.dumps({"again": [digest(synced[0]) for synced in again]}))
    sys.stdout.flush()
    try:
        sync_part(["w"] if ME else ["b"])
    except DisagreementError as error:
        print(json.dumps({"refused": [str(line) for line in str(error).splitlines()[:3]]}))
    try:
        client.submit_sync_collective(mine[0])
    except DisagreementError as error:
        print(json.dumps({"later": str(error).splitlines()[0]}))
    """
    ended = run_job(code, 2, before=JOB, limit_s=80)
    assert [process.code for process in ended] == [0, 0], ended
    for me, process in enumerate(ended):
        found: dict[str, Any] = {}
        for line in process.out.splitlines():
            found |= json.loads(line)
        assert found["placed"] == 0.0  # of the first process
        for have, want in zip(found["found"], wanted, strict=True):
            assert have.keys() == want.keys()
            for name in want:
                np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6)
        assert found["part"] == [[1.5, 1.5], True]
        functions = ("register_sync_parameters", "submit_gradient_sync", "submit_sync_collective")
        assert found["foreign"] == [[function, 1 - me, me] for function in functions] * 2
        assert "got arrays = arrays[1]; wanted arrays of this process" in found["defer"]
        assert found["seen"] == [0.0, "here" if me == 0 else None]
        assert found["empty"] == [True] * 3
        assert len(found["again"]) == 1
        step = 6  # four whole ones, one of a part, one of nothing, one more whole
        assert found["refused"] == [
            f"The processes do not agree on the leaves of step {step + 1}, so nothing was launched.",
            "  - leaf ['b']: announced in process 0; none in process 1",
            "  - leaf ['w']: none in process 0; announced in process 1",
        ]
        assert found["later"] == found["refused"][0]
