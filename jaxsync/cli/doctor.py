"""`jaxsync doctor`: what this machine is, and what is wrong with it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from jaxsync.doctor import find_problems, format_report, gather_facts


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine is, and what is wrong with it",
        description=(
            "Lists devices, versions, extras and the settings that matter, and says what is wrong with them "
            "and how to mend it. Exit code 0 if all is well, 1 if something is wrong."
        ),
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the report")


def _doctor(args: argparse.Namespace) -> int:
    facts = gather_facts()
    findings = find_problems(facts)
    if args.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({**dataclasses.asdict(facts), "findings": found}))
    else:
        print(format_report(facts, findings))
    return int(any(finding.level == "wrong" for finding in findings))
