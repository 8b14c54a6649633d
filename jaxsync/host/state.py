"""The state machine of host-side sync: `step(state, message) -> (state, effects)`.

Pure: no thread, no clock, no array. A device goes through its steps in order: it announces leaves, hands over
gradients, and syncs. A bucket is launched as soon as every device has announced its set and handed over the
bucket's leaves, in plan order; a step is complete when every device has synced and every bucket has its
result. Two steps can be open at once, since a device that has its result may start the next one while others
are still in theirs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jaxsync.host.messages import (
    Answer,
    Close,
    Defer,
    Effect,
    Fail,
    Failure,
    Finish,
    Forget,
    Launch,
    Message,
    Refuse,
    Register,
    Reject,
    Settle,
    Stop,
    Submit,
    Sync,
    Tick,
    Warn,
)

MAX_OPEN_STEPS = 2  # a device may lead by one step: bounds the gradients that are held


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One open step.

    Attributes:
        number: Counted from 0.
        announced: For each device the leaves it takes part with; None before it has said so.
        submitted: For each device the leaves it has handed over.
        tickets: For each device its ticket; None before it has synced.
        num_launched: Buckets launched, in plan order; those without an announced leaf count too.
        num_finished: Buckets that have their result.
        since_s: When the wait for the rest began: at the first sync, and again when all was launched.
        is_warned: Whether a stall was reported.
    """

    number: int
    announced: tuple[int | None, ...]
    submitted: tuple[int, ...]
    tickets: tuple[int | None, ...]
    num_launched: int = 0
    num_finished: int = 0
    since_s: float | None = None
    is_warned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays as it is.

    Attributes:
        num_devices: Devices that take part.
        buckets: The leaves of each bucket of the plan, in launch order.
        is_strict: Whether a sync without an announced gradient fails; else it counts as zero.
        timeout_s: How long a step may wait.
        stall_s: After how long that is reported.
        all_leaves: Every leaf of the plan that is synced.
    """

    num_devices: int
    buckets: tuple[int, ...]
    is_strict: bool
    timeout_s: float
    stall_s: float
    all_leaves: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_leaves", functools.reduce(operator.or_, self.buckets, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the machine knows.

    Attributes:
        setup: What stays as it is.
        now_s: The last `Tick`.
        first: The number of the oldest open step, or of the next one.
        steps: The open steps, oldest first.
        deferred: Tickets of callbacks that have not run.
        failure: Why it is broken; None while it is not.
        is_closed: Whether it was closed.
    """

    setup: Setup
    now_s: float = 0.0
    first: int = 0
    steps: tuple[Step, ...] = ()
    deferred: frozenset[int] = frozenset()
    failure: Failure | None = None
    is_closed: bool = False


T = TypeVar("T")
Outcome = tuple[State, tuple[Effect, ...]]


def step(state: State, message: Message) -> Outcome:
    """What becomes of `state`, and what is to be done.

    A message that is wrong changes nothing and has one effect, `Refuse`.
    """
    match message:
        case Tick():
            return _tick(state, message)
        case Close():
            return _close(state)
        case Settle():
            return _settle(state, message)
        case Fail():
            return _fail(
                state, Failure(kind="crash", step=state.first, devices=message.devices, cause=message.cause)
            )
        case Finish():
            return _finish(state, message)
    if state.failure is not None:
        return _refuse(state, "failed", failure=state.failure)
    match message:
        case Defer():
            return replace(state, deferred=state.deferred | {message.ticket}), ()
        case Register() | Submit() | Sync():
            return _device_message(state, message)


def open_step(state: State, device: int) -> int | None:
    """The number of the step that `device` is in; None if it would be two steps ahead."""
    for index, current in enumerate(state.steps):
        if current.tickets[device] is None:
            return state.first + index
    return state.first + len(state.steps) if len(state.steps) < MAX_OPEN_STEPS else None


def announced_leaves(state: State, number: int) -> int:
    """The leaves that devices take part with in a step; none if it is not open, or nobody has said so."""
    index = number - state.first
    return (state.steps[index].announced[0] or 0) if 0 <= index < len(state.steps) else 0


def owed(state: State, current: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices that have not synced, and the leaves each has not handed over."""
    known = next((leaves for leaves in current.announced if leaves is not None), state.setup.all_leaves)
    devices = tuple(device for device, ticket in enumerate(current.tickets) if ticket is None)
    return devices, tuple(known & ~current.submitted[device] for device in devices)


def _device_message(state: State, message: Register | Submit | Sync) -> Outcome:
    if not 0 <= message.device < state.setup.num_devices:
        return _refuse(state, "device")
    leaves = 0 if isinstance(message, Sync) else message.leaves
    if unknown := leaves & ~state.setup.all_leaves:
        return _refuse(state, "leaf", leaves=unknown)
    number = open_step(state, message.device)
    if number is None:
        return _refuse(state, "ahead")
    index = number - state.first
    if index == len(state.steps):
        none = (None,) * state.setup.num_devices
        new = Step(number=number, announced=none, submitted=(0,) * state.setup.num_devices, tickets=none)
        opened = _put(state, index, new)
    else:
        opened = state
    match message:
        case Register():
            after, effects = _register(opened, index, message)
        case Submit():
            after, effects = _submit(opened, index, message)
        case Sync():
            after, effects = _sync(opened, index, message)
    return (state, effects) if effects and isinstance(effects[0], Refuse) else (after, effects)


def _register(state: State, index: int, message: Register) -> Outcome:
    if state.steps[index].announced[message.device] is not None:
        return _refuse(state, "registered", leaves=state.steps[index].submitted[message.device])
    return _announce(state, index, message.device, message.leaves)


def _announce(state: State, index: int, device: int, leaves: int) -> Outcome:
    current = state.steps[index]
    for other, announced in enumerate(current.announced):
        if announced is not None and announced != leaves:
            pair = (other, device) if other < device else (device, other)
            sets = (announced, leaves) if other < device else (leaves, announced)
            return _fail(state, Failure(kind="mismatch", step=current.number, devices=pair, leaves=sets))
    return _advance(_put(state, index, replace(current, announced=_set(current.announced, device, leaves))))


def _submit(state: State, index: int, message: Submit) -> Outcome:
    device, leaves = message.device, message.leaves
    announced = state.steps[index].announced[device]
    if announced is None:
        announced = state.setup.all_leaves  # who announces nothing and submits takes part with all
    if outside := leaves & ~announced:
        return _refuse(state, "unannounced", leaves=outside)
    if twice := leaves & state.steps[index].submitted[device]:
        return _refuse(state, "submitted", leaves=twice)
    effects: tuple[Effect, ...] = ()
    if state.steps[index].announced[device] is None:
        state, effects = _announce(state, index, device, announced)
        if state.failure is not None:
            return state, effects
    current = state.steps[index]
    handed_over = Step(
        number=current.number,
        announced=current.announced,
        submitted=_set(current.submitted, device, current.submitted[device] | leaves),
        tickets=current.tickets,
        num_launched=current.num_launched,
        num_finished=current.num_finished,
        since_s=current.since_s,
        is_warned=current.is_warned,
    )
    state, more = _advance(_put(state, index, handed_over))
    return state, effects + more


def _sync(state: State, index: int, message: Sync) -> Outcome:
    device = message.device
    current = state.steps[index]
    ticketed = replace(
        current,
        tickets=_set(current.tickets, device, message.ticket),
        since_s=state.now_s if current.since_s is None else current.since_s,
    )
    state = _put(state, index, ticketed)
    announced = current.announced[device]
    if announced is None:
        return _announce(state, index, device, 0)  # who announces none takes part with none
    if missing := announced & ~current.submitted[device]:
        if state.setup.is_strict:
            failure = Failure(kind="missing", step=current.number, devices=(device,), leaves=(missing,))
            return _fail(state, failure)
        state = _put(state, index, replace(ticketed, submitted=_set(current.submitted, device, announced)))
    return _advance(state)


def _finish(state: State, message: Finish) -> Outcome:
    if state.failure is not None:
        return state, ()  # a program that was under way when something else failed
    index = message.step - state.first
    if not 0 <= index < len(state.steps):
        return _refuse(state, "step")
    current = state.steps[index]
    if current.num_finished >= current.num_launched:
        return _refuse(state, "step")
    return _advance(_put(state, index, replace(current, num_finished=current.num_finished + 1)))


def _advance(state: State) -> Outcome:
    """Launches what can be launched, and completes what is complete."""
    effects: list[Effect] = []
    for index in range(len(state.steps)):
        if index and state.steps[index - 1].num_launched < len(state.setup.buckets):
            break  # launches are in step order, as in every other process
        state = _put(state, index, _launch(state, state.steps[index], effects))
    while state.steps and _is_complete(state, state.steps[0]):
        done, *rest = state.steps
        tickets = [(device, t) for device, t in enumerate(done.tickets) if t is not None]
        effects += [Answer(ticket=t, step=done.number, device=device) for device, t in tickets]
        effects.append(Forget(step=done.number))
        if rest and rest[0].since_s is not None:  # its wait counts from now: it could not end before
            rest[0] = replace(rest[0], since_s=state.now_s)
        state = replace(state, first=done.number + 1, steps=tuple(rest))
    return state, tuple(effects)


def _launch(state: State, current: Step, effects: list[Effect]) -> Step:
    announced = current.announced[0]
    if announced is None or None in current.announced:
        return current
    handed_over = announced
    for submitted in current.submitted:
        handed_over &= submitted
    before = current.num_launched
    while current.num_launched < len(state.setup.buckets):
        leaves = state.setup.buckets[current.num_launched] & announced
        if leaves & ~handed_over:
            break
        if leaves:
            effects.append(Launch(step=current.number, bucket=current.num_launched, leaves=leaves))
        finished = current.num_finished + (not leaves)
        current = replace(current, num_launched=current.num_launched + 1, num_finished=finished)
    if before < current.num_launched == len(state.setup.buckets) and current.since_s is not None:
        current = replace(current, since_s=state.now_s, is_warned=False)
    return current


def _is_complete(state: State, current: Step) -> bool:
    return current.num_finished == len(state.setup.buckets) and None not in current.tickets


def _tick(state: State, message: Tick) -> Outcome:
    state = replace(state, now_s=max(state.now_s, message.now_s))
    if not state.steps or state.steps[0].since_s is None:
        return state, ()
    current = state.steps[0]
    waited_s = state.now_s - state.steps[0].since_s
    devices, leaves = owed(state, current)
    if waited_s >= state.setup.timeout_s:
        kind = "timeout" if devices else "stuck"
        return _fail(state, Failure(kind=kind, step=current.number, devices=devices, leaves=leaves))  # type: ignore[arg-type]
    if waited_s >= state.setup.stall_s and not current.is_warned:
        warning = Warn(step=current.number, devices=devices, leaves=leaves)
        return _put(state, 0, replace(current, is_warned=True)), (warning,)
    return state, ()


def _settle(state: State, message: Settle) -> Outcome:
    if message.ticket not in state.deferred:
        return _refuse(state, "ticket")
    return replace(state, deferred=state.deferred - {message.ticket}), ()


def _fail(state: State, failure: Failure) -> Outcome:
    if state.failure is not None:
        return state, ()  # the first cause wins
    tickets = [t for current in state.steps for t in current.tickets if t is not None]
    effects: list[Effect] = [Reject(ticket=t, failure=failure) for t in tickets]
    return replace(state, steps=(), failure=failure), (*effects, Forget(step=None))


def _close(state: State) -> Outcome:
    if state.is_closed:
        return state, ()
    devices, leaves = owed(state, state.steps[0]) if state.steps else ((), ())
    closed = Failure(kind="closed", step=state.first, devices=devices, leaves=leaves)
    state, effects = _fail(state, closed)
    rejects = tuple(Reject(ticket=ticket, failure=closed) for ticket in sorted(state.deferred))
    return replace(state, is_closed=True, deferred=frozenset()), (*effects, *rejects, Stop())


def _refuse(state: State, reason: str, leaves: int = 0, failure: Failure | None = None) -> Outcome:
    return state, (Refuse(reason=reason, leaves=leaves, failure=failure),)  # type: ignore[arg-type]


def _put(state: State, index: int, current: Step) -> State:
    # By hand: dataclasses.replace takes several times as long, and this runs for every gradient.
    if index < len(state.steps) and state.steps[index] is current:
        return state
    return State(
        setup=state.setup,
        now_s=state.now_s,
        first=state.first,
        steps=_set(state.steps, index, current),
        deferred=state.deferred,
        failure=state.failure,
        is_closed=state.is_closed,
    )


def _set(values: Sequence[T], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
