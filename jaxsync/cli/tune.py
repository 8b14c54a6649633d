"""`jaxsync tune CONFIG`: measures sync plans on this machine, and prints the best as TOML."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from jaxsync.cli.arguments import add_job_arguments
from jaxsync.cli.progress import progress_bar
from jaxsync.report import format_table
from jaxsync.workloads.tune import (
    DEFAULT_ROUNDS,
    Measurement,
    OnProgress,
    TuneProgress,
    TuneResult,
    check_num_rounds,
    tune_file,
)
from jaxsync.workloads.verdict import MAX_SPREAD, MIN_GAIN


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
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
    add_job_arguments(tune)
    tune.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=DEFAULT_ROUNDS,
        help="rounds in which every plan is timed once; more tell smaller gains (default: %(default)s)",
    )


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
    """A bar on stderr, or lines, and what moves it."""
    with progress_bar(
        "getting ready",
        lambda bars: [
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.description}", markup=False),
            bars.TimeElapsedColumn(),
        ],
        "{completed}/{total} {description}",
        feature="The progress bar of jaxsync tune",
        total=None,
    ) as move:

        def show(progress: TuneProgress) -> None:
            move(completed=progress.done, total=progress.total, description=progress.doing)

        yield show


def format_tune_result(result: TuneResult) -> str:
    """The measurements and the verdict as comments, and the best `[sync]` table: TOML."""
    default = result.measurements[0]
    devices = f"{result.num_devices} {result.platform} devices"
    header = ["candidate", "buckets", "step", "compile", "rounds", "ratio to " + default.label]
    rows = [_tune_row(measurement, default) for measurement in result.measurements]
    title = f"jaxsync tune on {devices}, {result.steps_per_round} steps a round"
    table = format_table(header, rows).splitlines()
    comments = [title, *table, "", *_verdict(result), *_noise(result)]
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


def _noise(result: TuneResult) -> list[str]:
    if result.spread <= MAX_SPREAD:
        return []
    return [
        f"The machine was busy: the middle half of the rounds of {result.measurements[0].label} differ by "
        f"{_format_percent(result.spread)}.",
        "Step times would be others on an idle machine, and small gains may be hidden: run again when it is "
        "idle, or with more --repeats.",
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
        "spread": result.spread,
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
