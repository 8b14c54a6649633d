"""`jaxsync report RUN_DIR`: what a run did, as text, JSON, a page, or a trace."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxsync.errors import ReportWriteError
from jaxsync.run_log import read_run


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    report = commands.add_parser(
        "report",
        help="show what a run did: its figures, or a page with its curves, timeline and plan",
        description="Reads the directory of a run, whether it has ended, goes on, or was killed.",
    )
    report.set_defaults(run=_report)
    report.add_argument("run_dir", metavar="RUN_DIR", help="the directory of the run")
    report.add_argument("--html", metavar="FILE", help="write one page that needs nothing else")
    report.add_argument(
        "--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing"
    )
    report.add_argument(
        "--json", action="store_true", help="one JSON object on stdout instead of the figures"
    )


def _report(args: argparse.Namespace) -> None:
    run = read_run(args.run_dir)
    if args.html:
        _write(args.html, run.to_page())
    if args.trace:
        _write(args.trace, json.dumps(run.to_trace()))
    print(json.dumps(run.to_json(), allow_nan=False) if args.json else run)


def _write(name: str, content: str) -> None:
    try:
        Path(name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ReportWriteError(file=name, reason=error.strerror or str(error)) from error
    print(f"jaxsync report: wrote {name}", file=sys.stderr)
