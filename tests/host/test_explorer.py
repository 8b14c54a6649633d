"""Every interleaving of small systems of devices and the state machine, with every wrong message anywhere.

A `System` is the machine's state and what was seen from outside: the messages it accepted and the effects it
had. The rules of the protocol are checked against what was seen, never against the machine's own books.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

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
from jaxsync.host.state import MAX_OPEN_STEPS, Outcome, Setup, State, step

Machine = Callable[[State, Message], Outcome]
DEFERRED, UNKNOWN = 900, 901  # tickets of callbacks
STALL_S, TIMEOUT_S = 1.0, 100.0  # far apart: several stalls are not a timeout


class Violation(AssertionError):
    """A rule of the protocol was broken; the notes hold the messages that led there."""


class Seen(NamedTuple):
    """What the machine has accepted from one device for one step."""

    announced: int | None = None
    submitted: int = 0
    is_synced: bool = False


class System(NamedTuple):
    """The machine, and what was seen of it.

    `devices` holds for each device its steps, of which the last is the one it is in; `launched` every bucket
    launched so far; `num_finished` for each step how many of those have their result; `num_done` the steps
    that are complete; `pending` the tickets without an answer; `away` the devices that stopped.
    """

    state: State
    devices: tuple[tuple[Seen, ...], ...]
    num_finished: tuple[int, ...]
    faults_left: int
    launched: tuple[tuple[int, int], ...] = ()
    num_done: int = 0
    pending: frozenset[int] = frozenset()
    deferred: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the devices of a system mean to do: `num_steps` times announce `announced`, submit, and sync."""

    num_devices: int
    buckets: tuple[int, ...]
    announced: int
    is_strict: bool = True
    has_lead: bool = True  # may start a step before the ticket of the last one is answered
    num_steps: int = 2
    num_faults: int = 1
    all_leaves: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_leaves", sum(self.buckets))


def check(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise Violation(rule)


def ticket_of(device: int, number: int) -> int:
    return 10 * number + device


def subsets(mask: int) -> Iterator[int]:
    """Every subset that is not empty, the largest first."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask


@dataclass(slots=True, kw_only=True)
class Explorer:
    """Depth first, each system once. Wrong messages are tried at every point, since they change nothing;
    what does change something and is not in the script is a fault, and each run has `num_faults` of them.
    """

    script: Script
    machine: Machine = step
    num_transitions: int = 0
    num_refusals: int = 0
    num_complete: int = 0
    kinds: set[str] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)
    came_from: dict[System, tuple[System, Message | str] | None] = field(default_factory=dict, repr=False)
    broken: set[State] = field(default_factory=set, repr=False)
    wrong: tuple[Message, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        devices = range(self.script.num_devices)
        unknown_leaf = self.script.all_leaves + 1
        masks = [0, *subsets(self.script.all_leaves)]
        self.wrong = (
            *(Register(device=d, leaves=m) for d in devices for m in (*masks, unknown_leaf)),
            *(Submit(device=d, leaves=m) for d in devices for m in (*masks[1:], unknown_leaf)),
            *(Register(device=d, leaves=0) for d in (-1, len(devices))),
            *(Submit(device=d, leaves=1) for d in (-1, len(devices))),
            *(Sync(device=d, ticket=UNKNOWN) for d in (-1, len(devices))),
            *(Finish(step=number) for number in range(-1, self.script.num_steps + 2)),
            *(Settle(ticket=t) for t in (DEFERRED, UNKNOWN)),
            *(Fail(cause=d, devices=(d,)) for d in devices),
            Close(),
        )

    @property
    def num_systems(self) -> int:
        return len(self.came_from)

    def explore(self) -> Explorer:
        """Visits every system that can be reached."""
        devices = range(self.script.num_devices)
        setup = Setup(
            num_devices=len(devices),
            buckets=self.script.buckets,
            is_strict=self.script.is_strict,
            timeout_s=TIMEOUT_S,
            stall_s=STALL_S,
        )
        start = System(
            state=State(setup=setup),
            devices=((Seen(),),) * len(devices),
            num_finished=(0,) * (self.script.num_steps + 1),
            faults_left=self.script.num_faults,
        )
        self.came_from[start] = None
        stack = [start]
        while stack:
            system = stack.pop()
            for cause, after in self.transitions(system):
                if after not in self.came_from:
                    self.came_from[after] = (system, cause)
                    stack.append(after)
        return self

    def transitions(self, system: System) -> Iterator[tuple[Message | str, System]]:
        moves = list(self.moves(system))
        if not moves:
            self.check_end(system)
            moves = [self.tick(system, TIMEOUT_S)] if system.pending else [Close()]
        for message in moves:
            yield from self.follow(system, message, faults_left=system.faults_left)
        if not system.away:  # with a device away the machine is where it also is with a silent device
            self.check_refusals(system)
        if system.faults_left:
            faults_left = system.faults_left - 1
            for message in self.faults(system):
                if message not in moves and self.reason(system, message) is None:
                    yield from self.follow(system, message, faults_left=faults_left)
            for device in set(range(self.script.num_devices)) - system.away:
                away = system.away | {device}
                yield f"{device} is away", system._replace(away=away, faults_left=faults_left)

    def moves(self, system: System) -> Iterator[Message]:
        """What may happen next if nothing goes wrong."""
        for device, steps in enumerate(system.devices):
            number = len(steps) - 1
            waits_for = ticket_of(device, number - 1)
            has_lead = self.script.has_lead or waits_for not in system.pending
            if device not in system.away and number < self.script.num_steps and has_lead:
                script = self.device_moves(device, number, steps[-1])
                yield from (m for m in script if self.reason(system, m) is None)
        for number in range(self.script.num_steps + 1):
            if self.reason(system, Finish(step=number)) is None:
                yield Finish(step=number)
        yield from (Settle(ticket=t) for t in system.deferred)

    def device_moves(self, device: int, number: int, seen: Seen) -> Iterator[Message]:
        if seen.announced is None:
            yield Register(device=device, leaves=self.script.announced)
        may_submit = seen.announced is not None or self.script.announced == self.script.all_leaves
        announced = self.script.announced if seen.announced is None else seen.announced
        owed = announced & ~seen.submitted
        if may_submit:
            yield from (Submit(device=device, leaves=leaves) for leaves in subsets(owed))
        if not owed:
            yield Sync(device=device, ticket=ticket_of(device, number))

    def faults(self, system: System) -> Iterator[Message]:
        yield from self.wrong
        for device, steps in enumerate(system.devices):
            yield Sync(device=device, ticket=ticket_of(device, len(steps) - 1))
        yield self.tick(system, STALL_S)
        yield self.tick(system, TIMEOUT_S)
        if not system.deferred:
            yield Defer(ticket=DEFERRED)

    def tick(self, system: System, seconds: float) -> Tick:
        return Tick(now_s=system.state.now_s + seconds)

    def reason(self, system: System, message: Message) -> str | None:
        """Why the message has to be refused."""
        match message:
            case Finish(step=number):
                num_launched = sum(s == number for s, _ in system.launched)
                is_open = system.num_done <= number <= self.script.num_steps
                return None if is_open and system.num_finished[number] < num_launched else "step"
            case Settle(ticket=ticket):
                return None if ticket in system.deferred else "ticket"
            case Register(device=device) | Submit(device=device) | Sync(device=device):
                if device not in range(self.script.num_devices):
                    return "device"
                if not isinstance(message, Sync) and message.leaves > self.script.all_leaves:
                    return "leaf"
                if len(system.devices[device]) - 1 - system.num_done >= MAX_OPEN_STEPS:
                    return "ahead"
                return self.reason_in_step(system.devices[device][-1], message)
        return None

    def reason_in_step(self, seen: Seen, message: Message) -> str | None:
        match message:
            case Register() if seen.announced is not None:
                return "registered"
            case Submit(leaves=leaves) if seen.announced is not None and leaves & ~seen.announced:
                return "unannounced"
            case Submit(leaves=leaves) if leaves & seen.submitted:
                return "submitted"
        return None

    def failure(self, system: System, message: Message) -> str | None:
        """The kind of failure that the message has to lead to."""
        match message:
            case Fail():
                return "crash"
            case Close():
                return "closed"
            case Tick(now_s=now_s) if system.pending and now_s - system.state.now_s >= TIMEOUT_S:
                return "timeout" if self.owing(system) else "stuck"
            case Register(device=device) | Submit(device=device) | Sync(device=device):
                seen = self.accept(system.devices[device][-1], message)
                number = len(system.devices[device]) - 1
                sets = {steps[number].announced for steps in system.devices if len(steps) > number}
                if sets - {None, seen.announced}:
                    return "mismatch"
                if seen.is_synced and seen.announced != seen.submitted and self.script.is_strict:
                    return "missing"
        return None

    def accept(self, seen: Seen, message: Register | Submit | Sync) -> Seen:
        match message:
            case Register(leaves=leaves):
                return seen._replace(announced=leaves)
            case Submit(leaves=leaves):
                announced = self.script.all_leaves if seen.announced is None else seen.announced
                return seen._replace(announced=announced, submitted=seen.submitted | leaves)
            case Sync():
                return seen._replace(announced=seen.announced or 0, is_synced=True)

    def owing(self, system: System) -> tuple[int, ...]:
        """The devices that have not synced the oldest open step."""
        return tuple(d for d, steps in enumerate(system.devices) if len(steps) - 1 == system.num_done)

    def follow(
        self, system: System, message: Message, *, faults_left: int
    ) -> Iterator[tuple[Message, System]]:
        """The system after an accepted message; none if the machine is broken then, and all was said."""
        try:
            state, effects = self.machine(system.state, message)
            after = self.see(system._replace(state=state, faults_left=faults_left), message, effects)
            kind = self.failure(system, message)
            check((state.failure and state.failure.kind) == kind, f"{message} fails with {kind}")
            is_close = isinstance(message, Close)
            check(effects.count(Stop()) == is_close, "Close has one Stop, and nothing else has")
            check(not (is_close and after.deferred), "closing answers every callback")
            if kind is None:
                yield message, after
            else:
                self.kinds.add(kind)
                check(not after.pending, "a failure answers every ticket")
                check(effects.count(Forget(step=None)) == 1, "a failure keeps no gradient")
                self.check_broken(state)
        except Violation as violation:
            violation.add_note("\n".join(map(str, (*self.trail(system), message))))
            raise

    def trail(self, system: System) -> list[Message | str]:
        found: list[Message | str] = []
        while (origin := self.came_from[system]) is not None:
            system = origin[0]
            found.append(origin[1])
        return found[::-1]

    def see(self, system: System, message: Message, effects: tuple[Effect, ...]) -> System:
        """What is known after a message and its effects, each of which keeps the rules."""
        self.num_transitions += 1
        check(len(system.state.steps) <= MAX_OPEN_STEPS, "at most two steps are open")
        match message:
            case Register(device=device) | Submit(device=device) | Sync(device=device):
                steps = (*system.devices[device][:-1], self.accept(system.devices[device][-1], message))
                if isinstance(message, Sync):
                    steps = (*steps, Seen())
                    system = system._replace(pending=system.pending | {message.ticket})
                devices = (*system.devices[:device], steps, *system.devices[device + 1 :])
                system = system._replace(devices=devices)
            case Finish(step=number):
                finished = list(system.num_finished)
                finished[number] += 1
                system = system._replace(num_finished=tuple(finished))
            case Defer(ticket=ticket):
                system = system._replace(deferred=system.deferred | {ticket})
            case Settle(ticket=ticket):
                system = system._replace(deferred=system.deferred - {ticket})
        for effect in effects:
            system = self.see_effect(system, message, effect)
        return system

    def see_effect(self, system: System, message: Message, effect: Effect) -> System:
        match effect:
            case Launch(step=number, bucket=bucket, leaves=leaves):
                self.check_launch(system, number, bucket, leaves)
                return system._replace(launched=(*system.launched, (number, bucket)))
            case Answer(ticket=ticket, step=number, device=device):
                check(ticket in system.pending, "a ticket is answered once")
                check(ticket == ticket_of(device, number), "a device gets the answer to its own ticket")
                self.check_complete(system, number)
                return system._replace(pending=system.pending - {ticket})
            case Forget(step=None):
                check(system.state.failure is not None, "without a failure a step is kept")
            case Forget(step=number):
                check(number == system.num_done, "each step is forgotten once, in order")
                check(all(t // 10 > number for t in system.pending), "a step is kept until all are answered")
                self.check_complete(system, number)
                return system._replace(num_done=system.num_done + 1)
            case Reject(ticket=ticket, failure=failure):
                check(ticket in system.pending | system.deferred, "a ticket is answered once")
                check(failure == system.state.failure, "the first failure is reported")
                deferred = system.deferred - {ticket}
                return system._replace(pending=system.pending - {ticket}, deferred=deferred)
            case Warn(step=number, devices=devices):
                check(isinstance(message, Tick) and number == system.num_done, "time tells of a stall")
                check(bool(system.pending) and devices == self.owing(system), "a stall names who is owing")
            case Refuse():
                raise Violation(f"{message} is accepted")
        return system

    def check_launch(self, system: System, number: int, bucket: int, leaves: int) -> None:
        check((number, bucket) > max(system.launched, default=(-1, 0)), "launches are in order, each once")
        have_come = all(len(steps) > number for steps in system.devices)
        check(have_come, "a launch waits until every device has announced")
        parts = [steps[number] for steps in system.devices]
        announced = parts[0].announced
        check(
            announced is not None and all(part.announced == announced for part in parts),
            "a launch waits until every device has announced the same",
        )
        check(
            leaves == self.script.buckets[bucket] & announced and leaves != 0,
            "a launch has what is announced",
        )
        for part in parts:
            has_all = not leaves & ~part.submitted or (part.is_synced and not self.script.is_strict)
            check(has_all, "a launch has one gradient of each device")
        due = [(s, b) for s in range(number + 1) for b in self.due(system, s) if (s, b) < (number, bucket)]
        check(list(system.launched) == due, "no bucket is left out")

    def due(self, system: System, number: int) -> list[int]:
        announced = system.devices[0][number].announced or 0
        return [b for b, leaves in enumerate(self.script.buckets) if leaves & announced]

    def check_complete(self, system: System, number: int) -> None:
        check(number == system.num_done, "steps are answered in order")
        is_synced = all(len(steps) > number and steps[number].is_synced for steps in system.devices)
        check(is_synced, "an answer waits until every device has synced")
        launched = [b for s, b in system.launched if s == number]
        check(launched == self.due(system, number), "an answer waits until all is launched")
        check(len(launched) == system.num_finished[number], "an answer waits until all has its result")

    def check_end(self, system: System) -> None:
        """Nobody moves any more."""
        if system.faults_left == self.script.num_faults:
            is_complete = system.num_done == self.script.num_steps and not system.pending
            check(is_complete, "without a fault every step is completed")
            self.num_complete += 1

    def check_refusals(self, system: System) -> None:
        extra = (Sync(device=d, ticket=UNKNOWN) for d in range(self.script.num_devices))
        for message in (*self.wrong, *extra):
            if (reason := self.reason(system, message)) is None:
                continue
            self.num_refusals += 1
            self.reasons.add(reason)
            state, effects = self.machine(system.state, message)
            reasons = [effect.reason for effect in effects if isinstance(effect, Refuse)]
            if len(effects) != 1 or reasons != [reason] or state != system.state:
                violation = Violation(f"{message} is refused with {reason!r}, and changes nothing")
                violation.add_note("\n".join(map(str, self.trail(system))))
                raise violation

    def check_broken(self, state: State) -> None:
        """A broken machine says why to all, and keeps nothing but callbacks, until it is closed."""
        if state in self.broken:
            return
        self.broken.add(state)
        refused = (state, (Refuse(reason="failed", failure=state.failure),))
        sync, defer = Sync(device=0, ticket=UNKNOWN), Defer(ticket=UNKNOWN)
        for message in (*self.wrong, sync, defer):
            if isinstance(message, Register | Submit | Sync | Defer):
                check(self.machine(state, message) == refused, "every later call gets the first failure")
            if isinstance(message, Finish | Fail) or (isinstance(message, Close) and state.is_closed):
                check(self.machine(state, message) == (state, ()), "what is over stays as it is")
        later = replace(state, now_s=state.now_s + TIMEOUT_S)
        check(self.machine(state, Tick(now_s=later.now_s)) == (later, ()), "what is over has no timeout")
        if not state.is_closed:
            closed, effects = self.machine(state, Close())
            reason = Failure(kind="closed", step=state.first)
            rejects = [Reject(ticket=t, failure=reason) for t in sorted(state.deferred)]
            check(
                effects == (*rejects, Stop()), "closing answers the callbacks that are left, and stops once"
            )
            after = replace(state, is_closed=True, deferred=frozenset())
            check(closed == after, "closing keeps the first failure")
            self.check_broken(closed)


ONE, TWO, SPLIT = (0b1,), (0b11,), (0b1, 0b10)
SMALL = Script(num_devices=2, buckets=ONE, announced=1)
# The last column is a floor for the number of systems, so that nothing can be left out without a failure.
SYSTEMS = {
    "1 leaf, 2 faults": (replace(SMALL, num_faults=2), 3_500),
    "1 leaf, 2 faults, waits": (replace(SMALL, num_faults=2, has_lead=False), 2_000),
    "1 leaf, 2 faults, zero": (replace(SMALL, num_faults=2, is_strict=False), 5_000),
    "1 leaf, 3 steps": (replace(SMALL, num_steps=3), 1_200),
    "1 leaf, 3 steps, zero": (replace(SMALL, num_steps=3, is_strict=False), 1_600),
    "1 bucket of 2 leaves": (Script(num_devices=2, buckets=TWO, announced=3), 1_700),
    "1 bucket of 2 leaves, zero": (Script(num_devices=2, buckets=TWO, announced=3, is_strict=False), 2_500),
    "2 buckets": (Script(num_devices=2, buckets=SPLIT, announced=3), 2_600),
    "2 buckets, waits": (Script(num_devices=2, buckets=SPLIT, announced=3, has_lead=False), 1_000),
    "2 buckets, zero": (Script(num_devices=2, buckets=SPLIT, announced=3, is_strict=False), 4_000),
    "2 buckets, first announced": (Script(num_devices=2, buckets=SPLIT, announced=1), 900),
    "2 buckets, second announced": (Script(num_devices=2, buckets=SPLIT, announced=2), 900),
    "2 buckets, none announced, 2 faults": (
        Script(num_devices=2, buckets=SPLIT, announced=0, num_faults=2),
        2_300,
    ),
    "no bucket, 2 faults": (Script(num_devices=2, buckets=(), announced=0, num_faults=2), 800),
    "3 devices": (Script(num_devices=3, buckets=ONE, announced=1), 4_900),
    "3 devices, zero": (Script(num_devices=3, buckets=ONE, announced=1, is_strict=False), 6_000),
    "3 devices, 2 buckets": (Script(num_devices=3, buckets=SPLIT, announced=3), 23_000),
    "3 devices, 2 buckets, waits, zero": (
        Script(num_devices=3, buckets=SPLIT, announced=3, has_lead=False, is_strict=False),
        9_700,
    ),
}


@pytest.mark.parametrize(("script", "num_systems"), SYSTEMS.values(), ids=SYSTEMS.keys())
def test_every_interleaving_keeps_the_rules(script: Script, num_systems: int) -> None:
    explorer = Explorer(script=script).explore()
    # For docs/design: pytest --log-cli-level=info
    counts = (explorer.num_systems, explorer.num_transitions, explorer.num_refusals)
    logging.getLogger(__name__).info("%d systems, %d transitions, %d refusals", *counts)
    assert explorer.num_systems >= num_systems
    assert explorer.num_transitions > 2 * num_systems
    assert explorer.num_refusals > 5 * num_systems
    assert explorer.num_complete == 1  # all runs without a fault meet in one system


def test_the_explorer_meets_every_kind_of_failure_and_refusal() -> None:
    explorer = Explorer(script=replace(SMALL, buckets=SPLIT, announced=2)).explore()
    assert explorer.kinds == {"timeout", "stuck", "mismatch", "missing", "crash", "closed"}
    refused = {"device", "leaf", "unannounced", "registered", "submitted", "ahead", "step", "ticket"}
    assert explorer.reasons == refused  # "failed" is checked in every broken machine


def counts_a_second_sync_for_another_device(state: State, message: Message) -> Outcome:
    if isinstance(message, Sync) and state.steps and message.device in range(state.setup.num_devices):
        tickets = state.steps[0].tickets
        if tickets[message.device] is not None and None in tickets:
            message = replace(message, device=tickets.index(None))
    return step(state, message)


def launches_without_the_late_device(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    if isinstance(message, Submit) and after.steps and None in after.steps[0].announced:
        oldest, *rest = after.steps
        launch = Launch(step=oldest.number, bucket=0, leaves=after.setup.buckets[0])
        return replace(after, steps=(replace(oldest, num_launched=1), *rest)), (*effects, launch)
    return after, effects


def averages_over_those_who_have_announced_it(state: State, message: Message) -> Outcome:
    if isinstance(message, Register) and state.steps and not message.leaves & ~state.setup.all_leaves:
        known = next((a for a in state.steps[0].announced if a is not None), message.leaves)
        message = replace(message, leaves=known)
    return step(state, message)


def loses_a_waiter_at_close(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, effects[1:] if isinstance(message, Close) and len(effects) > 2 else effects


def answers_the_last_device_alone(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    first = next((e for e in effects if isinstance(e, Answer)), None)
    return after, tuple(e for e in effects if e != first)


def answers_twice(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, (*(e for e in effects if isinstance(e, Answer)), *effects)


def swaps_the_answers(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    flipped = (replace(e, device=1 - e.device) if isinstance(e, Answer) else e for e in effects)
    return after, tuple(flipped)


def forgets_before_it_answers(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, tuple(sorted(effects, key=lambda e: not isinstance(e, Forget)))


def drops_what_a_leading_device_submits(state: State, message: Message) -> Outcome:
    leading = (
        [d for d, ticket in enumerate(state.steps[0].tickets) if ticket is not None] if state.steps else []
    )
    if isinstance(message, Submit) and message.device in leading:
        return state, ()
    return step(state, message)


def launches_in_the_order_of_a_hash_map(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, tuple(sorted(effects, key=lambda e: -e.bucket if isinstance(e, Launch) else 0))


def launches_a_bucket_twice(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, (*(e for e in effects if isinstance(e, Launch)), *effects)


def waits_for_ever(state: State, message: Message) -> Outcome:
    is_waiting = isinstance(message, Tick) and state.failure is None
    return (state, ()) if is_waiting else step(state, message)


def counts_a_refused_registration(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    if effects and isinstance(effects[0], Refuse) and effects[0].reason == "registered":
        return replace(after, now_s=after.now_s + 1), effects
    return after, effects


def reports_the_last_failure(state: State, message: Message) -> Outcome:
    if isinstance(message, Fail) and state.failure is not None:
        return replace(state, failure=replace(state.failure, cause=message.cause)), ()
    return step(state, message)


def ignores_calls_after_close(state: State, message: Message) -> Outcome:
    after, effects = step(state, message)
    return after, () if state.is_closed else effects


def stops_at_every_close(state: State, message: Message) -> Outcome:
    return (state, (Stop(),)) if isinstance(message, Close) and state.is_closed else step(state, message)


def forgets_that_a_bucket_is_running(state: State, message: Message) -> Outcome:
    return (state, ()) if isinstance(message, Finish) and len(state.steps) > 1 else step(state, message)


BROKEN = {
    counts_a_second_sync_for_another_device: "is accepted|fails with",
    launches_without_the_late_device: "a launch waits until every device has announced",
    averages_over_those_who_have_announced_it: "fails with mismatch",
    loses_a_waiter_at_close: "a failure answers every ticket",
    answers_the_last_device_alone: "a step is kept until all are answered",
    answers_twice: "a ticket is answered once",
    swaps_the_answers: "a device gets the answer to its own ticket",
    forgets_before_it_answers: "a step is kept until all are answered",
    drops_what_a_leading_device_submits: "fails with|is refused with",
    launches_in_the_order_of_a_hash_map: "launches are in order|no bucket is left out",
    launches_a_bucket_twice: "launches are in order, each once",
    waits_for_ever: "fails with (timeout|stuck)",
    counts_a_refused_registration: "changes nothing",
    reports_the_last_failure: "what is over stays as it is",
    ignores_calls_after_close: "every later call gets the first failure",
    stops_at_every_close: "what is over stays as it is",
    forgets_that_a_bucket_is_running: "is refused with|without a fault every step is completed",
}


@pytest.mark.parametrize(
    ("machine", "rule"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_the_explorer_finds_a_machine_that(machine: Machine, rule: str) -> None:
    script = Script(num_devices=2, buckets=SPLIT, announced=3)
    with pytest.raises(Violation, match=rule) as caught:
        Explorer(script=script, machine=machine).explore()
    assert caught.value.__notes__  # the messages that led there
