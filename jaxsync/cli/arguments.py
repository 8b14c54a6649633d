"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that takes the TOML file of a job."""
    parser.add_argument("config", metavar="CONFIG", help="the TOML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the file, such as train.batch_size=32; may be given more than once",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the report")
