"""What a call of a `TrainStep` costs on the client's side, beyond calling the compiled program itself.

    python benchmarks/dispatch.py [--leaves 10 100 1000] [--devices 1] [--repeats 1000] [--json]

Interleaved, with the batch placed already and a program that does next to nothing, so that Python is what
is measured. The program is called in four ways: compiled ahead of time, through `jax.jit`, as the
`TrainStep`, and through `guard_dispatch`. Each call is awaited before the next one; a figure is the time
until the call returns, and beside it the time until its results are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import NamedSharding
from measure import Spread, Verdict

import jaxsync

COMPILED, JITTED, STEP, GUARDED = "compiled program", "jax.jit", "TrainStep", "guard_dispatch(jax.jit)"
DIRECT = (COMPILED, JITTED)
P6_LIMIT_US = 60.0
WARM_UP = 20


def measure_leaves(num_leaves: int, devices: int, repeats: int) -> dict[str, Any]:
    """Microseconds of each way to call one program of `num_leaves` parameters."""
    jaxsync.simulate_devices(devices)
    forms = _make_forms(num_leaves, devices)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    runs = {name: _recorder(run, samples[name]) for name, run in forms.items()}
    measure.interleave(runs, repeats + WARM_UP)
    figures = {name: _figures(times[WARM_UP:]) for name, times in samples.items()}
    fastest = min(DIRECT, key=lambda name: figures[name]["call_us"])
    for name in (STEP, GUARDED):
        base = JITTED if name == GUARDED else fastest
        for key in ("call_us", "done_us"):
            figures[name][f"over_{key}"] = figures[name][key] - figures[base][key]
    row = {"leaves": num_leaves, "devices": devices, "repeats": repeats, "fastest_direct": fastest}
    return row | {"forms": figures}


def _make_forms(num_leaves: int, devices: int) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Form -> one call of it, on a state of its own."""
    mesh = jaxsync.make_mesh({"data": devices})
    params = {f"w{index:04d}": np.ones(1, np.float32) for index in range(num_leaves)}
    plan = jaxsync.make_plan(params, mesh)
    step = jaxsync.make_train_step(_loss, optax.sgd(0.01), plan)
    batch = jax.device_put(np.ones(devices, np.float32), NamedSharding(mesh, plan.batch_spec))
    compiled = step.lower(step.init(params), batch).compile()
    # Inside another trace a TrainStep is a part of that program: this is the program without the client.
    jitted = jax.jit(lambda state, batch: step(state, batch), donate_argnums=0)
    ways = {COMPILED: compiled, JITTED: jitted, STEP: step, GUARDED: jaxsync.guard_dispatch(jitted)}

    def make(way: Any) -> Callable[[], tuple[Any, Any]]:
        states = [step.init(params)]

        def run() -> tuple[Any, Any]:
            states[0], metrics = way(states[0], batch)
            return states[0], metrics

        return run

    return {name: make(way) for name, way in ways.items()}


def _loss(params: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(batch) * sum(jnp.sum(x) for x in params.values())


def _recorder(run: Callable[[], Any], samples: list[tuple[float, float]]) -> Callable[[], float]:
    """Notes when a call returned and when its results were there, in microseconds."""

    def record() -> float:
        start_s = time.perf_counter()
        outputs = run()
        called_s = time.perf_counter()
        jax.block_until_ready(outputs)
        done_s = time.perf_counter()
        samples.append(((called_s - start_s) * 1e6, (done_s - start_s) * 1e6))
        return called_s - start_s

    return record


def _figures(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    call, done = (Spread.of(column) for column in zip(*times, strict=True))
    return {
        "call_us": call.median,
        "call_quartiles_us": [call.lower, call.upper],
        "done_us": done.median,
        "done_quartiles_us": [done.lower, done.upper],
    }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """P6 at each row: over the faster of the two direct ways."""
    return [
        Verdict(
            target="P6 microseconds a TrainStep call over the compiled program",
            row=f"{row['leaves']} leaves, {row['devices']} device{'s' * (row['devices'] != 1)}",
            value=row["forms"][STEP]["over_call_us"],
            limit=P6_LIMIT_US,
        )
        for row in rows
    ]


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    header = [
        "leaves",
        "devices",
        "form",
        "us until it returns (quartiles)",
        "us until done",
        "over the program",
    ]
    measure.print_table(header, [cells for row in rows for cells in _cells(row)])


def _cells(row: Mapping[str, Any]) -> list[list[str]]:
    table = []
    for name, figures in row["forms"].items():
        lower, upper = figures["call_quartiles_us"]
        spread = Spread(lower=lower, median=figures["call_us"], upper=upper)
        over = f"{figures['over_call_us']:.0f}" if "over_call_us" in figures else "-"
        done = f"{figures['done_us']:.0f}"
        table.append([str(row["leaves"]), str(row["devices"]), name, str(spread), done, over])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--leaves", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--devices", nargs="+", type=int, default=[1])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        [leaves], [devices] = arguments.leaves, arguments.devices
        print(json.dumps(measure_leaves(leaves, devices, arguments.repeats)))
        return 0
    rows = []
    names = [(leaves, devices) for leaves in arguments.leaves for devices in arguments.devices]
    with measure.progress("dispatch", len(names)) as advance:
        for leaves, devices in names:
            options = [
                "--leaves",
                str(leaves),
                "--devices",
                str(devices),
                "--repeats",
                str(arguments.repeats),
            ]
            rows.append(measure.run_worker(__file__, options))
            advance(f"{leaves} leaves, {devices} devices")
    judged = verdicts(rows)
    settings = {"repeats": arguments.repeats}
    measure.publish(
        "dispatch", settings, {"rows": rows}, judged, lambda: print_rows(rows), as_json=arguments.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
