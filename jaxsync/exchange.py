"""What a client's loop does: launches, answers, callbacks, and the errors that tell of a failure."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxsync.callbacks import Callbacks
from jaxsync.errors import ClosedError, JaxsyncError
from jaxsync.host.loop import Loop
from jaxsync.host.messages import (
    Answer,
    Effect,
    Fail,
    Failure,
    Finish,
    Forget,
    Launch,
    Message,
    Reject,
    Settle,
    Warn,
)
from jaxsync.host.recorder import Recorder
from jaxsync.host.state import announced_leaves
from jaxsync.host.ticket import Ticket, raising
from jaxsync.plan import SyncPlan
from jaxsync.reductions import Reductions
from jaxsync.registration import Registered, Registration

logger = logging.getLogger("jaxsync")


class Answered:
    """The answer to one ticket: its device's part of a step, kept for those who look again."""

    def __init__(self, plan: SyncPlan, blocks: dict[int, jax.Array]) -> None:
        self._lock = threading.Lock()  # two threads may wait for one ticket
        self._plan: SyncPlan | None = plan
        self._blocks = blocks
        self._tree: Any = None

    def __call__(self) -> Any:
        """The registered tree of synced gradients, None for leaves that took no part."""
        # Here and not on the loop's thread: the nodes of the tree may be classes of the user's. In this
        # order, so that an interrupt between two lines loses nothing.
        with self._lock:
            if self._plan is not None:
                leaves = [self._blocks.get(index) for index in range(len(self._plan.leaves))]
                self._tree = jax.tree.unflatten(self._plan.treedef, leaves)
                self._plan = None
            self._blocks = {}
            return self._tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """A ticket that is to be answered, and what was registered when it was given.

    A step is complete before its tickets are answered, and other parameters may be registered in between.
    """

    ticket: Ticket[Any]
    registered: Registered


class Exchange:
    """The handler of a client's loop.

    Threading: `perform` and `poll` run on the loop's thread. Callers' threads add tickets and causes, each
    before the message that tells of them, and never change what is there; every such change is one operation
    on a dict. Gradients and callbacks have rules of their own.
    """

    def __init__(self, registration: Registration, devices: Sequence[jax.Device], recorder: Recorder) -> None:
        self.devices = tuple(devices)
        self.recorder = recorder
        self.promised: dict[int, Promised] = {}
        self.causes: dict[int, BaseException] = {}
        self.callbacks = Callbacks(recorder)
        self.reductions = Reductions(registration, devices, recorder, self._announced)
        self._registration = registration
        self._completed = registration.now  # of the step that is being answered; loop thread only
        self._num_steps = 0  # loop thread only
        self._numbers = itertools.count()  # `next` of it is atomic
        self.loop = Loop(self, registration.now.setup, "jaxsync-loop")

    def next_number(self) -> int:
        """A number for a ticket or a cause."""
        return next(self._numbers)

    def counts(self) -> dict[str, int]:
        """What has happened since the start."""
        return {
            "submissions": self.reductions.num_submitted,
            "launches": self.reductions.num_launched,
            "bytes": self.reductions.num_bytes,
            "steps": self._num_steps,
            "callbacks": self.callbacks.num_run,
        }

    def fail(self, error: BaseException, devices: tuple[int, ...] = ()) -> None:
        """Fails everything that is pending, and every later call, with `error` as the cause.

        Threading: any thread, and a signal's handler. The first cause wins.
        """
        cause = self._note_cause(error)
        self.loop.tell(Fail(cause=cause, devices=devices))
        failure = self.loop.state.failure
        if failure is not None and failure.cause != cause:  # nobody will ask for it, and it holds frames
            self.causes.pop(cause, None)

    def _note_cause(self, error: BaseException) -> int:
        """The number under which the state machine knows an exception."""
        number = self.next_number()
        self.causes[number] = error
        return number

    def crash(self, error: BaseException, effect: Effect | None = None) -> Message:
        """What the state machine is told of an exception of the loop itself."""
        traceback.clear_frames(error.__traceback__)  # they hold gradients, and the exception is kept
        self.reductions.give_up()
        cause = self._note_cause(error)
        if isinstance(effect, Answer | Reject) and (promised := self.promised.pop(effect.ticket, None)):
            # The state machine counts it as answered: nobody else would answer it.
            failure = (
                effect.failure
                if isinstance(effect, Reject)
                else Failure(kind="crash", step=effect.step, cause=cause)
            )
            self._reject(promised.ticket, failure)
        return Fail(cause=cause)

    def paused_s(self) -> float:
        """Seconds spent launching (so compiling, too) and in callbacks: what waits for those is not late."""
        return self.reductions.paused_s + self.callbacks.paused_s

    def perform(self, effect: Effect) -> None:
        """Does what the state machine asks for."""
        match effect:
            case Launch():
                self.reductions.add(effect)
            case Answer():
                self._answer(effect)
            case Reject():
                if effect.failure.kind == "closed":
                    self.callbacks.clear()
                if (promised := self.promised.pop(effect.ticket, None)) is not None:  # else its callback ran
                    self._reject(promised.ticket, effect.failure)
                self.recorder.record("reject", step=effect.failure.step, what=effect.failure.kind)
            case Forget(step=None):
                self.reductions.forget_all()
            case Forget(step=int(step)):
                self.reductions.forget(step, self._completed)
                self._num_steps += 1
            case Warn():
                now = self._registration.now
                text = now.explainer.warning(effect, now.plan.config.stall_warning_s)
                logger.warning("%s", text)
                self.recorder.record("stall", step=effect.step, what=text)

    def poll(self) -> bool:
        """Looks at what is under way: results, gradients that became ready, callbacks."""
        while self.reductions.advance(self._finish):
            pass
        while self.callbacks.run_next(self._settle):
            if self.loop.has_pending():
                break  # launches and answers first, and the end of the client
        return self.reductions.is_busy() or len(self.callbacks) > 0

    def error(self, failure: Failure, function: str) -> JaxsyncError:
        """The error for a failure as `function` raises it: a new one each time, with its cause attached."""
        cause = self.causes.get(-1 if failure.cause is None else failure.cause)
        if isinstance(cause, JaxsyncError):
            again = copy.copy(cause)  # it says itself what happened
            again.__cause__ = cause.__cause__
            return again
        reason = f"{type(cause).__name__} was raised" if cause is not None else ""
        error = self._registration.now.explainer.failure(
            failure,
            function,
            events=self.recorder.format(),
            record=self.recorder.to_json(),
            reason=reason,
        )
        error.__cause__ = cause
        return error

    def _reject(self, ticket: Ticket[Any], failure: Failure) -> None:
        what = ticket.what  # an answer that held its ticket would be a cycle

        def make_error() -> JaxsyncError:
            error = self.error(failure, "Ticket.wait")
            if isinstance(error, ClosedError):
                error.pending = (what, *error.pending)
            return error

        ticket.answer(raising(make_error))

    def _answer(self, effect: Answer) -> None:
        blocks = self.reductions.blocks(effect.step, effect.device)
        promised = self.promised.pop(effect.ticket)
        self._completed = promised.registered  # before the step is forgotten, as each has answers
        promised.ticket.answer(Answered(promised.registered.plan, blocks))
        self.recorder.record("answer", step=effect.step, device=effect.device)

    def _announced(self, step: int) -> int:
        return announced_leaves(self.loop.state, step)

    def _finish(self, step: int) -> None:
        self.loop.post(Finish(step=step))

    def _settle(self, number: int) -> None:
        # Refused if the client was closed meanwhile, or an interrupt struck in the middle of defer.
        self.loop.post(Settle(ticket=number))
        self.promised.pop(number, None)
