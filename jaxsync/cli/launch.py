"""`jaxsync launch -n N -- COMMAND`: local processes as one job, their output, and a report if it fails."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jaxsync.multiprocess.group import Sink
from jaxsync.multiprocess.launch import LaunchConfig, launch
from jaxsync.multiprocess.outlet import Outlet
from jaxsync.multiprocess.postmortem import Run, format_run, runs_as_json

_DRAIN_S = 1.0  # for output nobody reads, once the run was stopped: then what is left of it is dropped
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "launch",
        help="run a program in several processes on this machine, and say what happened if one fails",
        description=(
            "Runs a program in several processes on this machine, with the environment that "
            "jaxsync.initialize() reads. Exits with the code of the first process that failed."
        ),
    )
    parser.set_defaults(run=_launch)
    defaults = LaunchConfig(command=("-",), num_processes=1)
    parser.add_argument(
        "-n", "--num-processes", type=int, required=True, metavar="N", help="how many processes"
    )
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="CPU devices that each process simulates"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="K",
        default=defaults.max_restarts,
        help="start all again after a failure, at most so often (default: %(default)s)",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        metavar="S",
        default=defaults.grace_s,
        help="seconds that processes have to end, once one has failed or on Ctrl-C (default: %(default)s)",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="keep the recorded events of all processes there")
    parser.add_argument("--port", type=int, metavar="P", help="the coordinator's (default: a free one)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the report, of a run that went well too, as one JSON object on stdout; all output on stderr",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")


def _launch(args: argparse.Namespace) -> int:
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    config = LaunchConfig(
        command=tuple(command),
        num_processes=args.num_processes,
        devices_per_process=args.devices_per_process,
        max_restarts=args.max_restarts,
        grace_s=args.grace_s,
        run_dir=args.run_dir,
        port=args.port,
    )

    runs = _run(config, sys.stderr if args.json else sys.stdout, with_report=not args.json)
    if args.json:
        print(json.dumps(runs_as_json(runs)))
    return runs[-1].exit_code


def _run(config: LaunchConfig, stream: TextIO, *, with_report: bool) -> tuple[Run, ...]:
    outlets = out, err = _open_outlets(stream, sys.stderr)

    def report(run: Run, is_restarted: bool) -> None:
        if with_report and run.exit_code:
            err.write(_to_bytes(f"jaxsync launch: {format_run(run)}\n"))
        if is_restarted:
            which = f"restart {run.restart + 1} of at most {config.max_restarts}"
            err.write(_to_bytes(f"jaxsync launch: {which}\n"))

    # Afterwards, signals have their usual effect again: they end a wait for who reads the output.
    drain_s: float | None = _DRAIN_S
    try:
        prefixes = [make_prefixes(file, config.num_processes) for file in (stream, sys.stderr)]
        runs = launch(config, make_sink(outlets, prefixes), report, outlets=tuple(dict.fromkeys(outlets)))
        drain_s = None if runs[-1].stopped_by is None else _DRAIN_S
    finally:
        for outlet in dict.fromkeys((err, out)):
            outlet.close(timeout_s=drain_s)
    return runs


def make_sink(outlets: Sequence[Outlet], prefixes: Sequence[Sequence[bytes]]) -> Sink:
    """What prints lines of processes, each after the prefix of the process.

    The bytes of a line are written as they are, and all lines of a call at once.

    Args:
        outlets: For stdout and for stderr of the processes.
        prefixes: Likewise, one for each process.
    """

    def write(process: int, is_error: bool, lines: Sequence[bytes]) -> None:
        prefix = prefixes[is_error][process]
        outlets[is_error].write(b"".join(prefix + line + b"\n" for line in lines))

    return write


def _open_outlets(out: TextIO, err: TextIO) -> tuple[Outlet, Outlet]:
    """One for both, if they lead to one file, where lines must not be mixed."""
    for stream in (out, err):
        stream.flush()  # what was printed before comes before
    first = Outlet(out.fileno())
    is_same = os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    return first, first if is_same else Outlet(err.fileno())


def _to_bytes(text: str) -> bytes:
    return text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")


def make_prefixes(stream: TextIO, num_processes: int) -> list[bytes]:
    """What comes before each line of each process on this stream."""
    return [_prefix(stream, process) for process in range(num_processes)]


def _prefix(stream: TextIO, process: int) -> bytes:
    """`[2] `, in a colour of its own if rich is installed and sees a terminal."""
    text = f"[{process}]"
    try:
        console = importlib.import_module("rich.console").Console(file=stream, highlight=False, markup=False)
    except ImportError:
        return f"{text} ".encode()
    with console.capture() as capture:
        console.print(text, style=_COLORS[process % len(_COLORS)], end="")
    return f"{capture.get()} ".encode()
