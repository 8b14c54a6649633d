"""One training step: jaxsync beside no sync at all and beside the usual ways to write it in JAX.

    python benchmarks/step.py [--models NAME ...] [--devices 2 4 8] [--dtypes f32 bf16] [--repeats 21]
        [--compiles 3] [--budget-s 60] [--quick] [--json]

For each model, number of simulated devices and dtype, in a process of its own, and interleaved in it:

- the time of a call, awaited: forward, backward, sync and a donated SGD update;
- the time to trace and to compile, with JAX's caches cleared before each;
- the memory that the compiled program takes on a device, as `memory_analysis` tells it.

Forms with sharded state are also set against the same step with replicated state; no target is about them.

Before anything is timed, each form's new parameters are compared with those of a single device.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import forms
import jax
import measure
from forms import FLOOR, NAMES, OURS, PEERS, SHARDED, TREE, Form
from measure import Spread, Verdict
from models import Model, Values, all_models

import jaxsync
from jaxsync.report import format_bytes

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
QUICK = {
    "models": ["L=50 D=32 B=64", "10 x 1M"],
    "devices": [2],
    "dtypes": ["f32"],
    "repeats": 3,
    "compiles": 1,
}

# All forms hold their state at once if that and one step's gradients stay below this; else each form's state
# is made anew for each sample. BERT-base on 8 devices is 3.3 GiB a state, of which 16 GiB hold few.
RESIDENT_BYTES = 10 << 30
LEAST_ROUNDS = 5  # also when the time is spent: fewer have no quartiles

P1_LIMITS = {"L=50 D=32 B=64": 1.15, "L=150 D=16 B=64": 1.5}
P1_DEVICES = 8
P2_FASTER, P2_NEVER_SLOWER, P3_LIMIT = 4.0, 1.03, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one worker measures."""

    model: Model
    devices: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        """Of one form's parameters, on all devices."""
        return self.model.num_parameters * jax.numpy.dtype(DTYPES[self.dtype]).itemsize * self.devices

    @property
    def is_resident(self) -> bool:
        return self.state_bytes * (len(NAMES) + 3) <= RESIDENT_BYTES

    def __str__(self) -> str:
        return f"{self.model.name}, {self.devices} devices, {self.dtype}"


def measure_row(row: Row, repeats: int, compiles: int, budget_s: float) -> dict[str, Any]:
    """Everything about one row, as JSON has it."""
    jaxsync.simulate_devices(row.devices)
    jax.config.update("jax_enable_compilation_cache", False)  # one on disk would make a compile free
    mesh = jaxsync.make_mesh({forms.AXIS: row.devices})
    dtype = DTYPES[row.dtype]
    params = row.model.params(dtype)

    def make(name: str) -> Form:
        return forms.make_form(name, row.model, mesh, dtype)

    compiled = _compile_times(make, params, compiles)
    made = {name: make(name) for name in NAMES}
    errors = _check_agreement(row, made, params)
    time_form = _Resident if row.is_resident else _in_blocks
    steps = {name: time_form(form, params) for name, form in made.items()}
    samples = measure.interleave(steps, repeats, budget_s=budget_s, least=min(LEAST_ROUNDS, repeats))
    return {
        "model": row.model.name,
        "group": row.model.group,
        "devices": row.devices,
        "dtype": row.dtype,
        "leaves": len(row.model.shapes),
        "parameters": row.model.num_parameters,
        "rounds": len(samples[FLOOR]),
        "interleaved": "call by call" if row.is_resident else "by blocks of one call, state made anew",
        "forms": _figures(samples, compiled, errors),
    }


def _compile_times(
    make: Callable[[str], Form], params: Values, compiles: int
) -> dict[str, tuple[float, float, Any]]:
    """Form -> milliseconds to trace, milliseconds to compile (medians), and what the program needs."""
    states = {name: _abstract_state(make(name), params) for name in NAMES}
    memory: dict[str, Any] = {}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for _ in range(compiles):
        for name in NAMES:
            form = make(name)
            jax.clear_caches()
            gc.collect()
            found: list[Any] = []
            trace_ms = measure.timed(lambda: found.append(form.step.lower(states[name], form.batch)))  # noqa: B023
            compile_ms = measure.timed(lambda: found.append(found[0].compile()))  # noqa: B023
            samples[name].append((trace_ms, compile_ms))
            memory[name] = found[1].memory_analysis()
    return {
        name: (
            Spread.of([trace for trace, _ in times]).median,
            Spread.of([compile_ for _, compile_ in times]).median,
            memory[name],
        )
        for name, times in samples.items()
    }


def _abstract_state(form: Form, params: Values) -> Any:
    measure.give_back_memory()
    state = form.start(params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _check_agreement(row: Row, made: Mapping[str, Form], params: Values) -> dict[str, float]:
    """Form -> its largest error in units of what is allowed. The first calls also compile.

    Raises:
        AssertionError: A form computes something else, or does not donate.
    """
    batch = row.model.batch(DTYPES[row.dtype], row.devices)
    alone = forms.make_reference(params, batch[: len(batch) // row.devices], row.model)
    errors = {FLOOR: _check_form(made[FLOOR], params, alone, is_synced=False)}
    del alone
    whole = forms.make_reference(params, batch, row.model)
    return errors | {name: _check_form(made[name], params, whole, is_synced=True) for name in NAMES[1:]}


def _check_form(form: Form, params: Values, reference: forms.Reference, *, is_synced: bool) -> float:
    """The error of one step. In a function of its own, so that its arrays are gone before the next form's."""
    measure.give_back_memory()
    reference.check_sensitive()
    old = form.start(params)
    new, _ = jax.block_until_ready(form.step(old, form.batch))
    error = forms.largest_error(form, new, reference, is_synced=is_synced)
    if error > 1:
        raise AssertionError(f"{form.name} is off by {error:.1f} times what rounding allows")
    if not forms.is_donated(old):
        raise AssertionError(f"{form.name} does not donate its parameters")
    return error


class _Resident:
    """Milliseconds of the next call of a form that keeps its state."""

    def __init__(self, form: Form, params: Values) -> None:
        self._form, self._state = form, form.start(params)
        self()  # the state that a step returns may be laid out in another way than the first

    def __call__(self) -> float:
        return measure.timed(self._step)

    def _step(self) -> None:
        self._state, _ = jax.block_until_ready(self._form.step(self._state, self._form.batch))


def _in_blocks(form: Form, params: Values) -> Callable[[], float]:
    """Milliseconds of the second call of a form whose state is made and dropped around it."""

    def sample() -> float:
        measure.give_back_memory()
        return _Resident(form, params)()

    return sample


def _figures(
    samples: Mapping[str, Sequence[float]],
    compiled: Mapping[str, tuple[float, float, Any]],
    errors: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    spreads = {name: Spread.of(times) for name, times in samples.items()}
    best_ms = min(spreads[name].median for name in PEERS)
    tree_ms = sum(compiled[TREE][:2])
    figures = {}
    for name, spread in spreads.items():
        trace_ms, compile_ms, memory = compiled[name]
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        figures[name] = {
            "ms": spread.median,
            "quartiles_ms": [spread.lower, spread.upper],
            "to_floor": spread.median / spreads[FLOOR].median,
            "to_best_peer": spread.median / best_ms,
            "trace_ms": trace_ms,
            "compile_ms": compile_ms,
            "compile_to_tree": (trace_ms + compile_ms) / tree_ms,
            "temporary_bytes": memory.temp_size_in_bytes,
            "peak_bytes": kept + memory.temp_size_in_bytes,
            "error": errors[name],
        }
        if name in SHARDED:
            figures[name]["to_replicated"] = spread.median / spreads[OURS].median
    return figures


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Each target at each row it speaks of."""
    return [verdict for row in rows for verdict in _verdicts_of(row)]


def _verdicts_of(row: Mapping[str, Any]) -> Iterator[Verdict]:
    where = f"{row['model']}, {row['devices']} devices, {row['dtype']}"
    figures = row["forms"][OURS]
    if row["devices"] == P1_DEVICES and row["dtype"] == "f32" and row["model"] in P1_LIMITS:
        yield Verdict(
            target="P1 step with sync / without",
            row=where,
            value=figures["to_floor"],
            limit=P1_LIMITS[row["model"]],
        )
    if row["group"] == "small":
        faster, target = 1 / figures["to_best_peer"], "P2 best peer / jaxsync, small leaves"
        yield Verdict(target=target, row=where, value=faster, limit=P2_FASTER, at_least=True)
    else:
        target = "P2 jaxsync / best peer, " + ("large leaves" if row["group"] == "large" else "real models")
        yield Verdict(target=target, row=where, value=figures["to_best_peer"], limit=P2_NEVER_SLOWER)
    target = "P3 trace and compile / those of pmean(tree)"
    yield Verdict(target=target, row=where, value=figures["compile_to_tree"], limit=P3_LIMIT)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['model']}: {row['leaves']} leaves, {row['parameters']:,} parameters; "
            f"{row['devices']} devices, {row['dtype']}; {row['rounds']} rounds, "
            f"interleaved {row['interleaved']}"
        )
        header = ["form", "ms (quartiles)", "/ no sync", "/ best peer", "/ replicated"]
        header += ["trace ms", "compile ms", "/ pmean(tree)", "temporary", "peak"]
        measure.print_table(header, [_cells(name, figures) for name, figures in row["forms"].items()])


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    lower, upper = figures["quartiles_ms"]
    ratios = [f"{figures[key]:.2f}" for key in ("to_floor", "to_best_peer")]
    ratios += [f"{figures['to_replicated']:.2f}" if "to_replicated" in figures else ""]
    compiling = [
        f"{figures['trace_ms']:.0f}",
        f"{figures['compile_ms']:.0f}",
        f"{figures['compile_to_tree']:.2f}",
    ]
    memory = [format_bytes(figures[key]) for key in ("temporary_bytes", "peak_bytes")]
    return [name, str(Spread(lower=lower, median=figures["ms"], upper=upper)), *ratios, *compiling, *memory]


def measure_rows(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    """The rows that were measured, and row -> what went wrong for the others."""
    rows: list[Any] = []
    failed: dict[str, str] = {}
    names = [(m, n, d) for m in arguments.models for n in arguments.devices for d in arguments.dtypes]
    with measure.progress("step", len(names)) as advance:
        for model, devices, dtype in names:
            row = f"{model}, {devices} devices, {dtype}"
            options = ["--models", model, "--devices", str(devices), "--dtypes", dtype]
            options += ["--repeats", str(arguments.repeats), "--compiles", str(arguments.compiles)]
            options += ["--budget-s", str(arguments.budget_s)]
            try:
                rows.append(measure.run_worker(__file__, options))
            except measure.WorkerError as error:  # the other rows took long to measure
                failed[row] = str(error)
            advance(row)
    return rows, failed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(all_models()), metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, help="rounds of calls (21)")
    parser.add_argument("--compiles", type=int, help="times each form is compiled (3)")
    parser.add_argument(
        "--budget-s", type=float, default=60, help="no new round after so long, but at least 5"
    )
    parser.add_argument("--quick", action="store_true", help="few rows and rounds, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    full = {
        "models": list(all_models()),
        "devices": [2, 4, 8],
        "dtypes": list(DTYPES),
        "repeats": 21,
        "compiles": 3,
    }
    measure.fill_in(arguments, QUICK if arguments.quick else full)
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.worker:
        [model], [devices], [dtype] = arguments.models, arguments.devices, arguments.dtypes
        row = Row(model=all_models()[model], devices=devices, dtype=dtype)
        print(json.dumps(measure_row(row, arguments.repeats, arguments.compiles, arguments.budget_s)))
        return 0
    rows, failed = measure_rows(arguments)
    judged = verdicts(rows)
    settings = {name: getattr(arguments, name) for name in ("repeats", "compiles", "budget_s", "quick")}
    result = {"rows": rows, "failed": failed}
    measure.publish("step", settings, result, judged, lambda: print_rows(rows), as_json=arguments.json)
    return measure.exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())
