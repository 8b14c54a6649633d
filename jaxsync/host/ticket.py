"""Ticket: something that will be answered exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from jaxsync.errors import JaxsyncError, TicketTimeoutError, WrongThreadError
from jaxsync.fork import check_not_forked

T = TypeVar("T")
Resolve = Callable[[], T]  # makes the value, or raises, anew for each waiter

_SLICE_S = 0.05  # how long a waiter sleeps before it looks again: bounds what a lost wake-up can cost


class Ticket(Generic[T]):
    """A value that is not there yet. Made by `SyncClient`.

    Threading: any thread may wait, any number of times, and each gets the answer. A waiter that was
    interrupted or timed out may wait again. Waiting on the loop's own thread would never end, and is refused.
    """

    def __init__(self, what: str, *, poke: Callable[[], None], is_loop_thread: Callable[[], bool]) -> None:
        self.what = what
        self._poke = poke  # wakes the loop up, in case its wake-up was lost to an interrupt
        self._is_loop_thread = is_loop_thread
        self._resolve: Resolve[T] | None = None  # written once, by whoever answers
        # Held until the answer is there. A bare lock: its acquire can be interrupted and leaves nothing
        # behind, unlike a Condition's or an Event's.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._listeners: list[Callable[[], object]] = []
        self._is_observed = False

    def __repr__(self) -> str:
        return f"<Ticket {self.what}: {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether the answer is there, good or bad."""
        return self._resolve is not None

    def wait(self, timeout: float | None = None) -> T:
        """The answer.

        Threading: blocks the calling thread, not the interpreter: Ctrl-C ends the wait.

        Args:
            timeout: Seconds; None waits as long as the client's own timeouts let it.

        Raises:
            TicketTimeoutError: It was not answered in time. It can be waited for again.
            WrongThreadError: The caller is the loop's own thread, as in a callback.
            ForkedProcessError: The caller is a forked child.
            JaxsyncError: What the ticket was answered with.
        """
        if not self.wait_until_done(timeout):
            raise TicketTimeoutError(what_for=self.what, timeout_s=float(timeout or 0))
        return self._result()

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Waits for the answer without looking at it. Whether it is there.

        Threading: as `wait`.

        Args:
            timeout: Seconds; None waits as long as the client's own timeouts let it.
        """
        self._check_caller()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._resolve is None:
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left <= 0:
                return False
            self._poke()
            if self._pending.acquire(timeout=left):
                self._pending.release()  # for the next waiter; none depends on it for more than a slice
        return True

    def _result(self) -> T:
        assert self._resolve is not None  # for the type checker: every caller has waited
        self._is_observed = True
        return self._resolve()

    def __await__(self) -> Generator[Any, None, T]:
        """The answer, without blocking the event loop."""
        self._check_caller()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not ready.done():  # else the task was cancelled
                ready.set_result(None)

        self._listeners.append(lambda: loop.call_soon_threadsafe(settle))
        if not self.done():
            self._poke()
            yield from ready
        return self._result()

    def answer(self, resolve: Resolve[T]) -> None:
        """Gives the answer; a second one is ignored.

        Threading: for the loop, and for whoever closes it.
        """
        if self._resolve is not None:
            return
        self._resolve = resolve
        self._pending.release()
        for listener in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits there any more
                listener()

    @property
    def is_observed(self) -> bool:
        """Whether somebody has seen the answer."""
        return self._is_observed

    def _check_caller(self) -> None:
        check_not_forked("Ticket.wait")
        if not self.done() and self._is_loop_thread():
            raise WrongThreadError(function=f"waiting for {self.what}")


def raising(make_error: Callable[[], JaxsyncError]) -> Resolve[Any]:
    """An answer that is an error: a new instance for each waiter, so that none keeps another's frames."""

    def resolve() -> Any:
        raise make_error()

    return resolve
