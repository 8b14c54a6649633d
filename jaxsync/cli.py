"""The command line: `jaxsync train CONFIG`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jaxsync
from jaxsync.errors import JaxsyncError
from jaxsync.plan import SyncPlan
from jaxsync.report import format_bytes
from jaxsync.workloads.job import JobConfig
from jaxsync.workloads.train import Progress, TrainResult, prepare_job, run_job
from jaxsync.workloads.workload import import_extra

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        0 if all went well; 2 if the job cannot run, after one message on stderr; 130 if it was interrupted.

    Raises:
        SystemExit: From argparse: 0 after `--help` and `--version`, 2 if the arguments make no sense.

    >>> main(["train", "configs/digits.toml", "--set", "train.steps=0"])
    2
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    try:
        _train(args)
    except JaxsyncError as error:
        print(f"jaxsync: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("jaxsync: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxsync", description="Gradient synchronisation for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxsync {jaxsync.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a small model on a mesh of devices, and report what the sync cost and how exact it was",
        description="Trains the job in a TOML file, such as configs/digits.toml.",
    )
    train.add_argument("config", metavar="CONFIG", help="the TOML file")
    train.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the file, such as train.steps=10; may be given more than once",
    )
    train.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the report")
    train.add_argument("--dry-run", action="store_true", help="print the sync plan and train nothing")
    return parser


def _train(args: argparse.Namespace) -> None:
    config = JobConfig.from_toml(args.config, args.overrides)
    job = prepare_job(config)
    if args.dry_run:
        print(json.dumps(_plan_as_json(job.plan)) if args.json else job.plan)
    elif args.json:
        print(json.dumps(_result_as_json(run_job(job))))
    else:
        with _progress_bar(config) as on_progress:
            result = run_job(job, on_progress)
        print(format_result(result))


@contextlib.contextmanager
def _progress_bar(config: JobConfig) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, and what moves it."""
    console = import_extra("rich.console", package="rich", feature="The progress bar").Console(stderr=True)
    bars = import_extra("rich.progress", package="rich", feature="The progress bar")
    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("loss {task.fields[loss]}  {task.fields[speed]} steps/s"),
        bars.TimeRemainingColumn(),
    ]
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task(config.workload, total=config.train.steps, loss="-", speed="-")

        def move(progress: Progress) -> None:
            speed = "-" if progress.steps_per_s is None else f"{progress.steps_per_s:.1f}"
            bar.update(task, completed=progress.step, loss=f"{progress.loss:.4f}", speed=speed)

        yield move


def format_result(result: TrainResult) -> str:
    """The report of a run: one aligned line a figure."""
    speed = "-" if result.steps_per_s is None else f"{result.steps_per_s:.1f} (without the first)"
    collectives = str(result.collectives_per_step)
    if result.collectives_in_loop:
        collectives += f", and {result.collectives_in_loop} in loops, which run more than once"
    rows = [(name.replace("_", " "), _format_metric(name, value)) for name, value in result.metrics.items()]
    rows += [
        ("final training loss", f"{result.final_loss:.4f}"),
        ("steps", f"{result.steps} on {result.num_devices} devices"),
        ("steps skipped as not finite", str(result.num_skipped)),
        ("steps/s", speed),
        ("collectives per step", collectives),
        (
            "bytes synced per step",
            f"{result.bytes_synced_per_step} ({format_bytes(result.bytes_synced_per_step)})",
        ),
        ("largest gradient difference", f"{result.gradient_error:.1e} of the norm, to one device"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


def _format_metric(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.3f}"


def _result_as_json(result: TrainResult) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    flat = {"workload": fields.pop("workload"), **fields.pop("metrics"), **fields}
    # JSON has no NaN: a loss that is not finite is null.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in flat.items()
    }


def _plan_as_json(plan: SyncPlan) -> dict[str, Any]:
    return {
        "mesh": dict(plan.mesh.shape),
        "data_axes": plan.data_axes,
        "reduce": plan.config.reduce,
        "num_leaves": len(plan.leaves),
        "num_all_reduces": plan.num_all_reduces,
        "num_bytes": plan.num_bytes,
        "buckets": [
            {
                "leaves": [plan.leaves[i].path for i in bucket.leaves],
                "dtype": bucket.dtype,
                "bytes": bucket.num_bytes,
            }
            for bucket in plan.buckets
        ],
        "fingerprint": plan.fingerprint,
    }


if __name__ == "__main__":
    raise SystemExit(main())
