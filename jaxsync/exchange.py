"""What a client's loop does with arrays: gradients of single devices in, reduced gradients out."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import operator
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxsync.buckets import Bucket
from jaxsync.crossing import assemble, sync_program, take_out
from jaxsync.errors import CallbackError, ClosedError, JaxsyncError
from jaxsync.host.explain import Explainer
from jaxsync.host.launcher import process_launcher, resolve_window
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
    bits,
)
from jaxsync.host.peers import peer_error
from jaxsync.host.recorder import Recorder
from jaxsync.host.ticket import Ticket, raising
from jaxsync.multiprocess.agreement import mesh_processes
from jaxsync.multiprocess.consent import Consent
from jaxsync.placement import concrete_mesh, local_devices
from jaxsync.plan import SyncPlan
from jaxsync.submission import Intake

logger = logging.getLogger("jaxsync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A launched program: its buckets, its leaves by plan index, and the reduced array of each."""

    step: int
    buckets: tuple[int, ...]
    leaves: tuple[int, ...]
    outputs: list[jax.Array]
    launched_s: float


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
class Deferred:
    """A callback and the arrays it waits for."""

    number: int
    ticket: Ticket[Any]
    callback: Callable[..., Any]
    arrays: tuple[Any, ...]


class Exchange:
    """The handler of a client's loop.

    Threading: `perform` and `poll` run on the loop's thread. Callers' threads add gradients, tickets and
    callbacks, each before the message that tells of them, and never change what is there; every such change
    is one operation on a dict or deque.
    """

    def __init__(self, plan: SyncPlan, recorder: Recorder) -> None:
        self.recorder = recorder
        self.tickets: dict[int, Ticket[Any]] = {}
        self.deferred: deque[Deferred] = deque()
        self.causes: dict[int, BaseException] = {}
        self.callback_errors: list[tuple[Ticket[Any], str, BaseException]] = []
        self.counts = dict.fromkeys(("submissions", "launches", "bytes", "steps", "callbacks"), 0)
        self.post: Callable[[Message], Any] = lambda message: None  # the loop's, once there is one
        self.has_pending: Callable[[], bool] = lambda: False  # the loop's too
        self.announced: Callable[[int], int] = lambda step: 0  # the leaves of an open step, as the loop knows
        self._numbers = itertools.count()
        self._gradients: dict[
            tuple[int, int], dict[int, jax.Array]
        ] = {}  # (step, device) -> leaf -> gradient
        self._results: dict[int, list[dict[int, jax.Array]]] = {}  # step -> device -> leaf -> its block
        self._waiting: deque[Launch] = deque()  # loop thread only, as are the next two
        self._running: deque[Running] = deque()
        self._paused_s = 0.0
        self._last_launched = -1  # step; loop thread only, as is the next
        # The leaves that all processes took part with in the step before; None if they must say so first.
        self._agreed: int | None = None
        self.use(plan)

    def use(self, plan: SyncPlan) -> None:
        """Takes another plan, while no step is open."""
        self.plan = plan
        self.mesh = concrete_mesh(plan)
        self.devices = local_devices(self.mesh)
        # By what callers name a device, the device itself or its index in the mesh -> its index here. Made as
        # a whole, since an interrupt between two lines must leave callers the old one.
        places = {device: place for place, device in enumerate(self.mesh.devices.flat)}
        named = enumerate(self.devices)
        self.index_of: dict[Any, int] = {
            name: index for index, device in named for name in (device, places[device])
        }
        self.is_first = jax.process_index() == mesh_processes(self.mesh)[0]
        self.consent = Consent(plan, self.mesh, {})
        self._agreed = functools.reduce(operator.or_, map(_mask, plan.buckets), 0)  # as registered
        self._window = resolve_window(plan.config.max_in_flight, self.devices[0].platform)
        self._is_wide = any(bucket.dtype in ("float64", "complex128") for bucket in plan.buckets)
        self.intake = Intake(plan, self.devices)
        self.explainer = Explainer(
            devices=tuple(str(device) for device in self.devices),
            paths=tuple(leaf.path for leaf in plan.leaves),
            timeout_s=plan.config.timeout_s,
        )

    def next_number(self) -> int:
        """A number for a ticket or a cause."""
        return next(self._numbers)

    def keep(self, step: int, device: int, gradients: Mapping[int, jax.Array]) -> None:
        """Holds gradients until their bucket is launched."""
        self._gradients.setdefault((step, device), {}).update(gradients)
        self.counts["submissions"] += len(gradients)

    def note_cause(self, error: BaseException) -> int:
        """The number under which the state machine knows an exception."""
        number = self.next_number()
        self.causes[number] = error
        return number

    def take_errors(self) -> list[tuple[Ticket[Any], str, BaseException]]:
        """What callbacks have raised: each once, however many ask at once."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self.callback_errors.pop(0))
        return taken

    def crash(self, error: BaseException, effect: Effect | None = None) -> Message:
        """What the state machine is told of an exception of the loop itself."""
        traceback.clear_frames(error.__traceback__)  # they hold gradients, and the exception is kept
        self._waiting.clear()
        self._running.clear()
        cause = self.note_cause(error)
        if isinstance(effect, Answer | Reject) and (ticket := self.tickets.pop(effect.ticket, None)):
            # The state machine counts it as answered: nobody else would answer it.
            failure = (
                effect.failure
                if isinstance(effect, Reject)
                else Failure(kind="crash", step=effect.step, cause=cause)
            )
            ticket.answer(self._rejection(failure, ticket.what))
        return Fail(cause=cause)

    def paused_s(self) -> float:
        """Seconds spent launching (so compiling, too) and in callbacks: what waits for those is not late."""
        return self._paused_s

    def perform(self, effect: Effect) -> None:
        """Does what the state machine asks for."""
        match effect:
            case Launch():
                self._waiting.append(effect)
            case Answer():
                self._answer(effect)
            case Reject():
                if effect.failure.kind == "closed":
                    self.deferred.clear()  # nobody runs them any more, and they hold arrays
                if (ticket := self.tickets.pop(effect.ticket, None)) is not None:  # else its callback ran
                    ticket.answer(self._rejection(effect.failure, ticket.what))
                self.recorder.record("reject", step=effect.failure.step, what=effect.failure.kind)
            case Forget():
                self._forget(effect.step)
            case Warn():
                text = self.explainer.warning(effect, self.plan.config.stall_warning_s)
                logger.warning("%s", text)
                self.recorder.record("stall", step=effect.step, what=text)

    def poll(self) -> bool:
        """Looks at what is under way: results, gradients that became ready, callbacks."""
        while self._finish_or_launch():
            pass
        while self.deferred and all(map(_is_ready, _device_arrays(self.deferred[0].arrays))):
            self._call_back(self.deferred[0])
            if self.has_pending():
                break  # launches and answers first, and the end of the client
        return bool(self._running or self._waiting or self.deferred)

    def _finish_or_launch(self) -> bool:
        """Takes one program further, a finished one first: its end is seen to while others run."""
        if self._running and _is_ready(self._running[0].outputs[0]):
            self._finish(self._running.popleft())
        elif launches := self._launchable():
            for _ in launches:
                self._waiting.popleft()
            self._launch(launches)
        else:
            return False
        return True

    def error(self, failure: Failure, function: str) -> JaxsyncError:
        """The error for a failure as `function` raises it: a new one each time, with its cause attached."""
        cause = self.causes.get(-1 if failure.cause is None else failure.cause)
        if isinstance(cause, JaxsyncError):
            again = copy.copy(cause)  # it says itself what happened
            again.__cause__ = cause.__cause__
            return again
        reason = f"{type(cause).__name__} was raised" if cause is not None else ""
        error = self.explainer.failure(
            failure,
            function,
            events=self.recorder.format(),
            record=self.recorder.to_json(),
            reason=reason,
        )
        error.__cause__ = cause
        return error

    def _rejection(self, failure: Failure, what: str) -> Callable[[], Any]:
        def make_error() -> JaxsyncError:
            error = self.error(failure, "Ticket.wait")
            if isinstance(error, ClosedError):
                error.pending = (what, *error.pending)
            return error

        return raising(make_error)

    def _answer(self, effect: Answer) -> None:
        results = self._results.get(effect.step)
        blocks = {} if results is None else results[effect.device]
        self.tickets.pop(effect.ticket).answer(Answered(self.plan, blocks))
        self.recorder.record("answer", step=effect.step, device=effect.device)

    def _forget(self, step: int | None) -> None:
        if step is None:
            self._gradients.clear()
            self._results.clear()
            self._waiting.clear()
            self._running.clear()
            return
        for device in range(len(self.devices)):
            self._gradients.pop((step, device), None)
        self._results.pop(step, None)
        self.counts["steps"] += 1
        if step > self._last_launched:  # nobody here took part: is the next one the others' next, too?
            self._agreed = None

    def _is_launchable(self, launch: Launch) -> bool:
        """Whether all inputs are ready: on CPU a program launched on others can end the process."""
        leaves = bits(launch.leaves)
        for device in range(len(self.devices)):
            held = self._gradients.get((launch.step, device), {})
            if not all([_is_ready(held[leaf]) for leaf in leaves if leaf in held]):  # noqa: C419
                return False
        return True

    def _launchable(self) -> list[Launch]:
        """The launches to make now, as one program: the oldest; or all of its step, if they are all there.

        One program takes less time than one for each bucket. Only these two, since every set of buckets is a
        program to compile.
        """
        if not self._waiting:
            return []
        if self.consent.is_needed:
            return self._shared_step()
        first = self._waiting[0]
        whole = [launch for launch in self._waiting if launch.step == first.step]
        if len(whole) == len(self.plan.buckets) and all(map(self._is_launchable, whole)):
            return whole
        return [first] if self._is_launchable(first) else []

    def _shared_step(self) -> list[Launch]:
        """All launches of the oldest step, if they are all there.

        As one program always, whatever was ready first here: every process must launch the same programs.
        """
        step = self._waiting[0].step
        found = [launch for launch in self._waiting if launch.step == step]
        announced = self.announced(step)
        num_wanted = sum(bool(_mask(bucket) & announced) for bucket in self.plan.buckets)
        return found if len(found) == num_wanted and all(map(self._is_launchable, found)) else []

    def _agree_on_leaves(self, step: int, leaves: int) -> None:
        """Asks the other processes, if this set of leaves is not that of the step before."""
        if self.consent.is_needed and leaves != self._agreed:
            names = self.explainer.names(leaves)
            self.consent.ask(
                f"the leaves of step {step}",
                lambda: {"step": str(step), **{f"leaf {name}": "announced" for name in names}},
            )
        self._agreed, self._last_launched = leaves, step

    def _launch(self, launches: Sequence[Launch]) -> None:
        step, buckets = launches[0].step, tuple(launch.bucket for launch in launches)
        leaves = [bits(launch.leaves) for launch in launches]
        start_s = time.monotonic()
        self._agree_on_leaves(step, sum(launch.leaves for launch in launches))  # disjoint, as buckets are
        with self._number_types():
            program = sync_program(self.plan, buckets, leaves)
            arrays = assemble(self.plan, self._take_gradients(step, leaves))
            outputs = process_launcher().launch(lambda: program(arrays), self._window, lambda out: (out[0],))
        now_s = time.monotonic()
        self._paused_s += now_s - start_s
        every = tuple(itertools.chain.from_iterable(leaves))
        running = Running(step=step, buckets=buckets, leaves=every, outputs=outputs, launched_s=now_s)
        self._running.append(running)
        for number, own in zip(buckets, leaves, strict=True):
            bucket = self.plan.buckets[number]
            num_elements = sum(math.prod(self.plan.leaves[leaf].local_shape) for leaf in own)
            num_bytes = bucket.num_bytes * num_elements // bucket.num_elements  # of those announced
            self.counts["launches"] += 1
            self.counts["bytes"] += num_bytes
            self.recorder.record(
                "launch", step=step, what=f"bucket {number}", num_bytes=num_bytes, took_s=now_s - start_s
            )

    def _number_types(self) -> contextlib.AbstractContextManager[object]:
        """Lets this thread compute in 64 bits if the plan does: x64 may be the caller's setting alone."""
        return jax.enable_x64(True) if self._is_wide else contextlib.nullcontext()

    def _take_gradients(self, step: int, buckets: Sequence[Sequence[int]]) -> list[list[list[jax.Array]]]:
        """For each device, for each bucket, the gradients of its leaves, which are kept no longer."""
        return [
            [[self._take_gradient(step, device, leaf) for leaf in leaves] for leaves in buckets]
            for device in range(len(self.devices))
        ]

    def _take_gradient(self, step: int, device: int, leaf: int) -> jax.Array:
        gradient = self._gradients.get((step, device), {}).pop(leaf, None)
        if gradient is None:  # unused="zero"
            entry = self.plan.leaves[leaf]
            zeros = np.zeros(entry.local_shape, entry.dtype)
            gradient = jax.device_put(zeros, self.devices[device])
        self._check_input(gradient, leaf, device)
        return gradient

    def _check_input(self, gradient: jax.Array, leaf: int, device: int) -> None:
        try:
            gradient.block_until_ready()  # it is ready: this raises what its computation failed with
        except Exception as error:
            error.add_note(f"gradient {self.plan.leaves[leaf].path} of {self.explainer.devices[device]}")
            raise

    def _finish(self, done: Running) -> None:
        try:
            jax.block_until_ready(done.outputs)
        except Exception as error:
            if (lost := peer_error(error)) is not None:
                raise lost from error
            raise
        results = self._results.setdefault(done.step, [{} for _ in self.devices])
        for result, blocks in zip(results, take_out(done.outputs), strict=True):
            result.update(zip(done.leaves, blocks, strict=True))
        took_s = time.monotonic() - done.launched_s
        for bucket in done.buckets:
            self.recorder.record("finish", step=done.step, what=f"bucket {bucket}", took_s=took_s)
            self.post(Finish(step=done.step))

    def _call_back(self, deferred: Deferred) -> None:
        name = getattr(deferred.callback, "__qualname__", repr(deferred.callback))
        start_s = time.monotonic()
        try:
            value = deferred.callback(*jax.device_get(deferred.arrays))
        except BaseException as error:
            _forget_frames(error)
            self.callback_errors.append((deferred.ticket, name, error))
            answer = raising(functools.partial(_callback_error, name, error))
        else:
            answer = lambda: value  # noqa: E731
        took_s = time.monotonic() - start_s
        self._paused_s += took_s
        self.counts["callbacks"] += 1
        self.recorder.record("callback", what=name, took_s=took_s)
        # Refused if the client was closed meanwhile, or an interrupt struck in the middle of defer.
        self.post(Settle(ticket=deferred.number))
        self.tickets.pop(deferred.number, None)
        deferred.ticket.answer(answer)  # all the same, once: it ran, and somebody may wait for it
        self.deferred.popleft()
        del deferred  # the frames of its exception lead to this one, and are kept for longer than its arrays


def _mask(bucket: Bucket) -> int:
    """The leaves of a bucket as bits."""
    return sum(1 << leaf for leaf in bucket.leaves)


def _callback_error(name: str, cause: BaseException) -> CallbackError:
    error = CallbackError(callbacks=(f"{name}: {type(cause).__name__}",))
    error.__cause__ = cause
    return error


def _forget_frames(error: BaseException) -> None:
    """Lets go of the arrays in the frames that an exception came through: it is kept longer than they."""
    traceback.clear_frames(error.__traceback__)
    if error.__traceback__ is not None:  # the first frame is the caller's, which runs and so keeps its own
        error.__traceback__ = error.__traceback__.tb_next


def _is_ready(array: jax.Array) -> bool:
    """Whether its computation is done, well or badly. Does not wait."""
    # is_ready of a deleted array ends the process with a segmentation fault (0.10.2). It counts as ready:
    # whoever takes it says what happened, with its name.
    return array.is_deleted() or bool(array.is_ready())  # type: ignore[attr-defined]  # missing in the stubs


def _device_arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not x.is_deleted()]
