"""How processes of a run ended, and what they left."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from jaxsync.host.recorder import Event

_SIGNAL_BASE = 128  # a shell's exit code for a process that a signal ended, less the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A process that a signal made stand still, as Ctrl-Z does.

    Attributes:
        by: The signal's number.
        at_s: Seconds since the start of the run.
    """

    by: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one process ended.

    Attributes:
        process: Its number.
        pid: Its process id.
        code: Its exit code; or, if a signal ended it, minus the signal's number.
        at_s: Seconds since the start of the run.
        told: The signals the launcher had sent it before, oldest first.
        stop: How it had been stopped, if it stood still when the run began to end.
        last_lines: The last lines of its output, stdout and stderr together.
        events: The last events it recorded, in seconds since the start of the run.
    """

    process: int
    pid: int
    code: int
    at_s: float
    told: tuple[int, ...] = ()
    stop: Stop | None = None
    last_lines: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def exit_code(self) -> int:
        """As shells have it: 128 and the signal, if a signal ended it."""
        return self.code if self.code >= 0 else shell_code(-self.code)

    @property
    def cause(self) -> str:
        """Such as `exit code 1` or `SIGKILL`."""
        return f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)

    @property
    def num_programs(self) -> int:
        """How many programs it has launched, as it recorded them."""
        return max((event.step or 0 for event in self.events if event.kind == "program"), default=0)

    @property
    def num_together(self) -> int:
        """How many programs that need every process it has launched, as it recorded them."""
        return next((event.together for event in reversed(self.events) if event.together is not None), 0)

    @property
    def num_finished(self) -> int:
        """How many of these it knew to be over."""
        return next((event.finished for event in reversed(self.events) if event.finished is not None), 0)


def shell_code(number: int) -> int:
    """The exit code that shells have for a process that a signal ended.

    >>> shell_code(9)
    137
    """
    return _SIGNAL_BASE + number


def signal_name(number: int) -> str:
    """Such as `SIGKILL`.

    >>> signal_name(9), signal_name(250)
    ('SIGKILL', 'signal 250')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
