"""Who stood still while the others waited: as the launcher saw it, or as the recorded events tell it.

A process that stands still is seldom the first to end: the others give it up, each after its own bound, and
one of those is first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxsync.host.peers import sign_of_loss
from jaxsync.multiprocess.ending import Ending, signal_name


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

    >>> died = Ending(process=1, pid=7, code=1, at_s=9.0, last_lines=("Gloo: Connection closed by peer",))
    >>> what_was_lost(died)
    'its connection broke'
    """
    return next(filter(None, map(sign_of_loss, reversed(first.last_lines))), "")


def find_standstills(endings: Sequence[Ending], first: Ending | None) -> tuple[Standstill, ...]:
    """The processes that stood still; none if that cannot be told for sure.

    Pure. One that a signal had stopped when the run began to end. Else, if the first that failed says that it
    lost another, those that had launched the fewest programs, and nothing after the last of them while all
    others went on: every process launches the same programs, and each of the others needs theirs to go on.

    Args:
        endings: Of all processes.
        first: The first that failed by itself; None if the launcher was stopped.
    """
    stopped = tuple(_stopped(ending) for ending in endings if ending.stop is not None)
    if stopped or first is None or not what_was_lost(first):
        return stopped
    fewest = min(ending.num_programs for ending in endings)
    behind = [ending for ending in endings if ending.num_programs == fewest]
    others = [ending for ending in endings if ending.num_programs > fewest]
    # One that launches programs of its own, too, has a higher count: then time says something else.
    is_sure = others and first in others and max(map(_last_s, behind)) < min(map(_last_s, others))
    return tuple(_behind(ending, others, first) for ending in behind) if is_sure else ()


def format_standstills(standstills: Sequence[Standstill]) -> str:
    """What is said of them; empty if there are none."""
    return "; ".join(f"process {found.process} {found.reason}" for found in standstills)


def _stopped(ending: Ending) -> Standstill:
    assert ending.stop is not None  # for the type checker
    reason = f"stood still, stopped by {signal_name(ending.stop.by)} {ending.stop.at_s:.2f} s after the start"
    if ending.num_programs:
        reason += f", when it had launched {_count(ending.num_programs)}"
    return Standstill(process=ending.process, reason=reason)


def _behind(ending: Ending, others: Sequence[Ending], first: Ending) -> Standstill:
    counts = sorted({other.num_programs for other in others})
    theirs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    reason = f"stood still, having launched {_count(ending.num_programs)} where the others had {theirs}"
    return Standstill(process=ending.process, reason=f"{reason}; {' and '.join(_state(ending, first))}")


def _state(ending: Ending, first: Ending) -> Iterator[str]:
    if ending.events:
        yield f"the last it did was {_last_s(ending):.2f} s after the start"
    if ending.told:
        yield f"it still ran when process {first.process} gave it up"
    else:
        yield f"it ended by {ending.cause} {ending.at_s:.2f} s after the start"


def _count(num_programs: int) -> str:
    return f"{num_programs} program" if num_programs == 1 else f"{num_programs or 'no'} programs"


def _last_s(ending: Ending) -> float:
    return ending.events[-1].at_s if ending.events else 0.0
