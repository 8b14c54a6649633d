"""What a client's loop does with arrays: gradients of single devices in, reduced gradients out."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
from jaxsync.host.recorder import Recorder
from jaxsync.host.ticket import Ticket, raising
from jaxsync.ingraph.grads import reduce_leaves
from jaxsync.placement import concrete_mesh
from jaxsync.plan import SyncPlan

logger = logging.getLogger("jaxsync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A launched bucket: its leaves by plan index -> reduced global arrays."""

    step: int
    bucket: int
    outputs: Mapping[int, jax.Array]
    launched_s: float


class StepResult:
    """The reduced gradients of a step, taken apart by device when the first ticket is looked at.

    Threading: any thread may call `of`.
    """

    def __init__(self, plan: SyncPlan, arrays: Mapping[int, jax.Array]) -> None:
        self._plan = plan
        # Protects the look into arrays: JAX splits one into its blocks at the first look, and a second thread
        # that looks meanwhile sees part of them (0.10.2).
        self._lock = threading.Lock()
        self._arrays: Mapping[int, jax.Array] | None = arrays  # both under the lock
        self._blocks: list[dict[int, jax.Array]] = []

    def of(self, device: int) -> Any:
        """The registered tree on one device, None for leaves that took no part."""
        with self._lock:
            if self._arrays is not None:
                self._blocks = _split(self._arrays, self._plan.mesh.size)
                self._arrays = None
            own = self._blocks[device]
        return jax.tree.unflatten(
            self._plan.treedef, [own.get(index) for index in range(len(self._plan.leaves))]
        )

    def drop(self, device: int) -> None:
        """Keeps the blocks of that device alive no longer."""
        self._blocks[device] = {}


def _split(arrays: Mapping[int, jax.Array], num_devices: int) -> list[dict[int, jax.Array]]:
    # All devices at once: each call of addressable_data lists all blocks of an array to take one.
    blocks: list[dict[int, jax.Array]] = [{} for _ in range(num_devices)]
    for index, array in arrays.items():
        for own, shard in zip(blocks, array.addressable_shards, strict=True):
            own[index] = shard.data
    return blocks


class Answered:
    """The answer to one ticket: its device's part of a step, kept for those who look again."""

    def __init__(self, result: StepResult, device: int) -> None:
        self._lock = threading.Lock()  # two threads may wait for one ticket
        self._result: StepResult | None = result
        self._device = device
        self._tree: Any = None
        self._is_taken = False

    def __call__(self) -> Any:
        """The tree of synced gradients."""
        # In this order, so that an interrupt between two lines loses nothing.
        with self._lock:
            if not self._is_taken and self._result is not None:
                self._tree = self._result.of(self._device)
                self._is_taken = True
            if self._result is not None:
                self._result.drop(self._device)
                self._result = None
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
        self._numbers = itertools.count()
        self._gradients: dict[
            tuple[int, int], dict[int, jax.Array]
        ] = {}  # (step, device) -> leaf -> gradient
        self._results: dict[int, dict[int, jax.Array]] = {}  # step -> leaf -> reduced global array
        self._answers: dict[int, StepResult] = {}  # the step that is being answered
        self._waiting: deque[Launch] = deque()  # loop thread only, as are the next two
        self._running: deque[Running] = deque()
        self._paused_s = 0.0
        self.use(plan)

    def use(self, plan: SyncPlan) -> None:
        """Takes another plan, while no step is open."""
        self.plan = plan
        self.mesh = concrete_mesh(plan)
        self.devices = list(self.mesh.devices.flat)
        self._window = resolve_window(plan.config.max_in_flight, self.devices[0].platform)
        self._is_wide = any(bucket.dtype in ("float64", "complex128") for bucket in plan.buckets)
        self.index_of = {leaf.path: index for index, leaf in enumerate(plan.leaves)}
        self.dtypes = [jnp.dtype(leaf.dtype) if leaf.is_synced else None for leaf in plan.leaves]
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
        while self._running and all(map(_is_ready, self._running[0].outputs.values())):
            self._finish(self._running.popleft())
        while self._waiting and self._is_launchable(self._waiting[0]):
            self._launch(self._waiting.popleft())
        while self.deferred and all(map(_is_ready, _device_arrays(self.deferred[0].arrays))):
            self._call_back(self.deferred[0])
            if self.has_pending():
                break  # launches and answers first, and the end of the client
        return bool(self._running or self._waiting or self.deferred)

    def error(self, failure: Failure, function: str) -> JaxsyncError:
        """The error for a failure as `function` raises it: a new one each time, with its cause attached."""
        cause = self.causes.get(-1 if failure.cause is None else failure.cause)
        if isinstance(cause, JaxsyncError):
            again = copy.copy(cause)  # it says itself what happened
            again.__cause__ = cause.__cause__
            return again
        reason = f"{type(cause).__name__} was raised" if cause is not None else ""
        error = self.explainer.failure(failure, function, events=self.recorder.format(), reason=reason)
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
        if effect.step not in self._answers:
            self._answers[effect.step] = StepResult(self.plan, self._results.pop(effect.step, {}))
        result = self._answers[effect.step]
        self.tickets.pop(effect.ticket).answer(Answered(result, effect.device))
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
        self._answers.pop(step, None)
        self.counts["steps"] += 1

    def _is_launchable(self, launch: Launch) -> bool:
        """Whether all inputs are ready: on CPU a program launched on others can end the process."""
        return all(
            _is_ready(self._gradients[launch.step, device][leaf])
            for device in range(len(self.devices))
            for leaf in bits(launch.leaves)
            if leaf in self._gradients.get((launch.step, device), {})
        )

    def _launch(self, launch: Launch) -> None:
        leaves = bits(launch.leaves)
        program = bucket_program(self.plan, leaves)
        with self._number_types():
            inputs = [self._global_array(launch.step, leaf) for leaf in leaves]
            start_s = time.monotonic()
            outputs = process_launcher().launch(lambda: program(inputs), self._window, lambda out: (out[0],))
            now_s = time.monotonic()
        self._paused_s += now_s - start_s
        self._running.append(
            Running(
                step=launch.step,
                bucket=launch.bucket,
                outputs=dict(zip(leaves, outputs, strict=True)),
                launched_s=now_s,
            )
        )
        bucket = self.plan.buckets[launch.bucket]
        num_elements = sum(math.prod(self.plan.leaves[leaf].local_shape) for leaf in leaves)
        num_bytes = bucket.num_bytes * num_elements // bucket.num_elements  # of those announced
        self.counts["launches"] += 1
        self.counts["bytes"] += num_bytes
        what = f"bucket {launch.bucket}"
        self.recorder.record(
            "launch", step=launch.step, what=what, num_bytes=num_bytes, took_s=now_s - start_s
        )

    def _number_types(self) -> contextlib.AbstractContextManager[object]:
        """Lets this thread compute in 64 bits if the plan does: x64 may be the caller's setting alone."""
        return jax.enable_x64(True) if self._is_wide else contextlib.nullcontext()

    def _global_array(self, step: int, leaf: int) -> jax.Array:
        """All devices' gradients of one leaf as the blocks of one array, without a copy."""
        entry = self.plan.leaves[leaf]
        pieces = []
        for device, place in enumerate(self.devices):
            gradient = self._gradients.get((step, device), {}).pop(leaf, None)
            if gradient is None:  # unused="zero"
                gradient = jax.device_put(np.zeros(entry.local_shape, entry.dtype), place)
            self._check_input(gradient, leaf, device)
            pieces.append(gradient)
        sharding = NamedSharding(self.mesh, _block_spec(self.plan, leaf))
        shape = entry.local_shape
        stacked = (shape[0] * len(pieces), *shape[1:]) if shape else ()
        return jax.make_array_from_single_device_arrays(stacked, sharding, pieces)

    def _check_input(self, gradient: jax.Array, leaf: int, device: int) -> None:
        try:
            gradient.block_until_ready()  # it is ready: this raises what its computation failed with
        except Exception as error:
            error.add_note(f"gradient {self.plan.leaves[leaf].path} of {self.explainer.devices[device]}")
            raise

    def _finish(self, done: Running) -> None:
        jax.block_until_ready(list(done.outputs.values()))
        self._results.setdefault(done.step, {}).update(done.outputs)
        took_s = time.monotonic() - done.launched_s
        self.recorder.record("finish", step=done.step, what=f"bucket {done.bucket}", took_s=took_s)
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


@functools.lru_cache(maxsize=1024)
def bucket_program(plan: SyncPlan, leaves: tuple[int, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The compiled sync of some leaves of a plan; the same for every equal plan.

    Collectives: one all-reduce for each dtype and set of axes among the leaves.
    """
    specs = [_block_spec(plan, index) for index in leaves]

    def sync(values: list[jax.Array]) -> list[jax.Array]:
        given: list[jax.Array | None] = [None] * len(plan.leaves)
        for index, value in zip(leaves, values, strict=True):
            given[index] = value
        reduced = reduce_leaves(plan, given)
        return [reduced[index] for index in leaves]

    # Without check_vma: what goes in and out are each device's own blocks, whatever the types would say.
    mapped = jax.shard_map(
        sync, mesh=concrete_mesh(plan), in_specs=(specs,), out_specs=specs, check_vma=False
    )
    compiled: Callable[[list[jax.Array]], list[jax.Array]] = jax.jit(mapped)
    return compiled


def _block_spec(plan: SyncPlan, leaf: int) -> PartitionSpec:
    """The sharding of an array whose blocks are all devices' own values of a leaf, along its first dim.

    A scalar has no dim: its array says that it is replicated, and its replicas differ. Nothing but the
    program and the ticket ever sees it.
    """
    return PartitionSpec(plan.mesh.axis_names) if plan.leaves[leaf].local_shape else PartitionSpec()
