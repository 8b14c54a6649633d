"""How planning and tracing grow with the number of leaves and of devices.

    python benchmarks/scale.py [--leaves 10 100 1000 10000] [--devices 8 32 128 512] [--repeats 5] [--json]

- the time of `make_plan`, and of tracing and lowering `sync_gradients` under `shard_map`, beside `pmean` of
  the tree, interleaved; on an abstract mesh, so that no devices have to be there, and without compiling;
- the exponent of each: 1 is linear in the leaves, 0 does not depend on the devices;
- what JAX traces and compiles when an equal tree is registered again.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import measure
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from measure import Spread, Verdict

import jaxsync

AXIS = "data"
LEAF_SIZE = 16
LEAVES_DEVICES = 8  # devices while leaves vary
DEVICES_LEAVES = 100  # leaves while devices vary
PLAN, SYNC, TREE = "make_plan", "lower sync_gradients", "lower pmean(tree)"
P7_LEAVES, P7_LIMIT_S = 10_000, 0.5
COUNTED = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/backend_compile_duration": "compiles",
}


def measure_point(num_leaves: int, devices: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of planning and lowering for one tree on one mesh."""
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    grads = {f"w{index:05d}": jax.ShapeDtypeStruct((LEAF_SIZE,), "float32") for index in range(num_leaves)}
    plan = jaxsync.make_plan(grads, mesh)
    forms = {
        PLAN: lambda: _timed(lambda: jaxsync.make_plan(grads, mesh)),
        SYNC: lambda: _timed(lambda: _lower(lambda g: jaxsync.sync_gradients(g, plan), mesh, grads)),
        TREE: lambda: _timed(lambda: _lower(lambda g: lax.pmean(g, AXIS), mesh, grads)),
    }
    samples = measure.interleave(forms, repeats)
    spreads = {name: Spread.of(times) for name, times in samples.items()}
    figures = {n: {"ms": s.median, "quartiles_ms": [s.lower, s.upper]} for n, s in spreads.items()}
    return {"leaves": num_leaves, "devices": devices, "repeats": repeats, "forms": figures}


def _timed(run: Callable[[], Any]) -> float:
    jax.clear_caches()
    gc.collect()
    return measure.timed(run)


def _lower(sync: Callable[[Any], Any], mesh: AbstractMesh, grads: Any) -> Any:
    """The program that syncs gradients which each device has its own of."""
    body = jax.shard_map(sync, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(body).trace(grads).lower(lowering_platforms=("cpu",))


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of a least-squares line through the logarithms.

    >>> round(exponent([10, 100, 1000], [3.0, 30.0, 300.0]), 6)
    1.0
    """
    slope, _ = np.polyfit(np.log(sizes), np.log(times), 1)
    return float(slope)


def exponents(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Form -> exponent over `key`; empty where there is but one point."""
    sizes = [point[key] for point in points]
    if len(set(sizes)) < 2:
        return {}
    names = list(points[0]["forms"])
    return {name: exponent(sizes, [point["forms"][name]["ms"] for point in points]) for name in names}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often JAX traces and compiles meanwhile."""
    counts = dict.fromkeys(COUNTED.values(), 0)

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in COUNTED:
            counts[COUNTED[event]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


def register_again(num_leaves: int) -> dict[str, dict[str, int]]:
    """What is traced and compiled the first time and the second, with an equal tree each time."""
    mesh = jaxsync.make_mesh({AXIS: len(jax.devices())})

    def tree() -> dict[str, np.ndarray[Any, Any]]:
        return {f"w{index:05d}": np.ones(LEAF_SIZE, np.float32) for index in range(num_leaves)}

    local = {device: jax.device_put(tree(), device) for device in mesh.devices.flat}

    def through_client() -> None:
        client.register_sync_parameters(tree())
        for device, grads in local.items():
            client.submit_gradient_sync(device, grads)
        tickets = [client.submit_sync_collective(device) for device in local]
        jax.block_until_ready([ticket.wait() for ticket in tickets])

    def in_graph() -> None:
        jax.block_until_ready(synced(tree(), jaxsync.make_plan(tree(), mesh)))

    def sync(grads: Any, plan: jaxsync.SyncPlan) -> Any:
        body: Callable[[Any], Any] = jax.shard_map(
            lambda g: jaxsync.sync_gradients(g, plan), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        return body(grads)

    synced = jax.jit(sync, static_argnums=1)
    with jaxsync.SyncClient(mesh) as client:
        runs = {"SyncClient": through_client, "plan as a static argument of jit": in_graph}
        return {f"{name}, {when}": _count(run) for name, run in runs.items() for when in ("first", "again")}


def _count(run: Callable[[], None]) -> dict[str, int]:
    with counted() as counts:
        run()
    return counts


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """P7, where it was measured."""
    found = [
        Verdict(
            target="P7 seconds to plan",
            row=f"{point['leaves']} leaves",
            value=point["forms"][PLAN]["ms"] / 1e3,
            limit=P7_LIMIT_S,
        )
        for point in result["by_leaves"]
        if point["leaves"] == P7_LEAVES
    ]
    for name, counts in result["registered"].items():
        if name.endswith("again"):
            again = float(sum(counts.values()))
            found.append(
                Verdict(target="P7 traces and compiles for an equal tree", row=name, value=again, limit=0)
            )
    return found


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    by_leaves, by_devices = [], []
    with measure.progress("scale", len(arguments.leaves) + len(arguments.devices)) as advance:
        for leaves in arguments.leaves:
            by_leaves.append(measure_point(leaves, LEAVES_DEVICES, arguments.repeats))
            advance(f"{leaves} leaves")
        for devices in arguments.devices:
            by_devices.append(measure_point(DEVICES_LEAVES, devices, arguments.repeats))
            advance(f"{devices} devices")
    return {
        "by_leaves": by_leaves,
        "by_devices": by_devices,
        "exponents": {
            "leaves": exponents(by_leaves, "leaves"),
            "devices": exponents(by_devices, "devices"),
        },
        "registered": register_again(DEVICES_LEAVES),
    }


def print_tables(result: Mapping[str, Any]) -> None:
    for key in ("leaves", "devices"):
        header = ["leaves", "devices", *(f"{name}, ms" for name in (PLAN, SYNC, TREE))]
        rows = []
        for point in result[f"by_{key}"]:
            times = [measure.three_digits(point["forms"][name]["ms"]) for name in (PLAN, SYNC, TREE)]
            rows.append([str(point["leaves"]), str(point["devices"]), *times])
        measure.print_table(header, rows)
        for name, value in result["exponents"][key].items():
            print(f"{name}: grows as {key}^{value:.2f}")
        print()
    rows = [[n, str(c["traces"]), str(c["compiles"])] for n, c in result["registered"].items()]
    measure.print_table(["registered", "traces", "compiles"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--leaves", nargs="+", type=int, default=[10, 100, 1000, 10_000])
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    jaxsync.simulate_devices(LEAVES_DEVICES)
    result = measure_all(arguments)
    judged = verdicts(result)
    settings = {"repeats": arguments.repeats}
    measure.publish("scale", settings, result, judged, lambda: print_tables(result), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
