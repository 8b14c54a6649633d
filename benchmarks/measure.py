"""What the benchmarks share: interleaved timing, medians with their spread, tables, machine facts."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxsync.report import format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The quartiles of some samples, in the samples' unit."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """
        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
        Spread(lower=2.0, median=3.0, upper=4.0)
        """
        lower, median, upper = np.quantile(samples, (0.25, 0.5, 0.75))
        return cls(lower=float(lower), median=float(median), upper=float(upper))

    def __str__(self) -> str:
        return f"{three_digits(self.median)} ({three_digits(self.lower)} to {three_digits(self.upper)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was measured.

    Attributes:
        target: Its id and what it asks for.
        row: Where it was measured.
        value: What was measured.
        limit: What is asked for.
        at_least: Whether `limit` is the least that will do; else it is the most.
    """

    target: str
    row: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        fields = ("target", "row", "value", "limit", "at_least")
        return {name: getattr(self, name) for name in fields} | {"is_met": self.is_met}

    def cells(self) -> list[str]:
        limit = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return [self.target, self.row, three_digits(self.value), limit, "met" if self.is_met else "MISSED"]


VERDICT_HEADER = ["target", "where", "measured", "limit", "verdict"]


def three_digits(value: float) -> str:
    """
    >>> three_digits(0.12345), three_digits(12.345), three_digits(1234.5)
    ('0.123', '12.3', '1234')
    """
    digits = max(0, 2 - int(np.floor(np.log10(abs(value))))) if value else 0
    return f"{value:.{min(digits, 6)}f}"


def timed(run: Callable[[], Any], *, scale: float = 1e3) -> float:
    """How long a call takes, in milliseconds."""
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * scale


def interleave(
    forms: Mapping[str, Callable[[], float]], rounds: int, *, budget_s: float | None = None, least: int = 3
) -> dict[str, list[float]]:
    """The samples of each form, one from each round.

    A round starts with another form each time, so that none always follows the same one. Rounds end early,
    but not before `least`, when `budget_s` is spent.
    """
    samples: dict[str, list[float]] = {name: [] for name in forms}
    names, start_s = list(forms), time.perf_counter()
    for index in range(rounds):
        if budget_s is not None and index >= least and time.perf_counter() - start_s > budget_s:
            break
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(forms[name]())
    return samples


def median_of(repeats: int, run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(repeats))


def give_back_memory() -> None:
    """Returns freed memory to the system, where the C library can.

    glibc keeps freed blocks of up to 32 MiB in an arena for each thread. The parameters of large models are
    made of such blocks: without this, states that were dropped long ago filled 13 GiB.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "jaxlib", "numpy")},
    }


def print_result(name: str, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """One JSON object on stdout, as `report.py` reads it."""
    print(json.dumps({"benchmark": name, "machine": machine(), "settings": dict(settings), **result}))


def fill_in(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Gives arguments that are None their defaults, which depend on other arguments."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def publish(
    name: str,
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    judged: Sequence[Verdict],
    show: Callable[[], None],
    *,
    as_json: bool,
) -> None:
    """Prints the result with the verdicts as JSON; or as tables, of which `show` prints the first."""
    if as_json:
        print_result(name, settings, {**result, "targets": [verdict.as_dict() for verdict in judged]})
        return
    show()
    if judged:
        print_verdicts(judged)


def exit_status(failed: Mapping[str, str]) -> int:
    """1 if rows failed, which are then named on stderr; else 0."""
    for name, error in failed.items():
        print(f"{name} failed. {error}", file=sys.stderr)
    return 1 if failed else 0


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(format_table(header, rows) + "\n")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    print_table(VERDICT_HEADER, [verdict.cells() for verdict in verdicts])


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done and counts it, on stderr if that is a terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=f"{title}: {what}", advance=1)

        yield advance


class WorkerError(Exception):
    """A worker process did not end well; the text is the end of what it wrote to stderr."""


def run_worker(script: str, arguments: Sequence[str]) -> Any:
    """The JSON that a fresh process of `script` prints. The number of devices is fixed when JAX starts.

    Raises:
        WorkerError: It ended with another status than 0.
    """
    command = [sys.executable, script, "--worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)
