"""The one thread of a client: performs what the state machine asks for, and tells it the time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from jaxsync.host.messages import Close, Effect, Fail, Message, Refuse, Stop, Tick
from jaxsync.host.state import Setup, State, step

# How long the thread sleeps before it looks again: while programs or arrays are awaited, while a step is
# open, and else. A message wakes it up at once; these bound what a wake-up lost to an interrupt can cost.
_BUSY_S, _OPEN_S, _IDLE_S = 0.0005, 0.02, 0.25
_GRACE_S = 2.0  # for callbacks that wait when nobody wants the loop any more


class Handler(Protocol):
    """What touches arrays: the loop itself knows none."""

    def perform(self, effect: Effect) -> None:
        """Does what the state machine asks for."""

    def poll(self) -> bool:
        """Looks at what is under way. Whether anything is left that should be looked at again soon."""

    def paused_s(self) -> float:
        """Seconds that do not count towards timeouts, since this thread itself spent them: compiling, say."""

    def crash(self, error: BaseException, effect: Effect | None = None) -> Message:
        """Takes note of an exception of the loop itself, and says what the state machine is told.

        Args:
            error: The exception.
            effect: What it kept from being performed.
        """


class Loop:
    """Serialises messages and runs the thread.

    `post` runs the state machine on the caller's thread, under a lock that is held for microseconds, so that
    a wrong message raises where it was sent. What is to be done is left to the thread.

    The state and the effects that are still to be performed are one tuple, replaced by one assignment. An
    interrupt on the main thread comes before it or after it; it can lose a wake-up, for which the thread
    looks by itself, and nothing else.
    """

    def __init__(self, handler: Handler, setup: Setup, name: str) -> None:
        self._handler = handler
        # Protects _cell. A bare lock, since an interrupt may strike while it is taken: `with` on it leaves it
        # neither held nor half-taken.
        self._lock = threading.Lock()
        self._cell: tuple[State, tuple[Effect, ...]] = (State(setup=setup), ())  # written under the lock
        # The last caller that took the lock. Written under it, before anything is called: a signal's handler
        # cannot run in between.
        self._holder: int | None = None
        self._late: queue.SimpleQueue[Message] = queue.SimpleQueue()  # what `tell` left to the thread
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put can be interrupted safely
        self._is_wanted: Callable[[], bool] = lambda: True  # written before the thread starts
        self._ends_s: float | None = None  # the thread's own
        # A daemon, or the interpreter would wait for it at exit; who closes the client joins it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Written by the thread. Not its own ident: once it has ended, another thread may be given the same.
        self._ident: int | None = None

    def start(self, is_wanted: Callable[[], bool] | None = None) -> None:
        """Starts the thread.

        Args:
            is_wanted: Asked by the thread, again and again: when it is False, the loop closes as soon as the
                callbacks have run, or after 2 s. So whoever drops the loop need not do anything that takes a
                lock, which the garbage collector may not, or that an interrupt may keep from being done.
        """
        if is_wanted is not None:
            self._is_wanted = is_wanted
        self._thread.start()

    @property
    def state(self) -> State:
        """The state as of now: immutable, so it can be read without the lock."""
        return self._cell[0]

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def is_loop_thread(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.get_ident() == self._ident

    def has_pending(self) -> bool:
        """Whether something is to be performed."""
        return bool(self._cell[1])

    def poke(self) -> None:
        """Makes the thread look at once."""
        self._wake.put(None)

    def post(
        self,
        message: Message,
        commit: Callable[[State], None] | None = None,
        setup: Setup | None = None,
    ) -> Refuse | None:
        """Tells the state machine `message`.

        Threading: any thread. Messages of one thread are taken in its order.

        Args:
            message: The message.
            commit: Called with the state before the message if it is accepted, before anybody can see that
                it was: keeps what belongs to the message.
            setup: What the message was made for, since its leaves mean nothing in another; None if it has
                none.

        Returns:
            The refusal, if the message was wrong.
        """
        me = threading.get_ident()
        with self._lock:
            self._holder = me
            before, pending = self._cell
            if setup is not None and before.setup is not setup:
                return Refuse(reason="setup")
            after, effects = step(before, message)
            if effects and isinstance(effects[0], Refuse):
                return effects[0]
            if commit is not None:
                commit(before)
            self._cell = (after, pending + effects)
        if effects:
            self._wake.put(None)
        return None

    def tell(self, message: Fail | Close) -> None:
        """As `post`, for what is never refused: also from a signal's handler.

        A handler runs on the main thread between two bytecodes, maybe in the middle of a `post` of that
        thread: then the lock is held until the handler returns, and the loop's thread posts in its place.
        """
        if self._holder == threading.get_ident() and self._lock.locked():
            self._late.put(message)
            self._wake.put(None)
        else:
            self.post(message)

    def reset(self, setup: Setup, commit: Callable[[], None]) -> bool:
        """Puts another setup in place, if no step is open and nothing is broken. Whether it did.

        Args:
            setup: The setup.
            commit: Called just before: keeps what belongs to the setup.
        """
        me = threading.get_ident()
        with self._lock:
            self._holder = me
            state, pending = self._cell
            if state.steps or state.failure is not None:
                return False
            commit()
            self._cell = (
                State(setup=setup, now_s=state.now_s, first=state.first, deferred=state.deferred),
                pending,
            )
        return True

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended. Whether it has."""
        if self._thread.ident is None:  # never started: an interrupt struck while the client was made
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            self._look_and_perform()
        finally:
            self._ident = None

    def _look_and_perform(self) -> None:
        start_s = time.monotonic()
        while True:
            try:
                while not self._late.empty():
                    self.post(self._late.get())
                if self._perform_pending():
                    return
                if self._is_over():
                    self.post(Close())
                is_busy = self._handler.poll()
                self.post(Tick(now_s=time.monotonic() - start_s - self._handler.paused_s()))
            except BaseException as error:  # nothing dies silently: whoever waits is told
                is_busy = False  # what is new wakes the thread up; what is not must not keep it spinning
                self._crash(error)
            self._sleep(is_busy)

    def _perform_pending(self) -> bool:
        """Performs what is to be done. Whether that was to stop."""
        with self._lock:
            state, effects = self._cell
            self._cell = (state, ())
        for effect in effects:
            if isinstance(effect, Stop):
                return True
            try:
                self._handler.perform(effect)
            except BaseException as error:  # the other effects are owed to others: they are performed
                self._crash(error, effect)
        return False

    def _crash(self, error: BaseException, effect: Effect | None = None) -> None:
        try:
            message = self._handler.crash(error, effect)
        except BaseException:  # the handler cannot even take note: waiters are still told that it broke
            message = Fail(cause=-1)
        self.post(message)

    def _sleep(self, is_busy: bool) -> None:
        seconds = _BUSY_S if is_busy else _OPEN_S if self.state.steps else _IDLE_S
        try:
            self._wake.get(timeout=seconds)
            while True:  # one look serves all wake-ups so far
                self._wake.get_nowait()
        except queue.Empty:
            return

    def _is_over(self) -> bool:
        """Whether nobody wants the loop, and its callbacks have run or had their time."""
        if self._is_wanted():
            return False
        now_s = time.monotonic()
        self._ends_s = now_s + _GRACE_S if self._ends_s is None else self._ends_s
        return not self.state.deferred or now_s >= self._ends_s

    def close(self) -> None:
        """Asks the thread to end; does not wait for it."""
        self.tell(Close())
        self.poke()
