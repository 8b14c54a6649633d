"""The state machine of host-side sync: each message, each refusal, each failure, and a model to compare with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    bits,
)
from jaxsync.host.state import Setup, State, Step, open_step, step

A, B, BOTH = 0b01, 0b10, 0b11


def make_state(
    num_devices: int = 2, buckets: tuple[int, ...] = (A, B), *, is_strict: bool = True, now_s: float = 0.0
) -> State:
    setup = Setup(
        num_devices=num_devices, buckets=buckets, is_strict=is_strict, timeout_s=60.0, stall_s=10.0
    )
    return State(setup=setup, now_s=now_s)


def run(state: State, *messages: Message) -> tuple[State, list[Effect]]:
    """The state after some messages, and all of their effects."""
    found: list[Effect] = []
    for message in messages:
        state, effects = step(state, message)
        found += effects
    return state, found


def after(*messages: Message, state: State | None = None) -> State:
    return run(make_state() if state is None else state, *messages)[0]


def submit(device: int, leaves: int = BOTH) -> Submit:
    return Submit(device=device, leaves=leaves)


def sync(device: int, ticket: int | None = None) -> Sync:
    return Sync(device=device, ticket=device if ticket is None else ticket)


def register(device: int, leaves: int = BOTH) -> Register:
    return Register(device=device, leaves=leaves)


def tick(now_s: float) -> Tick:
    return Tick(now_s=now_s)


def launch(number: int, bucket: int, leaves: int | None = None) -> Launch:
    return Launch(step=number, bucket=bucket, leaves=1 << bucket if leaves is None else leaves)


FULL_STEP = (submit(0), submit(1), sync(0), sync(1))  # until the programs have their results
RUNS = (Finish(step=0), Finish(step=0))


# What goes right.


def test_a_step_goes_from_announcements_to_answers() -> None:
    state = make_state()
    said = (
        (register(0), ()),
        (register(1), ()),
        (submit(0, B), ()),
        (submit(1, A), ()),
        (submit(0, A), (launch(0, 0),)),
        (sync(0, 7), ()),
        (submit(1, B), (launch(0, 1),)),
        (Finish(step=0), ()),
        (sync(1, 8), ()),
        (
            Finish(step=0),
            (Answer(ticket=7, step=0, device=0), Answer(ticket=8, step=0, device=1), Forget(step=0)),
        ),
    )
    for message, effects in said:
        state, found = step(state, message)
        assert found == effects
    assert state == State(setup=state.setup, first=1)


def test_the_last_sync_completes_a_step_whose_programs_have_run() -> None:
    _, effects = step(after(submit(0), submit(1), *RUNS, sync(1)), sync(0))
    assert effects == (
        Answer(ticket=0, step=0, device=0),
        Answer(ticket=1, step=0, device=1),
        Forget(step=0),
    )


def test_an_open_step_holds_what_each_device_said() -> None:
    state = after(register(0, A), submit(0, A), sync(0, 7), state=make_state(now_s=3.0))
    opened = Step(number=0, announced=(A, None), submitted=(A, 0), tickets=(7, None), since_s=3.0)
    assert state == State(setup=state.setup, now_s=3.0, steps=(opened,))
    assert after(submit(1, A), state=make_state(num_devices=3)).steps == (
        Step(number=0, announced=(None, BOTH, None), submitted=(0, A, 0), tickets=(None, None, None)),
    )


def test_submitting_keeps_all_else_of_a_step() -> None:
    state = make_state(num_devices=2, buckets=(A, B, 0b100))
    messages = (submit(0, A), submit(1, A), Finish(step=0), submit(0, B | 0b100), sync(0), tick(10.0), submit(1, B))
    assert after(*messages, state=state).steps == (
        Step(
            number=0,
            announced=(0b111, 0b111),
            submitted=(0b111, 0b011),
            tickets=(0, None),
            num_launched=2,
            num_finished=1,
            since_s=0.0,
            is_warned=True,
        ),
    )


def test_buckets_are_launched_in_plan_order_whatever_comes_first() -> None:
    _, effects = run(make_state(), submit(0, B), submit(1, B), submit(1, A), submit(0, A))
    assert effects == [launch(0, 0), launch(0, 1)]


def test_a_bucket_of_several_leaves_waits_for_all_of_them() -> None:
    state, effects = run(make_state(buckets=(BOTH,)), submit(0, A), submit(1), submit(0, B))
    assert effects == [launch(0, 0, BOTH)]


def test_nothing_is_launched_before_every_device_has_announced() -> None:
    _, effects = run(make_state(num_devices=3), submit(0), submit(1), register(2), submit(2))
    assert effects == [launch(0, 0), launch(0, 1)]
    _, effects = run(make_state(num_devices=3), submit(2), submit(1))
    assert effects == []


def test_a_last_registration_after_the_gradients_launches() -> None:
    late = after(register(0, A), submit(0, A), state=make_state(buckets=(A,)))
    assert run(late, register(1, A), submit(1, A))[1] == [launch(0, 0)]
    none = after(register(0, 0), state=make_state(buckets=(A,)))
    assert run(none, register(1, 0), sync(0), sync(1))[1] == [
        Answer(ticket=0, step=0, device=0),
        Answer(ticket=1, step=0, device=1),
        Forget(step=0),
    ]


@pytest.mark.parametrize(
    ("announced", "launches"),
    [
        (0b0110, [launch(0, 0, 0b0010), launch(0, 1, 0b0100)]),
        (0b0011, [launch(0, 0, 0b0011)]),
        (0b1000, [launch(0, 2, 0b1000)]),
        (0b1001, [launch(0, 0, 0b0001), launch(0, 2, 0b1000)]),
    ],
)
def test_buckets_without_an_announced_leaf_are_skipped(announced: int, launches: list[Launch]) -> None:
    state = make_state(buckets=(0b0011, 0b0100, 0b1000))
    parts = [message for d in (0, 1) for message in (register(d, announced), submit(d, announced), sync(d))]
    state, effects = run(state, *parts)
    assert effects == launches
    state, effects = run(state, *[Finish(step=0)] * len(launches))
    answers = [Answer(ticket=d, step=0, device=d) for d in (0, 1)]
    assert effects == [*answers, Forget(step=0)]


@pytest.mark.parametrize("buckets", [(A, B), ()])
@pytest.mark.parametrize("does_register", [(True, True), (True, False), (False, True), (False, False)])
def test_a_step_without_leaves_is_answered_at_once(
    buckets: tuple[int, ...], does_register: tuple[bool, bool]
) -> None:
    registers = [register(d, 0) for d in (0, 1) if does_register[d]]
    state, effects = run(make_state(buckets=buckets), *registers, sync(1), sync(0))
    assert effects == [
        Answer(ticket=0, step=0, device=0),
        Answer(ticket=1, step=0, device=1),
        Forget(step=0),
    ]
    assert state == State(setup=state.setup, first=1)


def test_a_device_that_leads_is_in_the_next_step() -> None:
    state = after(submit(0), sync(0, 10), submit(0), sync(0, 20))
    assert [s.number for s in state.steps] == [0, 1]
    assert (open_step(state, 0), open_step(state, 1)) == (None, 0)
    state, effects = run(state, submit(1), sync(1, 11), submit(1), sync(1, 21))
    assert effects == [launch(0, 0), launch(0, 1), launch(1, 0), launch(1, 1)]
    assert (open_step(state, 0), open_step(state, 1)) == (None, None)
    state, effects = run(state, Finish(step=1), Finish(step=1))
    assert effects == []
    state, effects = run(state, *RUNS)
    assert effects == [
        Answer(ticket=10, step=0, device=0),
        Answer(ticket=11, step=0, device=1),
        Forget(step=0),
        Answer(ticket=20, step=1, device=0),
        Answer(ticket=21, step=1, device=1),
        Forget(step=1),
    ]
    assert state == State(setup=state.setup, first=2)
    assert (open_step(state, 0), open_step(state, 1)) == (2, 2)


def test_a_step_is_launched_after_all_of_the_one_before() -> None:
    """Only possible without strictness: the first step is held up by a sync, not by a gradient."""
    state = make_state(is_strict=False)
    lead = (register(0), sync(0, 10), submit(0), register(1, BOTH), submit(1, A))
    state, effects = run(state, *lead)
    assert effects == [launch(0, 0)]
    state, effects = run(state, sync(1, 11), submit(1, BOTH))
    assert effects == [launch(0, 1), launch(1, 0), launch(1, 1)]


def test_a_step_is_launched_while_the_one_before_still_runs() -> None:
    _, effects = run(make_state(), *FULL_STEP, submit(0), submit(1))
    assert effects == [launch(0, 0), launch(0, 1), launch(1, 0), launch(1, 1)]


def test_without_strictness_a_missing_gradient_counts_as_zero() -> None:
    state = make_state(is_strict=False)
    _, effects = run(state, register(0), register(1), submit(0, B), sync(0), submit(1), sync(1))
    assert effects == [launch(0, 0), launch(0, 1)]


# Refusals.


def two_ahead() -> State:
    return after(submit(0), sync(0, 10), submit(0), sync(0, 20))


REFUSALS: dict[str, tuple[State, Message, Refuse]] = {
    "device below": (make_state(), register(-1), Refuse(reason="device")),
    "device above": (make_state(), submit(2), Refuse(reason="device")),
    "device of a sync": (make_state(), sync(5), Refuse(reason="device")),
    "leaf announced": (make_state(), register(0, 0b1101), Refuse(reason="leaf", leaves=0b1100)),
    "leaf submitted": (make_state(), submit(0, 0b111), Refuse(reason="leaf", leaves=0b100)),
    "registered": (after(register(0)), register(0), Refuse(reason="registered")),
    "registered otherwise": (after(register(0)), register(0, A), Refuse(reason="registered")),
    "registered with nothing": (after(register(0, 0)), register(0, 0), Refuse(reason="registered")),
    "registered by submitting": (after(submit(0, A)), register(0), Refuse(reason="registered")),
    "unannounced": (after(register(0, A)), submit(0, BOTH), Refuse(reason="unannounced", leaves=B)),
    "submitted": (after(submit(0, B)), submit(0, BOTH), Refuse(reason="submitted", leaves=B)),
    "submitted, launched": (after(submit(0, A), submit(1, A)), submit(1, A), Refuse(reason="submitted", leaves=A)),
    "ahead, register": (two_ahead(), register(0), Refuse(reason="ahead")),
    "ahead, submit": (two_ahead(), submit(0), Refuse(reason="ahead")),
    "ahead, sync": (two_ahead(), sync(0, 30), Refuse(reason="ahead")),
    "step, none open": (make_state(), Finish(step=0), Refuse(reason="step")),
    "step, none launched": (after(submit(0)), Finish(step=0), Refuse(reason="step")),
    "step, all finished": (after(submit(0), submit(1), *RUNS), Finish(step=0), Refuse(reason="step")),
    "step, after": (after(submit(0), submit(1)), Finish(step=1), Refuse(reason="step")),
    "step, before": (after(*FULL_STEP, *RUNS, submit(0), submit(1)), Finish(step=0), Refuse(reason="step")),
    "ticket": (after(Defer(ticket=5)), Settle(ticket=6), Refuse(reason="ticket")),
    "ticket, settled": (after(Defer(ticket=5), Settle(ticket=5)), Settle(ticket=5), Refuse(reason="ticket")),
}


@pytest.mark.parametrize(("state", "message", "refusal"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_wrong_message_is_refused_and_changes_nothing(
    state: State, message: Message, refusal: Refuse
) -> None:
    found, effects = step(state, message)
    assert found is state
    assert effects == (refusal,)


@pytest.mark.parametrize("wrong", [register(0), submit(0, A), submit(0, 0b100), submit(7)])
def test_after_a_refusal_the_step_completes(wrong: Message) -> None:
    _, effects = run(make_state(), register(0), submit(0, A), wrong, submit(0, B), *FULL_STEP[1:], *RUNS)
    assert [e for e in effects if not isinstance(e, Refuse)] == [
        launch(0, 0),
        launch(0, 1),
        Answer(ticket=0, step=0, device=0),
        Answer(ticket=1, step=0, device=1),
        Forget(step=0),
    ]


# Failures.


def rejects(failure: Failure, *tickets: int) -> tuple[Effect, ...]:
    return (*(Reject(ticket=t, failure=failure) for t in tickets), Forget(step=None))


SECOND_STEP = (*FULL_STEP, *RUNS)
FAILURES: dict[str, tuple[State, Message, Failure, tuple[int, ...]]] = {
    "mismatch": (
        after(register(1, A), sync(0, 5), state=make_state(num_devices=2, buckets=(A, B)))
        if False
        else after(register(1, A)),
        register(0, B),
        Failure(kind="mismatch", step=0, devices=(0, 1), leaves=(B, A)),
        (),
    ),
}
