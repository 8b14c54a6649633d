"""The callbacks that a client runs on the host once their arrays are ready."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxsync.crossing import is_ready
from jaxsync.errors import ArgumentError, CallbackError
from jaxsync.host.recorder import Recorder
from jaxsync.host.ticket import Ticket, raising
from jaxsync.multiprocess.values import is_whole

_MAX_WAITING = 1000  # beyond it, defer waits for the oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A callback and the arrays it waits for."""

    number: int
    ticket: Ticket[Any]
    callback: Callable[..., Any]
    arrays: tuple[Any, ...]


class Callbacks:
    """The callbacks of one client, in order.

    Threading: `run_next` and `clear` run on the loop's thread. Callers' threads add callbacks, each before
    the message that tells of it, and wait; every change is one operation on a deque or list.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.num_run = 0  # loop thread only, as is the next
        self.paused_s = 0.0  # spent in callbacks
        self._recorder = recorder
        self._waiting: deque[Deferred] = deque()  # the first may be running
        self._errors: list[tuple[Ticket[Any], str, BaseException]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, deferred: Deferred) -> None:
        """Puts a callback in line."""
        self._waiting.append(deferred)

    def clear(self) -> None:
        """Lets go of those that wait: nobody runs them any more, and they hold arrays."""
        self._waiting.clear()

    def is_full(self) -> bool:
        """Whether the next one should wait for the oldest."""
        return len(self._waiting) >= _MAX_WAITING

    def wait_for_first(self) -> None:
        """Waits until the oldest has run, or the client was closed."""
        with contextlib.suppress(IndexError):  # the loop took it meanwhile
            self._waiting[0].ticket.wait_until_done()

    def wait_for_last(self, timeout_s: float) -> None:
        """Waits until all that wait by now have run: they run in order."""
        with contextlib.suppress(IndexError):  # the loop took it meanwhile
            self._waiting[-1].ticket.wait_until_done(timeout_s)

    def take_unseen(self) -> list[tuple[str, BaseException]]:
        """What callbacks have raised whose tickets nobody looked at: each once, however many ask at once."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._errors.pop(0))
        return [(name, error) for ticket, name, error in taken if not ticket.is_observed]

    def run_next(self, settle: Callable[[int], None]) -> bool:
        """Runs the first, if its arrays are ready. Whether it did.

        Args:
            settle: Told the number of the callback when it has run, before its ticket is answered.
        """
        if not self._waiting or not all(map(is_ready, _device_arrays(self._waiting[0].arrays))):
            return False
        self._run(self._waiting[0], settle)
        return True

    def _run(self, deferred: Deferred, settle: Callable[[int], None]) -> None:
        name = name_callback(deferred.callback)
        start_s = time.monotonic()
        try:
            value = deferred.callback(*jax.device_get(deferred.arrays))
        except BaseException as error:
            _forget_frames(error)
            self._errors.append((deferred.ticket, name, error))
            answer = raising(functools.partial(_callback_error, name, error))
        else:
            answer = lambda: value  # noqa: E731
        took_s = time.monotonic() - start_s
        self.paused_s += took_s
        self.num_run += 1
        self._recorder.record("callback", what=name, took_s=took_s)
        settle(deferred.number)
        deferred.ticket.answer(answer)  # all the same, once: it ran, and somebody may wait for it
        self._waiting.popleft()
        del deferred  # the frames of its exception lead to this one, and are kept for longer than its arrays


def name_callback(callback: Callable[..., Any]) -> str:
    """What a callback is called. Never its repr: that may hold arrays, and would wait for their values.

    >>> name_callback(functools.partial(print, 1))
    'print'
    """
    while isinstance(callback, functools.partial):
        callback = callback.func
    name = getattr(callback, "__qualname__", None)
    return name if isinstance(name, str) else type(callback).__qualname__


def check_in_reach(arrays: Any) -> None:
    """Refuses arrays of which this process cannot see all.

    Raises:
        ArgumentError: Names each of them.
    """
    hidden = [
        f"arrays{jax.tree_util.keystr(path)}"
        for path, x in jax.tree_util.tree_leaves_with_path(arrays)
        if isinstance(x, jax.Array) and not is_whole(x)
    ]
    if hidden:
        wanted = "arrays of this process, or replicated ones: gather what is sharded over processes"
        raise ArgumentError(
            function="SyncClient.defer", argument="arrays", got=", ".join(hidden), wanted=wanted
        )


def do_nothing() -> None:
    """What a callback for the first process is in the others."""


def _callback_error(name: str, cause: BaseException) -> CallbackError:
    error = CallbackError(callbacks=(f"{name}: {type(cause).__name__}",))
    error.__cause__ = cause
    return error


def _forget_frames(error: BaseException) -> None:
    """Lets go of the arrays in the frames that an exception came through: it is kept longer than they."""
    traceback.clear_frames(error.__traceback__)
    if error.__traceback__ is not None:  # the first frame is the caller's, which runs and so keeps its own
        error.__traceback__ = error.__traceback__.tb_next


def _device_arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not x.is_deleted()]
