"""`jaxsync train CONFIG`: trains a small model, and reports what the sync cost."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxsync.checkpoint import list_checkpoints
from jaxsync.cli.arguments import add_job_arguments
from jaxsync.cli.progress import progress_bar
from jaxsync.plan import SyncPlan
from jaxsync.report import figures
from jaxsync.workloads.job import JobConfig
from jaxsync.workloads.train import PreparedJob, Progress, TrainResult, prepare_job, run_job

_STDOUT, _STDERR = 1, 2  # file descriptors


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    train = commands.add_parser(
        "train",
        help="train a small model on a mesh of devices, and report what the sync cost and how exact it was",
        description="Trains the job in a TOML file, such as configs/digits.toml.",
    )
    train.set_defaults(run=_train)
    add_job_arguments(train)
    train.add_argument("--dry-run", action="store_true", help="print the sync plan and train nothing")
    train.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="write checkpoints to this directory, which is the run's own (train.checkpoint_dir)",
    )
    train.add_argument(
        "--run-dir",
        metavar="DIR",
        help="write what `jaxsync report` shows to this directory, which is the run's own (train.run_dir)",
    )
    train.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of that directory"
    )


def _train(args: argparse.Namespace) -> None:
    overrides = list(args.overrides)
    if args.checkpoints is not None:
        overrides.append(f"train.checkpoint_dir={json.dumps(args.checkpoints)}")  # also a TOML string
    if args.run_dir is not None:
        overrides.append(f"train.run_dir={json.dumps(args.run_dir)}")
    config = JobConfig.from_toml(args.config, overrides)
    job = prepare_job(config, resume=args.resume)
    try:
        _run_train(args, job)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(args, config)) from None


def _how_to_resume(args: argparse.Namespace, config: JobConfig) -> str:
    directory = config.train.checkpoint_dir
    # Of several processes, the others may be gone, without which a save that is under way never ends.
    there = list_checkpoints(directory) if directory and jax.process_count() == 1 else ()
    if not there:
        return "interrupted"
    arguments = [args.config, *(f"--set={override}" for override in args.overrides)]
    if args.checkpoints is not None:
        arguments += ["--checkpoints", args.checkpoints]
    if args.run_dir is not None:
        arguments += ["--run-dir", args.run_dir]
    arguments += ["--json"] if args.json else []
    command = shlex.join(["jaxsync", "train", *arguments, "--resume"])
    return f"interrupted; to go on from step {there[-1]}: {command}"


def _run_train(args: argparse.Namespace, job: PreparedJob) -> None:
    config = job.config
    is_first = jax.process_index() == 0  # of several processes it speaks for all
    if args.dry_run:
        if is_first:
            print(json.dumps(_plan_as_json(job.plan)) if args.json else job.plan)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_stdout())
        has_bar = is_first and not args.json
        bar = stack.enter_context(_progress_bar(config, job.resume or 0)) if has_bar else _ignore
        result = run_job(job, bar)
    if is_first:
        run_dir = config.train.run_dir
        print(json.dumps(_result_as_json(result)) if args.json else format_result(result, run_dir))


def _ignore(progress: Progress) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Inside it, what libraries write to the file of stdout goes to that of stderr.

    Gloo, which connects several processes, says there whom it is connected to (jax 0.12 still).
    """
    if jax.process_count() == 1:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


@contextlib.contextmanager
def _progress_bar(config: JobConfig, start: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, or lines, and what moves it."""
    with progress_bar(
        config.workload,
        lambda bars: [
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("loss {task.fields[loss]}  {task.fields[speed]} steps/s"),
            bars.TimeRemainingColumn(),
        ],
        "{description}  step {completed}/{total}  loss {loss}  {speed} steps/s",
        feature="The progress bar of jaxsync train",
        total=config.train.steps,
        completed=start,
        loss="-",
        speed="-",
    ) as move:

        def show(progress: Progress) -> None:
            speed = figures.format_speed(progress.steps_per_s)
            move(completed=progress.step, loss=f"{progress.loss:.4f}", speed=speed)

        yield show


def format_result(result: TrainResult, run_dir: str = "") -> str:
    """The report of a run: one aligned line a figure.

    Args:
        result: What came out.
        run_dir: The directory that `jaxsync report` reads, if the run has one.
    """
    speed = figures.format_speed(result.steps_per_s)
    speed += " (without the first)" if result.steps_per_s is not None else ""
    collectives = str(result.collectives_per_step)
    if result.collectives_in_loop:
        collectives += f", and {result.collectives_in_loop} {figures.IN_LOOPS}"
    rows = [(name.replace("_", " "), figures.format_metric(name, x)) for name, x in result.metrics.items()]
    rows += [
        (figures.FINAL_LOSS, f"{result.final_loss:.4f}"),
        ("steps", f"{result.steps} on {result.num_devices} devices"),
        (figures.SKIPPED, str(result.num_skipped)),
        (figures.SPEED, speed),
        (figures.COLLECTIVES, collectives),
        (figures.BYTES_SYNCED, figures.format_bytes_synced(result.bytes_synced_per_step)),
        (figures.GRADIENT_ERROR, figures.format_gradient_error(result.gradient_error)),
    ]
    if run_dir:
        rows.append(("run", f"in {run_dir}; to look at it: {shlex.join(['jaxsync', 'report', run_dir])}"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


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
