"""The command line: `jaxsync train CONFIG` and `jaxsync tune CONFIG`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jaxsync
from jaxsync.checkpoint import list_checkpoints
from jaxsync.errors import JaxsyncError
from jaxsync.extras import import_extra
from jaxsync.plan import SyncPlan
from jaxsync.report import format_bytes, format_table
from jaxsync.workloads.job import JobConfig
from jaxsync.workloads.train import PreparedJob, Progress, TrainResult, prepare_job, run_job
from jaxsync.workloads.tune import (
    DEFAULT_ROUNDS,
    Measurement,
    OnProgress,
    TuneProgress,
    TuneResult,
    check_num_rounds,
    tune_file,
)
from jaxsync.workloads.verdict import MIN_GAIN

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
        args.run(args)
    except JaxsyncError as error:
        print(f"jaxsync: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as error:
        print(f"jaxsync: {str(error) or 'interrupted'}", file=sys.stderr)
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
    train.set_defaults(run=_train)
    _add_common_arguments(train)
    train.add_argument("--dry-run", action="store_true", help="print the sync plan and train nothing")
    train.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="write checkpoints to this directory, which is the run's own (train.checkpoint_dir)",
    )
    train.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of that directory"
    )
    tune = commands.add_parser(
        "tune",
        help="measure a few sync plans for a model on this machine, and print the best as TOML",
        description=(
            "Measures sync plans for the job in a TOML file; or for a step of your own, if the file has "
            '[mesh] and [tune] with module = "package.module:function", a function that returns (loss_fn, '
            "params, batch) or (loss_fn, params, batch, optimizer)."
        ),
    )
    tune.set_defaults(run=_tune)
    _add_common_arguments(tune)
    tune.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=DEFAULT_ROUNDS,
        help="rounds in which every plan is timed once; more tell smaller gains (default: %(default)s)",
    )
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
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


def _train(args: argparse.Namespace) -> None:
    overrides = list(args.overrides)
    if args.checkpoints is not None:
        overrides.append(f"train.checkpoint_dir={json.dumps(args.checkpoints)}")  # also a TOML string
    config = JobConfig.from_toml(args.config, overrides)
    job = prepare_job(config, resume=args.resume)
    try:
        _run_train(args, job)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(args, config)) from None


def _how_to_resume(args: argparse.Namespace, config: JobConfig) -> str:
    directory = config.train.checkpoint_dir
    there = list_checkpoints(directory) if directory else ()
    if not there:
        return "interrupted"
    arguments = [args.config, *(f"--set={override}" for override in args.overrides)]
    if args.checkpoints is not None:
        arguments += ["--checkpoints", args.checkpoints]
    arguments += ["--json"] if args.json else []
    command = shlex.join(["jaxsync", "train", *arguments, "--resume"])
    return f"interrupted; to go on from step {there[-1]}: {command}"


def _run_train(args: argparse.Namespace, job: PreparedJob) -> None:
    config = job.config
    if args.dry_run:
        print(json.dumps(_plan_as_json(job.plan)) if args.json else job.plan)
    elif args.json:
        print(json.dumps(_result_as_json(run_job(job))))
    else:
        with _progress_bar(config, job.resume or 0) as on_progress:
            result = run_job(job, on_progress)
        print(format_result(result))


@contextlib.contextmanager
def _progress_bar(config: JobConfig, start: int) -> Iterator[Callable[[Progress], None]]:
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
        task = bar.add_task(config.workload, total=config.train.steps, completed=start, loss="-", speed="-")

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


def _tune(args: argparse.Namespace) -> None:
    # A mistake in the arguments is told before the bar is drawn.
    check_num_rounds(args.repeats)
    with contextlib.ExitStack() as stack:
        on_progress = _ignore if args.json else stack.enter_context(_tune_bar())
        # What the user's own code prints must not end up among the TOML.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        result = tune_file(args.config, args.overrides, num_rounds=args.repeats, on_progress=on_progress)
    print(json.dumps(_tune_result_as_json(result)) if args.json else format_tune_result(result))


def _ignore(progress: TuneProgress) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def _tune_bar() -> Iterator[OnProgress]:
    """A bar on stderr, and what moves it."""
    console = import_extra("rich.console", package="rich", feature="The progress bar").Console(stderr=True)
    bars = import_extra("rich.progress", package="rich", feature="The progress bar")
    columns = [
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.TimeElapsedColumn(),
    ]
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("getting ready", total=None)

        def move(progress: TuneProgress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.doing)

        yield move


def format_tune_result(result: TuneResult) -> str:
    """The measurements and the verdict as comments, and the best `[sync]` table: TOML."""
    default = result.measurements[0]
    devices = f"{result.num_devices} {result.platform} devices"
    header = ["candidate", "buckets", "step", "compile", "rounds", "ratio to " + default.label]
    rows = [_tune_row(measurement, default) for measurement in result.measurements]
    title = f"jaxsync tune on {devices}, {result.steps_per_round} steps a round"
    comments = [title, *format_table(header, rows).splitlines(), "", *_verdict(result)]
    lines = [f"# {comment}".rstrip() for comment in comments]
    return "\n".join([*lines, result.measurements[result.best].sync.to_toml().rstrip()])


def _tune_row(measurement: Measurement, default: Measurement) -> list[str]:
    ratio = measurement.ratio
    if measurement is default:
        relative = "1"
    elif measurement.num_rounds < default.num_rounds or math.isinf(ratio.high):  # it was left out
        relative = f"{ratio.median:.3f}, clearly slower"
    else:
        relative = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    return [
        measurement.label,
        str(measurement.num_buckets),
        _format_ms(measurement.step_s),
        f"{measurement.compile_s:.2f} s",
        str(measurement.num_rounds),
        relative,
    ]


def _verdict(result: TuneResult) -> list[str]:
    default, best = result.measurements[0], result.measurements[result.best]
    if len(result.measurements) == 1:
        return [f"{default.label} is best: all candidates make the same buckets."]
    if best is default:
        return [
            f"{default.label} is best: none takes {_format_percent(MIN_GAIN)} less time beyond the noise."
        ]
    gain, least = _format_percent(1 - best.ratio.median), _format_percent(1 - best.ratio.high)
    return [
        f"{best.label} is best: a step takes {gain} less time (at least {least}) than with {default.label},",
        f"{_format_ms(best.step_s)} and not {_format_ms(default.step_s)}; it compiles in "
        f"{best.compile_s:.2f} s and not {default.compile_s:.2f} s.",
    ]


def _format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _tune_result_as_json(result: TuneResult) -> dict[str, Any]:
    best = result.measurements[result.best]
    return {
        "best": best.label,
        "is_default_best": result.best == 0,
        "sync": dataclasses.asdict(best.sync),
        "num_devices": result.num_devices,
        "platform": result.platform,
        "steps_per_round": result.steps_per_round,
        "candidates": [
            {
                "label": each.label,
                "changes": each.changes,
                "num_buckets": each.num_buckets,
                "compile_s": each.compile_s,
                "step_s": each.step_s,
                "num_rounds": each.num_rounds,
                "ratio": each.ratio.median,
                # JSON has no infinity: a bound that so few rounds cannot give is null.
                "ratio_low": each.ratio.low if math.isfinite(each.ratio.low) else None,
                "ratio_high": each.ratio.high if math.isfinite(each.ratio.high) else None,
            }
            for each in result.measurements
        ],
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
