"""How a command ends early: an interrupt that gets through, and an output that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_AGAIN_S = 0.5  # an interrupt that was lost is noticed as late as this


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside it, Ctrl-C ends what is going on, even if Python drops the first `KeyboardInterrupt`.

    Python prints and drops exceptions of callbacks that it calls itself: of weak references, of finalisers,
    of the garbage collector, where JAX has a callback too. An interrupt that is delivered there would be
    lost, so it is raised again every half second until it is being handled.

    Threading: does nothing in other threads than the main one, and nothing if SIGINT is ignored, as in the
    background of a shell, or has a handler of somebody else's.

    >>> with interruptible():
    ...     signal.getsignal(signal.SIGINT) is signal.default_int_handler
    False
    """
    is_main = threading.current_thread() is threading.main_thread()
    if (
        not is_main
        or not hasattr(signal, "setitimer")
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt_again)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise KeyboardInterrupt


def _interrupt_again(number: int, frame: FrameType | None) -> None:
    # What is being handled here is what the code that the signal came upon is handling: a `finally` or an
    # `except` on the interrupt's way out may take its time, and is not to be interrupted itself.
    handled = sys.exception()
    while handled is not None:
        if isinstance(handled, KeyboardInterrupt):
            return
        handled = handled.__context__
    raise KeyboardInterrupt


def discard(stream: Any) -> None:
    """What is left in the stream's buffer goes nowhere: Python would try again, and complain, at its exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
