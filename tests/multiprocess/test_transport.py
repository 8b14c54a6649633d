"""How sums travel between processes: over gloo no reduce-scatter, and the numbers of NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

JOB = """
import json
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxsync.testing import assert_replicas_equal

SHAPES = {"w": (7, 3), "b": (5,), "scalar": (), "large": (150, 200)}
rng = np.random.default_rng(0)
GRADS = {key: rng.normal(size=(4, *shape)).astype(np.float32) for key, shape in SHAPES.items()}
jaxsync.simulate_devices(2)
jaxsync.initialize()

def sync(mesh, specs=P(), **config):
    shapes = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in SHAPES.items()}
    plan = jaxsync.make_plan(
        shapes, mesh, specs, jaxsync.SyncConfig(axis=("host", "device"), **config)
    )
    rows = NamedSharding(mesh, P(("host", "device")))
    grads = {
        key: jax.make_array_from_callback(x.shape, rows, lambda index, x=x: x[index])
        for key, x in GRADS.items()
    }
    run = jax.jit(jax.shard_map(
        lambda g: jaxsync.sync_gradients(jax.tree.map(lambda x: x[0], g), plan),
        mesh=mesh, in_specs=rows.spec, out_specs=plan.specs,
    ))
    return run(grads), jaxsync.audit(run, grads)

def errors(mesh, **options):
    synced, audit = sync(mesh, **options)
    assert_replicas_equal(synced)
    worst = 0.0
    for key, x in synced.items():
        want = GRADS[key].astype(np.float64).mean(axis=0)
        for shard in x.addressable_shards:
            worst = max(worst, float(np.abs(np.asarray(shard.data) - want[shard.index]).max()))
    return {"worst": worst, "kinds": sorted({f"{c.kind} over {'+'.join(c.axes)}" for c in audit.collectives})}

inside = Mesh(np.array(jax.devices()).reshape(2, 2), ("host", "device"))
across = Mesh(np.array(jax.devices()).reshape(2, 2).T, ("host", "device"))
"""


def test_no_sum_between_processes_is_a_reduce_scatter(run_job: Callable[..., Any]) -> None:
    """Not inside a process either, where XLA takes gloo too: it would give up when a device is 30 s late."""
    code = """
    for name, mesh in (("inside", inside), ("across", across)):
        assert {d.process_index for d in mesh.devices[0]} == ({0} if name == "inside" else {0, 1})
        print(json.dumps([
            errors(mesh, inner_axis="device"),
            errors(mesh, inner_axis="device", wire_dtype="bfloat16"),
            errors(mesh, specs={"w": P(), "b": P(), "scalar": P(), "large": P("host", "device")}),
        ]))
    """
    ended = run_job(code, 2, before=JOB)
    assert [process.code for process in ended] == [0, 0], ended
    for process in ended:
        for line in process.out.splitlines():
            levels, narrowed, sharded = json.loads(line)
            assert levels["worst"] <= 1e-6
            assert levels["kinds"] == [
                "all-gather over device",
                "all-reduce over host",
                "all-to-all over device",
            ]
            assert 0 < narrowed["worst"] <= 2**-7 * 10
            assert narrowed["kinds"] == [
                f"{kind} over {axis}" for kind in ("all-gather", "all-to-all") for axis in ("device", "host")
            ]
            assert sharded["worst"] <= 1e-6
            assert not any("reduce-scatter" in kind for kind in sharded["kinds"])
