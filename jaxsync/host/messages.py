"""What the state machine is told, and what it asks for: two closed unions.

Leaves are bits of an int, by their index in the plan, and devices are indices into the mesh: a set of ten
thousand leaves is one small number, and a message holds no array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A device announces the leaves of its coming step."""

    device: int
    leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A device hands over the gradients of some leaves."""

    device: int
    leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A device has submitted all of its step, and wants the result as `ticket`."""

    device: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The oldest launched bucket of a step that was unfinished has its result."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer:
    """A callback waits for its arrays, and answers `ticket`."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """A deferred callback has run, and its ticket was answered."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Something broke: `cause` numbers the exception, `devices` are those it came from."""

    cause: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: seconds on a clock that stands still while programs compile and callbacks run."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """No more: answer what is pending, and stop."""


Message = Register | Submit | Sync | Finish | Defer | Settle | Fail | Tick | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a client is broken. It stays so: the first cause wins, and every later call gets it.

    Attributes:
        kind: `"timeout"`: devices did not sync in time. `"stuck"`: a launched program did not finish in time.
            `"mismatch"`: devices announced different sets. `"missing"`: a device synced without a gradient
            it had announced. `"crash"`: an exception. `"closed"`: the client was closed.
        step: The step it happened in.
        devices: The devices at fault, as far as that is known.
        leaves: For each of `devices`, the leaves in question.
        cause: For `"crash"`, the number of the exception.
    """

    kind: Literal["timeout", "stuck", "mismatch", "missing", "crash", "closed"]
    step: int
    devices: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    cause: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Reduce these leaves of a bucket, over the gradients that all devices have handed over for a step."""

    step: int
    bucket: int
    leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A step is complete: `ticket` gets the result of `device`."""

    ticket: int
    step: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """`ticket` gets a failure."""

    ticket: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Nobody needs the gradients and results of a step any more; None: of no step."""

    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """A step has been incomplete for long: `leaves` are what each of `devices` still owes."""

    step: int
    devices: tuple[int, ...]
    leaves: tuple[int, ...]


Reason = Literal[
    "device", "leaf", "unannounced", "registered", "submitted", "ahead", "step", "ticket", "failed", "setup"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The message was wrong, and nothing has changed: its sender gets an error, and nobody else.

    Attributes:
        reason: `"device"`, `"leaf"`: there is no such one. `"unannounced"`: the device announced a set
            without these leaves. `"registered"`, `"submitted"`: it did that before. `"ahead"`: it would
            be two steps ahead. `"step"`: nothing is launched there. `"ticket"`: there is no such one.
            `"failed"`: the client is broken by `failure`. `"setup"`: it was made for another setup than the
            loop has; said by the loop, since the state machine has one only.
        leaves: The leaves in question.
        failure: For `"failed"`.
    """

    reason: Reason
    leaves: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The loop may end."""


Effect = Launch | Answer | Reject | Forget | Warn | Refuse | Stop


def bits(mask: int) -> tuple[int, ...]:
    """The indices a mask holds, ascending.

    >>> bits(0b1011)
    (0, 1, 3)
    """
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
