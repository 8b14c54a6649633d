"""What is left of a run of several processes: who ended first, who stood still, their last words, events."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsync.host.recorder import event_facts, format_events
from jaxsync.multiprocess.differences import name_processes
from jaxsync.multiprocess.ending import Ending, shell_code, signal_name
from jaxsync.multiprocess.standstill import (
    Standstill,
    find_standstills,
    format_standstills,
    what_was_lost,
)
from jaxsync.report import format_table

_USAGE_ERROR = 2  # of argparse, of Python if there is no such script, and of jaxsync if a job cannot run
_TEXT_EVENTS = 5  # of each process in the text; JSON has all that were kept
_JSON_EVENTS = 50
_MAX_PROCESSES = 8  # whose events the text shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of all processes, from the first to the end of the last.

    Attributes:
        restart: 0 for the first run, 1 for the first restart.
        endings: In the order in which the processes ended.
        took_s: Until all had ended.
        stopped_by: The signal that the launcher itself got, if it did.
    """

    restart: int
    endings: tuple[Ending, ...]
    took_s: float
    stopped_by: int | None = None

    @property
    def first_failure(self) -> Ending | None:
        """The first process that failed of its own, and not because the launcher ended it."""
        return next((ending for ending in self.endings if ending.code and not ending.told), None)

    @property
    def standstills(self) -> tuple[Standstill, ...]:
        """The processes that stood still while others waited for them."""
        return find_standstills(self.endings, self.first_failure)

    @property
    def exit_code(self) -> int:
        """That of the first process that failed; else 128 and the signal that stopped the launcher; else 0.

        >>> died = Ending(process=1, pid=7, code=-9, at_s=1.0)
        >>> ended = Ending(process=0, pid=6, code=-2, at_s=2.0, told=(2,))
        >>> Run(restart=0, endings=(died, ended), took_s=2.0).exit_code
        137
        >>> Run(restart=0, endings=(ended,), took_s=2.0, stopped_by=2).exit_code
        130
        """
        if self.first_failure is not None:
            return self.first_failure.exit_code
        return 0 if self.stopped_by is None else shell_code(self.stopped_by)


def should_restart(run: Run, max_restarts: int) -> bool:
    """Whether a run is followed by another: a process failed, nobody stopped the launcher, and one is left.

    Not after exit code 2, which says that the command makes no sense: it would not the next time.
    """
    first = run.first_failure
    has_failed = first is not None and first.code != _USAGE_ERROR and run.stopped_by is None
    return has_failed and run.restart < max_restarts


def format_run(run: Run) -> str:
    """The report of a run that did not end well."""
    return "\n\n".join(_parts(run))


def _parts(run: Run) -> Iterator[str]:
    first, still = run.first_failure, {found.process for found in run.standstills}
    verdict = _verdict(run)
    yield "\n".join(filter(None, [_headline(run), verdict]))
    yield format_table(
        ["process", "ended by", "at", "the launcher had sent"], [_row(ending) for ending in run.endings]
    )
    if ended := _ended_for(run):
        yield ended
    # First who is to be looked at first: only so many processes are shown.
    endings = sorted(run.endings, key=lambda ending: (ending is not first, ending.process not in still))
    for ending in endings:
        if ending is first or ending.process in still:
            yield _section(
                f"The last output of process {ending.process}:", "\n".join(ending.last_lines) or "none"
            )
    with_events = [ending for ending in endings if ending.events]
    for ending in with_events[:_MAX_PROCESSES]:
        table = format_events(ending.events[-_TEXT_EVENTS:])
        yield _section(f"The last events of process {ending.process}, since the start:", table)
    if len(with_events) > _MAX_PROCESSES:
        yield f"And those of {len(with_events) - _MAX_PROCESSES} processes more: --json has them."
    if verdict and with_events:  # the end of a long text is what a terminal shows
        yield verdict


def _headline(run: Run) -> str:
    first = run.first_failure
    if first is None:
        by = "itself" if run.stopped_by is None else signal_name(run.stopped_by)
        return f"the run was ended by {by} after {run.took_s:.2f} s; exit code {run.exit_code}."
    return (
        f"process {first.process} (pid {first.pid}) ended first, by {first.cause}, "
        f"{first.at_s:.2f} s after the start; exit code {run.exit_code}."
    )


def _verdict(run: Run) -> str:
    """Who kept the others waiting, if somebody did; empty if nobody is known to have."""
    first, text = run.first_failure, format_standstills(run.standstills)
    lost = "" if first is None else what_was_lost(first)
    if first is None or not lost:
        return f"Meanwhile {text}." if text else ""
    if text:
        return f"process {first.process} had waited for another one: {text}."
    gone = [ending for ending in run.endings if ending.at_s < first.at_s]
    which = ", ".join(f"process {ending.process} had ended by {ending.cause}" for ending in gone)
    which = which or "which is not known here, but its last output may tell"
    return f"process {first.process} had lost another one ({lost}): {which}."


def _ended_for(run: Run) -> str:
    """Which processes the launcher told to end since another had failed; empty if none."""
    first = run.first_failure
    told = sorted(ending.process for ending in run.endings if ending.told)
    if first is None or run.stopped_by is not None or not told:
        return ""
    return (
        f"The launcher told {name_processes(told)} to end, since process {first.process} had failed: what "
        f"{'it says' if len(told) == 1 else 'they say'} of SIGINT (KeyboardInterrupt) is no failure."
    )


def _row(ending: Ending) -> list[str]:
    told = ", ".join(map(signal_name, ending.told))
    return [str(ending.process), ending.cause, f"{ending.at_s:.2f} s", told or "nothing"]


def _section(title: str, text: str) -> str:
    return f"{title}\n{textwrap.indent(text, '  ')}"


def runs_as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """What `jaxsync launch --json` prints: the last run's exit code, and every run."""
    return {
        "exit_code": runs[-1].exit_code,
        "num_restarts": runs[-1].restart,
        "runs": [_run_as_json(run) for run in runs],
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    first = run.first_failure
    return {
        "restart": run.restart,
        "exit_code": run.exit_code,
        "first_failure": None if first is None else first.process,
        "stood_still": [found.process for found in run.standstills],
        "stopped_by": None if run.stopped_by is None else signal_name(run.stopped_by),
        "took_s": round(run.took_s, 3),
        "processes": [_ending_as_json(ending) for ending in run.endings],
    }


def _ending_as_json(ending: Ending) -> dict[str, Any]:
    return {
        "process": ending.process,
        "pid": ending.pid,
        "exit_code": ending.exit_code,
        "signal": signal_name(-ending.code) if ending.code < 0 else None,
        "at_s": round(ending.at_s, 3),
        "told": [signal_name(number) for number in ending.told],
        "stopped_by": None if ending.stop is None else signal_name(ending.stop.by),
        "last_lines": list(ending.last_lines),
        "events": [event_facts(event) for event in ending.events[-_JSON_EVENTS:]],
    }
