"""Renders docs/performance.md and its plots from what the benchmarks print with --json.

    python benchmarks/report.py results/*.json [--docs docs]

Several runs of one benchmark stand side by side, in the order of the files. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import memory
import plots
import scale
from forms import FLOOR, OURS, PEERS, SHARDED
from measure import Spread, three_digits

from jaxsync.report import format_bytes

Run = Mapping[str, Any]
Runs = Sequence[Run]

HEAD = """# Performance

This file is generated; what is written by hand is in [performance-notes.md](performance-notes.md), repeated
at its end. To measure and render it anew:

```bash
mkdir -p results
for run in 1 2; do
  for name in step memory scale dispatch host multiprocess; do
    python benchmarks/$name.py --json > results/$name-$run.json
  done
  python benchmarks/multiprocess.py --network --json > results/network-$run.json
done
python benchmarks/report.py results/*.json
```

Machines differ, and one that is shared differs from minute to minute. So forms are compared by ratios,
measured interleaved in one run; and each figure is given for each run that has it, in the order of the runs.
In plots the first run is filled or solid, later ones hollow or dashed.
"""


def load(paths: Sequence[Path]) -> dict[str, Runs]:
    """Benchmark -> its runs, in the order of the files."""
    found: dict[str, list[Run]] = {}
    for path in paths:
        run = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(run["benchmark"], []).append(run)
    return dict(found)


def render(found: Mapping[str, Runs], notes: str) -> str:
    """The whole page."""
    sections: dict[str, Callable[[Runs], Iterator[str]]] = {
        "step": _step,
        "memory": _memory,
        "scale": _scale,
        "dispatch": _dispatch,
        "host": _host,
        "multiprocess": _multiprocess,
    }
    parts = [HEAD, *_targets(found), *_machines(found)]
    for name, section in sections.items():
        if name in found:
            parts += section(found[name])
    return "\n".join([*parts, notes.strip(), ""])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _each(runs: Sequence[str]) -> str:
    """One cell for all runs; once if it is the same in all."""
    return runs[0] if len(set(runs)) == 1 else " · ".join(runs)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n</details>\n"


def _machines(found: Mapping[str, Runs]) -> Iterator[str]:
    yield "## Machines\n"
    rows = []
    for name, runs in found.items():
        for index, run in enumerate(runs, 1):
            facts = ", ".join(f"{key} {value}" for key, value in run["machine"].items())
            settings = ", ".join(f"{key} {value}" for key, value in run["settings"].items())
            rows.append([name, str(index), facts, settings])
    yield _table(["benchmark", "run", "machine", "settings"], rows)


def _targets(found: Mapping[str, Runs]) -> Iterator[str]:
    """A line for each target, and every row it was judged at below."""
    yield "## Targets\n"
    judged: dict[str, dict[str, list[Any]]] = {}
    for runs in found.values():
        for run in runs:
            for verdict in run["targets"]:
                judged.setdefault(verdict["target"], {}).setdefault(verdict["row"], []).append(verdict)
    rows = [_target_row(target, judged[target]) for target in sorted(judged)]
    yield _table(["target", "limit", "met", "worst", "where"], rows)
    every = [
        [target, where, _limit(vs), " · ".join(three_digits(v["value"]) for v in vs), _verdict(vs)]
        for target in sorted(judged)
        for where, vs in judged[target].items()
    ]
    yield _folded("Every row", _table(["target", "where", "limit", "measured", "verdict"], every))


def _target_row(target: str, rows: Mapping[str, Sequence[Any]]) -> list[str]:
    verdicts = [verdict for found in rows.values() for verdict in found]
    num_met = sum(verdict["is_met"] for verdict in verdicts)
    worst = min(verdicts, key=lambda v: (1 if v["at_least"] else -1) * _distance(v))
    met = "met" if num_met == len(verdicts) else f"**missed**: met in {num_met} of {len(verdicts)}"
    return [target, _limit(verdicts), met, three_digits(worst["value"]), worst["row"]]


def _distance(verdict: Mapping[str, Any]) -> float:
    """What was measured, in units of its limit where that is not zero: rows may have limits of their own."""
    return float(verdict["value"] / (verdict["limit"] or 1))


def _limit(verdicts: Sequence[Mapping[str, Any]]) -> str:
    sign = "≥" if verdicts[0]["at_least"] else "≤"
    return ", ".join(f"{sign} {limit:g}" for limit in sorted({v["limit"] for v in verdicts}))


def _verdict(verdicts: Sequence[Mapping[str, Any]]) -> str:
    return _each(["met" if verdict["is_met"] else "**missed**" for verdict in verdicts])


def _step(runs: Runs) -> Iterator[str]:
    yield "## A training step\n"
    yield (
        "Forward, backward, sync and a donated SGD update, each call awaited. *No sync* uses each device's "
        "own gradients: the floor. *Peers* are the usual ways to write the step: "
        + "; ".join(f"`{name}`" for name in PEERS)
        + ". All forms but the floor were found to compute the same parameters before they were timed.\n"
    )
    for dtype in plots.step_dtypes(runs):
        yield f"![time of a step in units of a step without sync, {dtype}](images/step-{dtype}.svg)\n"
    rows = _aligned(runs, "rows", ("model", "devices", "dtype"))
    header = ["model", "devices", "dtype", "no sync, ms", "best peer, ms", "jaxsync, ms"]
    header += ["jaxsync / no sync", "best peer / jaxsync", "trace and compile / `pmean(tree)`"]
    yield _table(header, [_step_row(row) for row in rows])
    yield "![time to trace and compile in units of pmean(tree)'s](images/compile.svg)\n"
    yield from _sharded(rows)
    models: dict[str, list[str]] = {}
    for row in rows:
        models.setdefault(row[0]["model"], []).append(_step_details(row))
    for model, tables in models.items():
        yield _folded(f"{model}: every form", "\n".join(tables))


def _aligned(runs: Runs, part: str, keys: Sequence[str]) -> list[list[Any]]:
    """The rows of all runs that are about the same thing."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for run in runs:
        for row in run[part]:
            found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def _step_row(row: Sequence[Any]) -> list[str]:
    best = [min(run["forms"][name]["ms"] for name in PEERS) for run in row]
    ours = [run["forms"][OURS] for run in row]
    cells = [
        [three_digits(run["forms"][FLOOR]["ms"]) for run in row],
        [three_digits(ms) for ms in best],
        [three_digits(figures["ms"]) for figures in ours],
        [f"{figures['to_floor']:.2f}" for figures in ours],
        [f"{1 / figures['to_best_peer']:.2f}" for figures in ours],
        [f"{figures['compile_to_tree']:.2f}" for figures in ours],
    ]
    return [row[0]["model"], str(row[0]["devices"]), row[0]["dtype"], *map(_each, cells)]


def _sharded(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The forms with sharded state beside the replicated one, from the runs that have them."""
    judged = [[run for run in row if all(name in run["forms"] for name in SHARDED)] for row in rows]
    if not any(judged):
        return
    yield (
        f"The same step with sharded state beside `{OURS}`, whose state is replicated, in the runs that "
        "have these forms. ZeRO-1 is `shard_optimizer`; FSDP has each parameter over the data axis along its "
        "first dim that divides. SGD keeps no state: what is timed is how gradients and parameters travel.\n"
    )
    header = ["model", "devices", "dtype", "replicated, ms"]
    header += [
        f"{name.removeprefix('jaxsync, ')}, {what}" for name in SHARDED for what in ("ms", "/ replicated")
    ]
    yield _table(header, [_sharded_row(row) for row in judged if row])


def _sharded_row(row: Sequence[Any]) -> list[str]:
    cells = [[three_digits(run["forms"][OURS]["ms"]) for run in row]]
    for name in SHARDED:
        cells.append([three_digits(run["forms"][name]["ms"]) for run in row])
        cells.append([f"{run['forms'][name]['to_replicated']:.2f}" for run in row])
    return [row[0]["model"], str(row[0]["devices"]), row[0]["dtype"], *map(_each, cells)]


def _step_details(row: Sequence[Any]) -> str:
    first = row[0]
    rounds = _each([f"{run['rounds']} rounds" for run in row])
    title = (
        f"{first['leaves']} leaves, {first['parameters']:,} parameters, {first['devices']} devices, "
        f"{first['dtype']}; {rounds}, interleaved {first['interleaved']}:\n\n"
    )
    header = ["form", "ms (quartiles)", "/ no sync", "/ best peer"]
    header += ["trace, ms", "compile, ms", "both / `pmean(tree)`", "temporary", "peak a device"]
    names = dict.fromkeys(name for run in row for name in run["forms"])
    return title + _table(
        header, [_form_row(name, [run["forms"].get(name) for run in row]) for name in names]
    )


def _form_row(name: str, runs: Sequence[Mapping[str, Any] | None]) -> list[str]:
    columns: list[Callable[[Mapping[str, Any]], str]] = [
        lambda figures: str(_spread(figures, "ms")),
        lambda figures: f"{figures['to_floor']:.2f}",
        lambda figures: f"{figures['to_best_peer']:.2f}",
        lambda figures: f"{figures['trace_ms']:.0f}",
        lambda figures: f"{figures['compile_ms']:.0f}",
        lambda figures: f"{figures['compile_to_tree']:.2f}",
        lambda figures: format_bytes(figures["temporary_bytes"]),
        lambda figures: format_bytes(figures["peak_bytes"]),
    ]
    # A run from before there was this form has no figures of it.
    return [name, *(_each(["-" if run is None else show(run) for run in runs]) for show in columns)]


def _spread(figures: Mapping[str, Any], key: str, quartiles: str = "quartiles_ms") -> Spread:
    lower, upper = figures[quartiles]
    return Spread(lower=lower, median=figures[key], upper=upper)


def _memory(runs: Runs) -> Iterator[str]:
    yield "## Memory of sharded state\n"
    yield (
        "A step with Adam in float32 as compiled, bytes on each device. *ZeRO-1* is `shard_optimizer`; "
        "*FSDP* has each parameter over the data axis along its first dim that divides, and the optimizer's "
        "state like it. Arguments are state and batch; temporaries hold gradients, and parameters while they "
        "are whole. The bytes of collectives are those of their results.\n"
    )
    yield "![bytes of a step on each device, by what they hold](images/memory.svg)\n"
    rows = _aligned(runs, "rows", ("model", "devices"))
    header = ["model", "devices", "state", "optimizer state", "/ replicated", "parameters", "arguments"]
    header += ["temporary", "peak", "collectives"]
    yield _table(header, [_memory_row(row, name) for row in rows for name in row[0]["forms"]])


def _memory_row(row: Sequence[Any], name: str) -> list[str]:
    figures = [run["forms"][name] for run in row]
    keys = ("parameter_bytes", "argument_bytes", "temporary_bytes", "peak_bytes")
    cells = [
        [format_bytes(each["optimizer_bytes"]) for each in figures],
        [f"{each['optimizer_share']:.4f}" for each in figures],
        *([format_bytes(each[key]) for each in figures] for key in keys),
        [memory.format_collectives(each["collectives"]) for each in figures],
    ]
    return [row[0]["model"], str(row[0]["devices"]), name, *map(_each, cells)]


def _scale(runs: Runs) -> Iterator[str]:
    yield "## Planning and tracing\n"
    yield "![time to plan and to lower over leaves and over devices](images/scale.svg)\n"
    names = (scale.PLAN, scale.SYNC, scale.TREE)
    for key in ("leaves", "devices"):
        header = ["leaves", "devices", *(f"{name}, ms" for name in names)]
        rows = [
            [
                str(point[0]["leaves"]),
                str(point[0]["devices"]),
                *(_each([three_digits(run["forms"][name]["ms"]) for run in point]) for name in names),
            ]
            for point in _aligned(runs, f"by_{key}", ("leaves", "devices"))
        ]
        powers = [_each([f"{run['exponents'][key].get(n, float('nan')):.2f}" for run in runs]) for n in names]
        yield _table(header, [*rows, [f"grows as {key} to the power of", "", *powers]])
    yield "What JAX traces and compiles when an equal tree is registered:\n"
    counts = [
        [
            name,
            *(_each([str(run["registered"][name][key]) for run in runs]) for key in ("traces", "compiles")),
        ]
        for name in runs[0]["registered"]
    ]
    yield _table(["registered", "traces", "compiles"], counts)


def _dispatch(runs: Runs) -> Iterator[str]:
    yield "## What a call costs on the client's side\n"
    yield (
        "A program that does next to nothing, called directly and through jaxsync; microseconds until the "
        "call returns. A `TrainStep` is set against the faster direct way, `guard_dispatch` against what it "
        "wraps.\n"
    )
    yield "![microseconds a call over the program itself](images/dispatch.svg)\n"
    rows = []
    for row in _aligned(runs, "rows", ("leaves", "devices")):
        for name in row[0]["forms"]:
            figures = [run["forms"][name] for run in row]
            call = _each([str(_spread(f, "call_us", "call_quartiles_us")) for f in figures])
            over = _each([f"{f['over_call_us']:.0f}" if "over_call_us" in f else "" for f in figures])
            rows.append([str(row[0]["leaves"]), str(row[0]["devices"]), name, call, over])
    yield _table(["leaves", "devices", "form", "µs (quartiles)", "over the program, µs"], rows)


def _host(runs: Runs) -> Iterator[str]:
    yield "## Gradients handed over by device, on the host\n"
    yield "100 leaves of 1,000 floats on 8 simulated devices.\n"
    rows = []
    for name in runs[0]["forms"]:
        figures = [run["forms"][name] for run in runs]
        spreads = [str(_spread(f, "ms")) for f in figures]
        rows.append([name, _each(spreads), _each([f"{f['ratio']:.2f}" for f in figures])])
    yield _table(["form", "ms (quartiles)", "/ bucketed program"], rows)
    rates = [[f"{run[key]:,.0f}" for run in runs] for key in ("submissions_per_s", "syncs_per_s")]
    yield (
        f"Through the state machine and the loop, a second: {_each(rates[0])} submissions, "
        f"{_each(rates[1])} syncs.\n"
    )


def _multiprocess(runs: Runs) -> Iterator[str]:
    yield "## Several processes\n"
    yield (
        "Over gloo; forward, backward, sync and SGD. A step takes as long as on the slowest process. Over "
        "links, each process is in a network namespace of its own, with two devices; the delay is each way, "
        "and what shapes the links stands beside them.\n"
    )
    rows = []
    for row in (row for run in runs for row in run["rows"]):
        where = row["link"] or "loopback"
        label = [row["model"], f"{row['processes']} x {row['devices']}", where]
        for form, figures in row["forms"].items():
            to_floor, to_tree = f"{figures['to_floor']:.2f}", f"{figures['to_tree']:.3f}"
            rows.append([*label, form, str(_spread(figures, "ms")), to_floor, to_tree])
    header = ["model", "processes x devices", "over", "form", "ms (quartiles)", "/ no sync", "/ pmean(tree)"]
    yield _table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    arguments = parser.parse_args()
    found = load(arguments.results)
    notes = (arguments.docs / "performance-notes.md").read_text(encoding="utf-8")
    (arguments.docs / "performance.md").write_text(render(found, notes), encoding="utf-8")
    plots.draw_all(found, arguments.docs / "images")


if __name__ == "__main__":
    main()
