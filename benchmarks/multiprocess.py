"""One training step over several processes: jaxsync beside plain JAX and PyTorch's DDP, over gloo.

    python benchmarks/multiprocess.py [--processes 2 4] [--models small large] [--repeats 15] [--budget-s 40]
        [--network] [--links 1gbit:1 100mbit:10] [--quick] [--json]

- On one machine over loopback, one device a process: the time of a step (forward, backward, sync, SGD),
  interleaved call by call between all forms and both libraries; target P4.
- With `--network`: each process in a network namespace of its own with two devices, joined by links of a rate
  and a delay (each way): plain `psum`, jaxsync, with bfloat16 on the wire, in two levels. Where namespaces
  are not allowed it says so and why.

PyTorch is no dependency: `pip install torch` for the peer, else its forms are missing, which is said. Before
anything is timed, the parameters after three steps are compared between all forms that add in float32.
A step's time is that of the slowest process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import network
from group import Group, GroupError
from group_jax import BOTH, FLOOR, JIT, LEVELS, OURS, TREE, WIRE
from measure import Spread, Verdict

DDP, DDP_FP16 = "torch DDP", "torch DDP, float16 hook"
ROUNDED = (WIRE, BOTH, DDP_FP16)
STEPS_BEFORE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Tanh layers, as `models.mlp` makes them; and how many calls are one sample."""

    layers: int
    width: int
    rows: int
    calls: int

    def __str__(self) -> str:
        return f"L={self.layers} D={self.width} B={self.rows}"

    @property
    def arguments(self) -> list[str]:
        return ["--layers", str(self.layers), "--width", str(self.width), "--rows", str(self.rows)]


SIZES = {
    "small": Size(layers=50, width=32, rows=64, calls=5),
    "medium": Size(layers=4, width=512, rows=64, calls=2),
    "large": Size(layers=20, width=1024, rows=64, calls=1),
}
LINKS = ("1gbit:1", "1gbit:10", "100mbit:1", "100mbit:10")
P4_TO_TREE, P4_TO_DDP, P4_LARGE, P4_LARGE_WIRE = 10.0, 2.0, 1.3, 1.0


def measure_local(size: Size, processes: int, repeats: int, budget_s: float) -> dict[str, Any]:
    """All forms on one machine, one device a process."""
    forms = [FLOOR, TREE, JIT, OURS, WIRE]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = dict.fromkeys(forms, stack.enter_context(_jax_group(size, processes, 1, folder)))
        if has_torch():
            torch = stack.enter_context(_torch_group(size, processes, folder))
            groups |= dict.fromkeys((DDP, DDP_FP16), torch)
        samples = _sample(groups, size, repeats, budget_s)
    return {"model": str(size), "processes": processes, "devices": 1, "link": "", **_figures(samples)}


def measure_network(named: Size, processes: int, link: str, repeats: int, budget_s: float) -> dict[str, Any]:
    """The JAX forms over links, two devices a host.

    Raises:
        NoNamespacesError: There are no network namespaces here.
    """
    size = dataclasses.replace(
        named, calls=1
    )  # a step takes a second where each leaf takes a few round trips
    rate, _, delay_ms = link.partition(":")
    wanted = network.Link(rate=rate, delay_ms=int(delay_ms))
    forms = [FLOOR, TREE, OURS, WIRE, LEVELS, BOTH]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names, shaper = stack.enter_context(network.hosts(processes, wanted))
        workers = stack.enter_context(_jax_group(size, processes, 2, folder, names))
        samples = _sample(dict.fromkeys(forms, workers), size, repeats, budget_s)
    return {
        "model": str(size),
        "processes": processes,
        "devices": 2,
        "link": f"{wanted} ({shaper})",
        **_figures(samples),
    }


def has_torch() -> bool:
    """Whether the peer can be measured."""
    return importlib.util.find_spec("torch") is not None


def _jax_group(size: Size, processes: int, devices: int, folder: Path, names: Sequence[str] = ()) -> Group:
    address = f"{network.address(0)}:9123" if names else f"127.0.0.1:{_free_port()}"
    common = ["--address", address, "--bind", address, "--processes", str(processes)]
    common += ["--devices", str(devices), *size.arguments]
    return Group(
        "group_jax.py",
        [[*common, "--process", str(process)] for process in range(processes)],
        wrap=lambda host, command: network.wrap(names[host], host, command) if names else command,
        environment={"JAX_PLATFORMS": "cpu"},
        log_dir=folder,
    )


def _torch_group(size: Size, processes: int, folder: Path) -> Group:
    common = ["--address", f"127.0.0.1:{_free_port()}", "--processes", str(processes), *size.arguments]
    return Group(
        "group_torch.py",
        [[*common, "--process", str(process)] for process in range(processes)],
        environment={"GLOO_SOCKET_IFNAME": "lo"},
        log_dir=folder,
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _sample(groups: Mapping[str, Group], size: Size, repeats: int, budget_s: float) -> dict[str, list[float]]:
    """Milliseconds of a step of each form, interleaved; all forms are compared first."""
    answers = {
        form: group.ask({"do": "make", "form": form, "steps": STEPS_BEFORE}) for form, group in groups.items()
    }
    _check_agreement({form: [answer["sums"] for answer in own] for form, own in answers.items()})

    def sampler(form: str) -> Any:
        command = {"do": "run", "form": form, "calls": size.calls}
        return lambda: max(answer["ms"] for answer in groups[form].ask(command))

    runs = {form: sampler(form) for form in groups}
    for run in runs.values():  # buffers and pages that the first call touches
        run()
    return measure.interleave(runs, repeats, budget_s=budget_s, least=min(5, repeats))


def _check_agreement(sums: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Refuses forms that compute something else.

    Raises:
        AssertionError: Two processes, or two forms that add in float32, have other parameters.
    """
    wanted = sums[TREE][0]
    for form, own in sums.items():
        if form == FLOOR:
            continue
        for process, found in enumerate(own):
            if found != own[0]:
                raise AssertionError(f"{form}: process {process} has other parameters than process 0")
        limit = 2e-2 if form in ROUNDED else 1e-3
        for name, value in own[0].items():
            if abs(value - wanted[name]) > limit * (1 + abs(wanted[name])):
                raise AssertionError(f"{form} has {value} as the sum of {name}, {TREE} {wanted[name]}")


def _figures(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    spreads = {form: Spread.of(times) for form, times in samples.items()}
    return {
        "rounds": len(samples[FLOOR]),
        "forms": {
            form: {
                "ms": spread.median,
                "quartiles_ms": [spread.lower, spread.upper],
                "to_floor": spread.median / spreads[FLOOR].median,
                "to_tree": spread.median / spreads[TREE].median,
            }
            for form, spread in spreads.items()
        },
    }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Target P4 at each row it speaks of."""
    return [verdict for row in rows if not row["link"] for verdict in _verdicts_of(row)]


def _verdicts_of(row: Mapping[str, Any]) -> Iterator[Verdict]:
    where = f"{row['model']}, {row['processes']} processes"
    ms = {form: figures["ms"] for form, figures in row["forms"].items()}
    if row["model"] == str(SIZES["small"]):
        yield Verdict(
            target="P4 pmean(tree) / jaxsync",
            row=where,
            value=ms[TREE] / ms[OURS],
            limit=P4_TO_TREE,
            at_least=True,
        )
        if DDP in ms:
            yield Verdict(
                target="P4 DDP / jaxsync", row=where, value=ms[DDP] / ms[OURS], limit=P4_TO_DDP, at_least=True
            )
    if row["model"] == str(SIZES["large"]) and DDP in ms:
        yield Verdict(target="P4 jaxsync / DDP", row=where, value=ms[OURS] / ms[DDP], limit=P4_LARGE)
        yield Verdict(
            target="P4 jaxsync, bfloat16 wire / DDP", row=where, value=ms[WIRE] / ms[DDP], limit=P4_LARGE_WIRE
        )


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        over = f"over links of {row['link']}" if row["link"] else "over loopback"
        devices = f"{row['devices']} device{'s' if row['devices'] > 1 else ''} each"
        print(f"{row['model']}: {row['processes']} processes, {devices}, {over}; {row['rounds']} rounds")
        cells = [
            [
                form,
                str(Spread(lower=own["quartiles_ms"][0], median=own["ms"], upper=own["quartiles_ms"][1])),
                f"{own['to_floor']:.2f}",
                f"{own['to_tree']:.3f}",
            ]
            for form, own in row["forms"].items()
        ]
        measure.print_table(["form", "ms (quartiles)", "/ no sync", f"/ {TREE}"], cells)


def measure_rows(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    """The rows that were measured, and row -> what went wrong for the others."""
    rows: list[Any] = []
    failed: dict[str, str] = {}
    links = arguments.links if arguments.network else [""]
    names = [(m, n, link) for link in links for m in arguments.models for n in arguments.processes]
    with measure.progress("multiprocess", len(names)) as advance:
        for model, processes, link in names:
            row, size = f"{model}, {processes} processes {link}".strip(), SIZES[model]
            try:
                if link:
                    found = measure_network(size, processes, link, arguments.repeats, arguments.budget_s)
                else:
                    found = measure_local(size, processes, arguments.repeats, arguments.budget_s)
                rows.append(found)
            except network.NoNamespacesError as error:
                failed[row] = f"SKIPPED: network namespaces are not allowed here: {error}"
            except GroupError as error:
                failed[row] = str(error)
            advance(row)
    return rows, failed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=None)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--budget-s", type=float, default=40, help="no new round after so long, but 5 in all")
    parser.add_argument("--network", action="store_true", help="over links between network namespaces")
    parser.add_argument("--links", nargs="+", default=list(LINKS), metavar="RATE:DELAY_MS")
    parser.add_argument("--quick", action="store_true", help="few rows and rounds, to see that it works")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    usual: dict[str, Any] = {"processes": [2, 4], "repeats": 15}
    usual["models"] = ["small", "medium"] if arguments.network else ["small", "large"]
    quick = {"processes": [2], "models": ["small"], "repeats": 2}
    measure.fill_in(arguments, quick if arguments.quick else usual)
    return arguments


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    if not arguments.network and not has_torch():
        print("PyTorch is not installed: its forms are missing (pip install torch).", file=sys.stderr)
    rows, failed = measure_rows(arguments)
    judged = verdicts(rows)
    settings = {name: getattr(arguments, name) for name in ("repeats", "budget_s", "quick", "network")}
    result = {"rows": rows, "failed": failed}
    measure.publish(
        "multiprocess", settings, result, judged, lambda: print_rows(rows), as_json=arguments.json
    )
    return measure.exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())
