"""Who stood still while the others waited: as the launcher saw it, or as the recorded events tell it.

A process that stands still is seldom the first to end: the others give it up, each after its own bound, and
one of those is first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxsync.host.peers import is_late, sign_of_loss
from jaxsync.multiprocess.ending import Ending, signal_name
from jaxsync.report import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A process that did not come to where the others waited.

    Attributes:
        process: Its number.
        reason: What is known of it, after "process 2 ".
    """

    process: int
    reason: str


def what_was_lost(first: Ending) -> str:
    """What the first process that failed says of another one, as its last lines have it; empty if nothing.

    >>> line = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
    >>> what_was_lost(Ending(process=1, pid=7, code=1, at_s=9.0, last_lines=(line,)))
    'its connection broke'
    """
    return sign_of_loss(first.last_lines, is_abort=first.code == -signal.SIGABRT)


def find_standstills(endings: Sequence[Ending], first: Ending | None) -> tuple[Standstill, ...]:
    """The processes that stood still; none if that cannot be told for sure.

    Pure. Those that a signal had stopped when the run began to end. Else, if the first that failed gave up a
    collective for which another did not come: the one that had not launched the program it waited for.

    That is sure of one alone. All launch the same programs that need every process, in one order, and none of
    these ends before all have launched it. The first that failed waited for one of those that it did not know
    to be over. A process that had launched just those that were over waits for none of them; nor for anything
    else that all do together, since all others, which have launched the next one, are past it. How far a
    process is behind another says nothing: one that awaits each program is behind by nature.

    Args:
        endings: Of all processes.
        first: The first that failed by itself; None if the launcher was stopped.
    """
    stopped = tuple(_stopped(ending) for ending in endings if ending.stop is not None)
    if stopped or first is None or not is_late(what_was_lost(first)):
        return stopped
    behind = [ending for ending in endings if ending.num_together <= first.num_finished]
    others = [ending for ending in endings if ending.num_together > first.num_finished]
    is_sure = first in others and len(behind) == 1 and _is_known_idle(behind[0], first.num_finished)
    return (_behind(behind[0], others, first),) if is_sure else ()


def format_standstills(standstills: Sequence[Standstill]) -> str:
    """What is said of them; empty if there are none."""
    return "; ".join(f"process {found.process} {found.reason}" for found in standstills)


def _is_known_idle(ending: Ending, num_finished: int) -> bool:
    """Whether it surely waited for none of the programs that need every process."""
    # Without events nothing is known of it, nor while it launches what may be one of those programs.
    is_known = bool(ending.events) and ending.events[-1].together is not None
    return is_known and ending.num_together == num_finished


def _stopped(ending: Ending) -> Standstill:
    assert ending.stop is not None  # for the type checker
    reason = f"stood still, stopped by {signal_name(ending.stop.by)} {ending.stop.at_s:.2f} s after the start"
    if ending.num_programs:
        reason += f", when it had launched {_count(ending.num_programs)}"
    return Standstill(process=ending.process, reason=reason)


def _behind(ending: Ending, others: Sequence[Ending], first: Ending) -> Standstill:
    counts = sorted({other.num_together for other in others})
    theirs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    count = _count(ending.num_together)
    reason = f"stood still, having launched {count} that all launch, where the others had {theirs}"
    return Standstill(process=ending.process, reason=f"{reason}; {' and '.join(_state(ending, first))}")


def _state(ending: Ending, first: Ending) -> Iterator[str]:
    yield f"the last it recorded was {ending.events[-1].at_s:.2f} s after the start"
    if ending.told:
        yield f"it still ran when process {first.process} gave it up"
    else:
        yield f"it ended by {ending.cause} {ending.at_s:.2f} s after the start"


def _count(num_programs: int) -> str:
    return format_count(num_programs, "program") if num_programs else "no programs"
