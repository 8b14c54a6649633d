"""`jaxsync launch -n N -- COMMAND`: local processes as one job, their output, and a report if it fails."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jaxsync.multiprocess.group import Sink
from jaxsync.multiprocess.launch import LaunchConfig, launch
from jaxsync.multiprocess.postmortem import Run, format_run, runs_as_json

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

    def report(run: Run, is_restarted: bool) -> None:
        if not args.json and run.exit_code:
            print(f"jaxsync launch: {format_run(run)}", file=sys.stderr)
        if is_restarted:
            which = f"restart {run.restart + 1} of at most {config.max_restarts}"
            print(f"jaxsync launch: {which}", file=sys.stderr)

    sink = make_sink(sys.stderr if args.json else sys.stdout, sys.stderr, config.num_processes)
    runs = launch(config, sink, report)
    if args.json:
        print(json.dumps(runs_as_json(runs)))
    return runs[-1].exit_code


def make_sink(out: TextIO, err: TextIO, num_processes: int) -> Sink:
    """What prints lines of processes, each after the process's number: stdout to `out`, stderr to `err`.

    The bytes of a line are written as they are, and all lines of a call at once.
    """
    streams = [
        (_to_bytes(stream), [_prefix(stream, process) for process in range(num_processes)])
        for stream in (out, err)
    ]

    def write(process: int, is_error: bool, lines: Sequence[bytes]) -> None:
        stream, prefixes = streams[is_error]
        try:
            stream.write(b"".join(prefixes[process] + line + b"\n" for line in lines))
            stream.flush()
        except BrokenPipeError:
            _discard(stream)
            raise

    return write


def _to_bytes(stream: TextIO) -> Any:
    stream.flush()  # what was printed before comes before
    return stream.buffer


def _discard(stream: Any) -> None:
    """What is left in the stream's buffer goes nowhere: Python would try again, and complain, at its exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


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
