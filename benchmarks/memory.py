"""What state that is sharded saves: the bytes of a step on each device, and what it communicates for that.

    python benchmarks/memory.py [--models NAME ...] [--devices 2 8] [--quick] [--json]

For each model and number of simulated devices, in a process of its own, a step with Adam in float32 is
compiled with its state replicated, with `shard_optimizer` (ZeRO-1), and with parameters sharded over the data
axis as well (FSDP), gathered once a step or again for the backward pass. No array is made, so a model may be
larger than this machine. Reported are

- the bytes of arguments, temporaries and all together, as `memory_analysis` of the compiled step tells them;
- those of parameters and optimizer state; with the batch they have to come to the bytes of the arguments;
- the collectives of the compiled step, as `jaxsync.audit` reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import forms
import jax
import measure
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from measure import Verdict
from models import Model, all_models

import jaxsync
from jaxsync.audit import parse_hlo
from jaxsync.report import format_bytes

DTYPE = "float32"
REPLICATED, ZERO, FSDP, RESHARDED = "replicated", "ZeRO-1", "FSDP", "FSDP, reshard_after_forward"
NAMES = (REPLICATED, ZERO, FSDP, RESHARDED)
FULL = {"models": ["BERT-base"], "devices": [2, 8]}
QUICK = {"models": ["10 x 1M"], "devices": [2]}
P8_LIMIT = 1.01  # of what each of N devices would have if the replicated bytes were divided by N
TABLE_BYTES = ("optimizer_bytes", "parameter_bytes", "temporary_bytes", "peak_bytes")


class AccountingError(Exception):
    """What the compiled program takes for arguments is not the state and the batch."""


def measure_row(model: Model, devices: int) -> dict[str, Any]:
    """Everything about one model on so many devices, as JSON has it."""
    jaxsync.simulate_devices(devices)
    mesh = jaxsync.make_mesh({forms.AXIS: devices})
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        found[name] = measure_form(name, model, mesh)
        jax.clear_caches()
    for figures in found.values():
        figures["optimizer_share"] = figures["optimizer_bytes"] / found[REPLICATED]["optimizer_bytes"]
    return {
        "model": model.name,
        "devices": devices,
        "leaves": len(model.shapes),
        "parameters": model.num_parameters,
        "forms": found,
    }


def measure_form(name: str, model: Model, mesh: Mesh) -> dict[str, Any]:
    """The bytes of a device and the collectives of one step."""
    step = make_step(name, model, mesh)
    state = step.abstract_state()
    shape = model.batch(DTYPE, mesh.size).shape
    batch = jax.ShapeDtypeStruct(shape, DTYPE, sharding=NamedSharding(mesh, step.plan.batch_spec))
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    own = {part: device_bytes(getattr(state, f"packed_{part}")) for part in ("params", "opt_state")}
    arguments = memory.argument_size_in_bytes
    if arguments != device_bytes((state, batch)):
        raise AccountingError(f"{name}: {arguments} bytes, not {device_bytes((state, batch))}")
    kept = arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "optimizer_bytes": own["opt_state"],
        "parameter_bytes": own["params"],
        "argument_bytes": arguments,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": kept + memory.temp_size_in_bytes,
        "collectives": count_collectives(parse_hlo(compiled.as_text(), mesh)),
    }


def make_step(name: str, model: Model, mesh: Mesh) -> jaxsync.TrainStep:
    """The step in one of the forms of `NAMES`."""
    specs = forms.data_specs(model.shapes, mesh.size) if name in (FSDP, RESHARDED) else None
    config = jaxsync.SyncConfig(reshard_after_forward=name == RESHARDED)
    plan = jaxsync.make_plan(forms.abstract_params(model, DTYPE), mesh, specs, config)
    tx = optax.adam(1e-3)
    return jaxsync.make_train_step(
        model.loss, jaxsync.shard_optimizer(tx, plan) if name == ZERO else tx, plan
    )


def device_bytes(tree: Any) -> int:
    """Bytes of a device's parts of arrays that need not be there."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def count_collectives(audit: jaxsync.Audit) -> dict[str, dict[str, int]]:
    """Kind -> how many, and the bytes of their results on a device."""
    found: dict[str, dict[str, int]] = {}
    for collective in audit.collectives:
        counts = found.setdefault(collective.kind, {"count": 0, "bytes": 0})
        counts["count"] += 1
        counts["bytes"] += collective.num_bytes
    return found


def format_collectives(collectives: Mapping[str, Mapping[str, int]]) -> str:
    """
    >>> format_collectives({"all-gather": {"count": 2, "bytes": 2048}})
    '2 all-gather (2.0 KiB)'
    """
    return ", ".join(
        f"{counts['count']} {kind} ({format_bytes(counts['bytes'])})" for kind, counts in collectives.items()
    )


def verdicts(rows: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """P8 at each row."""
    for row in rows:
        yield Verdict(
            target="P8 optimizer state a device with shard_optimizer x devices / replicated",
            row=f"{row['model']}, {row['devices']} devices",
            value=row["forms"][ZERO]["optimizer_share"] * row["devices"],
            limit=P8_LIMIT,
        )


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['model']}: {row['leaves']} leaves, {row['parameters']:,} parameters; "
            f"{row['devices']} devices, Adam, {DTYPE}; bytes on each device"
        )
        header = ["state", "optimizer", "parameters", "temporary", "peak", "collectives"]
        measure.print_table(header, [_cells(name, figures) for name, figures in row["forms"].items()])


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    sizes = [format_bytes(figures[key]) for key in TABLE_BYTES]
    return [name, *sizes, format_collectives(figures["collectives"])]


def measure_rows(models: Sequence[str], devices: Sequence[int]) -> list[Any]:
    names = [(model, number) for model in models for number in devices]
    rows = []
    with measure.progress("memory", len(names)) as advance:
        for model, number in names:
            rows.append(measure.run_worker(__file__, ["--models", model, "--devices", str(number)]))
            advance(f"{model}, {number} devices")
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(all_models()), metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--quick", action="store_true", help="a model of few leaves, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    measure.fill_in(arguments, QUICK if arguments.quick else FULL)
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.worker:
        [model], [devices] = arguments.models, arguments.devices
        print(json.dumps(measure_row(all_models()[model], devices)))
        return 0
    rows = measure_rows(arguments.models, arguments.devices)
    judged = list(verdicts(rows))
    settings = {"quick": arguments.quick}
    measure.publish(
        "memory", settings, {"rows": rows}, judged, lambda: print_rows(rows), as_json=arguments.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
