"""`jaxsync audit MODULE:FUNCTION`: the collectives of a step of the user's own, and what looks wrong."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from typing import Any

from jaxsync.audit import Audit, audit
from jaxsync.devices import simulate_devices
from jaxsync.reference import call_reference, importing_from


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    command = commands.add_parser(
        "audit",
        help="list the collectives of a step of your own, and what looks wrong with them",
        description=(
            "Compiles a step and reads what it really communicates. FUNCTION takes no arguments and returns "
            "(fn, *args). Warns of collectives in loops, of sums of what was summed before or is equal "
            "everywhere, and of rows that are sharded over an axis which nothing reduces over. Exit code 0 "
            "if there is no warning, 1 if there is one."
        ),
    )
    command.set_defaults(run=_audit)
    command.add_argument(
        "function", metavar="MODULE:FUNCTION", help="what to call, such as my_package.model:make"
    )
    command.add_argument(
        "--devices",
        metavar="N",
        type=int,
        default=0,
        help="CPU devices to simulate; by default those JAX has",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")


def _audit(args: argparse.Namespace) -> int:
    if args.devices:
        simulate_devices(args.devices)  # before the import: the module may make arrays
    # What the user's own code prints must not end up in the table.
    with contextlib.redirect_stdout(sys.stderr), importing_from(os.getcwd()):
        fn, arguments = call_reference(args.function)
        found = audit(fn, *arguments)
    print(json.dumps(_as_json(found)) if args.json else found)
    return int(bool(found.warnings))


def _as_json(found: Audit) -> dict[str, Any]:
    return {
        "counts": found.counts,
        "num_bytes": found.num_bytes,
        "collectives": [dataclasses.asdict(collective) for collective in found.collectives],
        "warnings": [dataclasses.asdict(warning) for warning in found.warnings],
    }
