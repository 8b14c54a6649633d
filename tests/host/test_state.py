"""The state machine of host-side sync: every message, refusal and failure, and a model to compare it with."""

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
    setup = Setup(num_devices=num_devices, buckets=buckets, is_strict=is_strict, timeout_s=60.0, stall_s=10.0)
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
    messages = (
        submit(0, A),
        submit(1, A),
        Finish(step=0),
        submit(0, B | 0b100),
        sync(0),
        tick(10.0),
        submit(1, B),
    )
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
    _, effects = run(make_state(buckets=(BOTH,)), submit(0, A), submit(1), submit(0, B))
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


def test_a_plan_may_have_hundreds_of_buckets() -> None:
    buckets = tuple(1 << leaf for leaf in range(400))
    announced = [sum(buckets) - 2 for _ in range(2)]  # equal, but not the same object
    first, second = ((register(d, announced[d]), submit(d, announced[d]), sync(d)) for d in (0, 1))
    state, effects = run(make_state(buckets=buckets), *first, tick(5.0), *second)
    assert effects == [launch(0, bucket) for bucket in range(400) if bucket != 1]
    assert step(state, tick(64.9))[0].failure is None
    assert step(state, tick(65.0))[0].failure == Failure(kind="stuck", step=0)
    finished = after(*first[:2], *second[:2], *[Finish(step=0)] * 399, state=make_state(buckets=buckets))
    assert step(finished, Finish(step=0)) == (finished, (Refuse(reason="step"),))
    state, effects = run(state, *[Finish(step=0)] * 399)
    assert effects == [*(Answer(ticket=d, step=0, device=d) for d in (0, 1)), Forget(step=0)]


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


def test_results_of_two_open_steps_come_in_any_order() -> None:
    second = (submit(0), submit(1), sync(0, 10), sync(1, 11))
    state = after(*FULL_STEP, *RUNS, *second, submit(0), submit(1), Finish(step=2), Finish(step=1))
    assert [(s.number, s.num_launched, s.num_finished) for s in state.steps] == [(1, 2, 1), (2, 2, 1)]


def test_one_device_may_lead_in_every_step() -> None:
    state, effects = run(make_state(buckets=(A,)), submit(0, A), sync(0, 0))
    for number in range(5):
        lead = (register(0, A), submit(0, A), sync(0, 10 * number + 10))
        state, effects = run(state, *lead, submit(1, A), sync(1, 10 * number + 1), Finish(step=number))
        assert effects == [
            launch(number, 0),
            Answer(ticket=10 * number, step=number, device=0),
            Answer(ticket=10 * number + 1, step=number, device=1),
            Forget(step=number),
        ]
        assert (open_step(state, 0), open_step(state, 1)) == (number + 2, number + 1)


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
    "registered by submitting": (after(submit(0, A)), register(0), Refuse(reason="registered", leaves=A)),
    "unannounced": (after(register(0, A)), submit(0, BOTH), Refuse(reason="unannounced", leaves=B)),
    "submitted": (after(submit(0, B)), submit(0, BOTH), Refuse(reason="submitted", leaves=B)),
    "submitted, launched": (
        after(submit(0, A), submit(1, A)),
        submit(1, A),
        Refuse(reason="submitted", leaves=A),
    ),
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


def test_devices_that_announce_different_sets_fail_all_before_any_launch() -> None:
    failure = Failure(kind="mismatch", step=0, devices=(0, 2), leaves=(B, A))
    state = after(register(2, A), state=make_state(num_devices=3))
    assert step(state, register(0, B)) == (
        dataclasses.replace(state, steps=(), failure=failure),
        (Forget(step=None),),
    )
    assert step(after(register(0, B), state=make_state(num_devices=3)), register(2, A))[1] == (
        Forget(step=None),
    )
    assert after(register(0, B), register(2, A), state=make_state(num_devices=3)).failure == failure


@pytest.mark.parametrize(
    ("message", "leaves"), [(submit(1, A), (A, BOTH)), (sync(1, 7), (A, 0)), (register(1, 0), (A, 0))]
)
def test_an_announcement_may_be_implied(message: Message, leaves: tuple[int, int]) -> None:
    """Who submits first takes part with all leaves, who syncs first with none."""
    failed, effects = step(after(register(0, A), submit(0, A), sync(0, 5)), message)
    failure = Failure(kind="mismatch", step=0, devices=(0, 1), leaves=leaves)
    assert failed.failure == failure
    assert effects == rejects(failure, 5, *([7] if isinstance(message, Sync) else []))


def test_a_mismatch_names_the_first_device_that_differs() -> None:
    state = after(register(1, A), register(2, A), register(0, B), state=make_state(num_devices=3))
    assert state.failure == Failure(kind="mismatch", step=0, devices=(0, 1), leaves=(B, A))


def test_a_mismatch_in_the_next_step_fails_both_steps() -> None:
    state = after(*FULL_STEP, register(0), submit(0), sync(0, 10))
    failure = Failure(kind="mismatch", step=1, devices=(0, 1), leaves=(BOTH, A))
    assert step(state, register(1, A)) == (
        dataclasses.replace(state, steps=(), failure=failure),
        rejects(failure, 0, 1, 10),
    )


def test_a_sync_without_a_gradient_fails_all() -> None:
    state = after(register(0), submit(1), sync(1, 8), submit(0, B))
    failure = Failure(kind="missing", step=0, devices=(0,), leaves=(A,))
    assert step(state, sync(0, 7)) == (
        dataclasses.replace(state, steps=(), failure=failure),
        rejects(failure, 7, 8),
    )


def test_a_crash_reaches_every_waiter_with_its_cause() -> None:
    state = after(*FULL_STEP, submit(1), sync(1, 11))
    failure = Failure(kind="crash", step=0, devices=(0, 1), cause=4)
    assert step(state, Fail(cause=4, devices=(0, 1))) == (
        dataclasses.replace(state, steps=(), failure=failure),
        rejects(failure, 0, 1, 11),
    )


def test_a_crash_says_in_which_step_it_was() -> None:
    state = after(*FULL_STEP, *RUNS, Fail(cause=4))
    assert state.failure == Failure(kind="crash", step=1, cause=4)


def test_a_device_that_does_not_sync_fails_all_after_the_timeout() -> None:
    state = after(submit(0), sync(0, 7), submit(2, A), tick(59.9), state=make_state(num_devices=3))
    failure = Failure(kind="timeout", step=0, devices=(1, 2), leaves=(BOTH, B))
    failed, effects = step(state, tick(60.0))
    assert failed == dataclasses.replace(state, now_s=60.0, steps=(), failure=failure)
    assert effects == rejects(failure, 7)


def test_a_program_that_does_not_finish_fails_all_after_the_timeout() -> None:
    state = after(*FULL_STEP)
    failure = Failure(kind="stuck", step=0)
    assert step(state, tick(60.0)) == (
        dataclasses.replace(state, now_s=60.0, steps=(), failure=failure),
        rejects(failure, 0, 1),
    )


BROKEN = after(sync(0, 7), Defer(ticket=9), Fail(cause=1))


@pytest.mark.parametrize("state", [BROKEN, after(Close(), state=BROKEN)], ids=["broken", "closed"])
@pytest.mark.parametrize(
    "message",
    [register(0), submit(0), sync(0), Defer(ticket=3), register(9), submit(0, 0b100), sync(-1)],
    ids=repr,
)
def test_every_call_after_a_failure_gets_the_first(state: State, message: Message) -> None:
    failure = Failure(kind="crash", step=0, cause=1)
    assert step(state, message) == (state, (Refuse(reason="failed", failure=failure),))


@pytest.mark.parametrize("message", [Finish(step=0), Finish(step=9), Fail(cause=2, devices=(1,))], ids=repr)
def test_what_comes_after_a_failure_changes_nothing(message: Message) -> None:
    assert step(BROKEN, message) == (BROKEN, ())


def test_time_goes_by_after_a_failure() -> None:
    assert step(BROKEN, tick(500.0)) == (dataclasses.replace(BROKEN, now_s=500.0), ())


# Time.


def warnings(state: State, *messages: Message) -> list[Effect]:
    return [effect for effect in run(state, *messages)[1] if isinstance(effect, Warn)]


def failures(state: State, *messages: Message) -> Failure | None:
    return run(state, *messages)[0].failure


def test_a_stall_is_reported_once_with_what_each_device_owes() -> None:
    state = make_state(num_devices=3)
    messages = (submit(1, B), submit(0), sync(0), tick(9.9))
    assert warnings(state, *messages) == []
    warning = Warn(step=0, devices=(1, 2), leaves=(A, BOTH))
    assert warnings(state, *messages, tick(10.0)) == [warning]
    assert warnings(state, *messages, tick(10.0), tick(11.0), submit(2), tick(59.0)) == [warning]


def test_a_stall_of_those_who_announced_less_says_so() -> None:
    messages = (register(0, A), submit(0, A), sync(0), tick(10.0))
    assert warnings(make_state(), *messages) == [Warn(step=0, devices=(1,), leaves=(A,))]
    messages = (register(0, 0), sync(0), tick(10.0))
    assert warnings(make_state(), *messages) == [Warn(step=0, devices=(1,), leaves=(0,))]


def test_a_stall_is_reported_again_after_all_was_launched() -> None:
    messages = (submit(0), sync(0), tick(10.0), submit(1, A), tick(30.0), submit(1, B), tick(39.9))
    owing = Warn(step=0, devices=(1,), leaves=(BOTH,))
    assert warnings(make_state(), *messages) == [owing]
    assert warnings(make_state(), *messages, tick(40.0)) == [owing, Warn(step=0, devices=(1,), leaves=(0,))]
    running = Warn(step=0, devices=(), leaves=())
    assert warnings(make_state(), *messages, sync(1), tick(40.0), tick(41.0)) == [owing, running]


def test_a_stall_changes_nothing_but_that_it_was_reported() -> None:
    state = after(submit(0), sync(0))
    warned = dataclasses.replace(state.steps[0], is_warned=True)
    assert after(tick(10.0), state=state) == dataclasses.replace(state, now_s=10.0, steps=(warned,))


def test_nothing_is_late_before_the_first_sync() -> None:
    _, effects = run(make_state(), tick(1e3), register(0), submit(0), submit(1, B), tick(2e3), tick(3e3))
    assert effects == []


def test_the_clock_starts_at_the_first_sync() -> None:
    messages = (tick(5.0), sync(0), tick(40.0), sync(1))
    state = make_state(num_devices=3)
    assert failures(state, *messages, tick(64.9)) is None
    late = Failure(kind="timeout", step=0, devices=(2,), leaves=(0,))
    assert failures(state, *messages, tick(65.0)) == late


def test_the_clock_starts_again_when_all_was_launched() -> None:
    messages = (submit(0), sync(0), tick(50.0), submit(1, A), tick(55.0), submit(1, B), sync(1))
    assert failures(make_state(), *messages, tick(114.9)) is None
    assert failures(make_state(), *messages, tick(115.0)) == Failure(kind="stuck", step=0)
    assert failures(make_state(), *messages[:3], tick(60.0)) == Failure(
        kind="timeout", step=0, devices=(1,), leaves=(BOTH,)
    )


def test_the_clock_goes_on_while_some_of_it_is_launched_or_finished() -> None:
    messages = (submit(0), sync(0), tick(50.0), submit(1, A), Finish(step=0), tick(60.0))
    late = Failure(kind="timeout", step=0, devices=(1,), leaves=(B,))
    assert failures(make_state(), *messages) == late
    messages = (*FULL_STEP, tick(50.0), Finish(step=0), tick(60.0))
    assert failures(make_state(), *messages) == Failure(kind="stuck", step=0)


def test_the_clock_goes_on_until_every_device_has_announced() -> None:
    messages = (sync(1), tick(50.0), register(0, 0), tick(60.0))
    late = Failure(kind="timeout", step=0, devices=(0, 2), leaves=(0, 0))
    assert failures(make_state(num_devices=3), *messages) == late


def test_launching_all_before_the_first_sync_starts_no_clock() -> None:
    messages = (submit(0), submit(1), tick(100.0))
    assert failures(make_state(), *messages, tick(200.0)) is None
    assert failures(make_state(), *messages, sync(1), tick(159.0)) is None
    late = Failure(kind="timeout", step=0, devices=(0,), leaves=(0,))
    assert failures(make_state(), *messages, sync(1), tick(160.0)) == late


def test_the_clock_of_the_next_step_starts_when_it_becomes_the_oldest() -> None:
    lead = (*FULL_STEP, tick(5.0), submit(0), sync(0, 10), tick(9.0), *RUNS)
    late = Failure(kind="timeout", step=1, devices=(1,), leaves=(BOTH,))
    assert failures(make_state(), *lead, tick(68.9)) is None
    assert failures(make_state(), *lead, tick(69.0)) == late
    assert warnings(make_state(), *lead, tick(18.9)) == []
    assert warnings(make_state(), *lead, tick(19.0)) == [Warn(step=1, devices=(1,), leaves=(BOTH,))]


def test_the_next_step_without_a_sync_has_no_clock_when_it_becomes_the_oldest() -> None:
    state, _ = run(make_state(), *FULL_STEP, submit(0), tick(50.0), *RUNS)
    assert state == State(
        setup=state.setup,
        now_s=50.0,
        first=1,
        steps=(Step(number=1, announced=(BOTH, None), submitted=(BOTH, 0), tickets=(None, None)),),
    )
    assert failures(state, tick(500.0)) is None


def test_the_oldest_step_is_late_whether_or_not_the_next_has_a_clock() -> None:
    assert failures(make_state(), *FULL_STEP, submit(0), tick(60.0)) == Failure(kind="stuck", step=0)


def test_only_the_oldest_step_is_late() -> None:
    messages = (*FULL_STEP, tick(50.0), submit(0), sync(0, 10), tick(59.0))
    assert failures(make_state(), *messages) is None
    state, effects = run(after(*messages), tick(60.0))
    assert state.failure == Failure(kind="stuck", step=0)
    assert tuple(effects) == rejects(Failure(kind="stuck", step=0), 0, 1, 10)


def test_time_does_not_go_back() -> None:
    assert after(tick(5.0), tick(3.0)) == make_state(now_s=5.0)


# Closing, and callbacks.


def test_closing_answers_all_and_names_what_was_pending() -> None:
    state = after(*FULL_STEP, *RUNS, submit(1, A), submit(0), sync(0, 10), Defer(ticket=9), Defer(ticket=8))
    failure = Failure(kind="closed", step=1, devices=(1,), leaves=(B,))
    closed, effects = step(state, Close())
    assert closed == dataclasses.replace(
        state, steps=(), deferred=frozenset(), failure=failure, is_closed=True
    )
    deferred = [Reject(ticket=t, failure=failure) for t in (8, 9)]
    assert effects == (*rejects(failure, 10), *deferred, Stop())
    assert step(closed, Close()) == (closed, ())


def test_closing_names_what_the_oldest_of_two_steps_waits_for() -> None:
    state = after(
        submit(0), sync(0, 0), submit(0), sync(0, 10), submit(2, A), state=make_state(num_devices=3)
    )
    failure = Failure(kind="closed", step=0, devices=(1, 2), leaves=(BOTH, B))
    assert step(state, Close())[1] == (*rejects(failure, 0, 10), Stop())


def test_closing_what_is_idle_stops() -> None:
    closed, effects = step(make_state(), Close())
    failure = Failure(kind="closed", step=0)
    assert closed == dataclasses.replace(make_state(), failure=failure, is_closed=True)
    assert effects == (Forget(step=None), Stop())
    assert step(closed, sync(0)) == (closed, (Refuse(reason="failed", failure=failure),))


def test_closing_what_is_broken_answers_the_callbacks_and_keeps_the_first_failure() -> None:
    closed, effects = step(BROKEN, Close())
    assert closed == dataclasses.replace(BROKEN, deferred=frozenset(), is_closed=True)
    assert effects == (Reject(ticket=9, failure=Failure(kind="closed", step=0)), Stop())


def test_a_settled_callback_is_not_answered_at_close() -> None:
    state = after(Defer(ticket=3), Defer(ticket=4))
    assert state == dataclasses.replace(make_state(), deferred=frozenset({3, 4}))
    assert after(Defer(ticket=3), state=state) == state
    state, effects = run(state, Settle(ticket=3))
    assert (state, effects) == (dataclasses.replace(make_state(), deferred=frozenset({4})), [])
    closed, effects = run(state, Close())
    assert effects == [Forget(step=None), Reject(ticket=4, failure=Failure(kind="closed", step=0)), Stop()]
    assert step(closed, Settle(ticket=4)) == (closed, (Refuse(reason="ticket"),))


def test_a_callback_outlives_a_failure() -> None:
    assert step(BROKEN, Settle(ticket=9)) == (dataclasses.replace(BROKEN, deferred=frozenset()), ())


# Values.


@pytest.mark.parametrize("kind", [*get_args(Message), *get_args(Effect), Failure, Setup, State, Step])
def test_what_goes_in_and_out_is_frozen_and_slotted_and_by_keyword(kind: type) -> None:
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in kind.__dict__
    assert all(f.kw_only for f in dataclasses.fields(kind))


@pytest.mark.parametrize(("buckets", "leaves"), [((), 0), ((A,), A), ((B, 0b1100, A), 0b1111)])
def test_a_setup_knows_all_leaves(buckets: tuple[int, ...], leaves: int) -> None:
    assert make_state(buckets=buckets).setup.all_leaves == leaves


@given(st.sets(st.integers(0, 10_000)))
def test_bits_are_the_indices_of_a_mask(indices: set[int]) -> None:
    assert bits(sum(1 << index for index in indices)) == tuple(sorted(indices))


# Order, and the model.


def interleavings(*sequences: Sequence[Message]) -> Iterable[tuple[Message, ...]]:
    """Every merge that keeps the order of each sequence."""
    owners = [index for index, sequence in enumerate(sequences) for _ in sequence]
    for order in sorted(set(itertools.permutations(owners))):
        rest = [iter(sequence) for sequence in sequences]
        yield tuple(next(rest[index]) for index in order)


@pytest.mark.parametrize("does_register", [True, False])
def test_launches_do_not_depend_on_the_order_of_arrival(does_register: bool) -> None:
    first = (*[register(0)] * does_register, submit(0, B), submit(0, A), sync(0))
    second = (*[register(1)] * does_register, submit(1, A), submit(1, B), sync(1))
    orders = list(interleavings(first, second))
    assert len(orders) == (70 if does_register else 20)
    for order in orders:
        state, effects = run(make_state(), *order)
        assert effects == [launch(0, 0), launch(0, 1)]
        assert state.steps == after(*first, *second).steps


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_launches_of_many_devices_do_not_depend_on_the_order_of_arrival(data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(2, 8))
    buckets = (0b000101, 0b100010, 0b001000, 0b010000)
    announced = data.draw(st.integers(0, 0b111111))
    rest: list[list[Message]] = []
    for device in range(num_devices):
        parts = data.draw(st.permutations(bits(announced)))
        submits = [submit(device, 1 << leaf) for leaf in parts]
        rest.append([register(device, announced), *submits, sync(device)])
    state, launches = make_state(num_devices=num_devices, buckets=buckets), []
    while any(rest):
        turn = data.draw(st.sampled_from([messages for messages in rest if messages]))
        state, effects = step(state, turn.pop(0))
        launches += [effect for effect in effects if isinstance(effect, Launch)]
    due = [(bucket, leaves & announced) for bucket, leaves in enumerate(buckets)]
    assert launches == [launch(0, bucket, leaves) for bucket, leaves in due if leaves]


class Model:
    """The protocol once more, in sets and dicts that are never tidied up.

    What was announced, submitted and asked for is kept by (step, device), and never forgotten.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.devices = range(setup.num_devices)
        self.buckets = [set(bits(leaves)) for leaves in setup.buckets]
        self.leaves = set().union(*self.buckets)
        self.announced: dict[tuple[int, int], set[int]] = {}
        self.submitted: dict[tuple[int, int], set[int]] = {}
        self.tickets: dict[tuple[int, int], int] = {}
        self.launched: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.waiting_since: dict[int, float] = {}
        self.warned: set[int] = set()
        self.deferred: set[int] = set()
        self.num_done = 0
        self.now_s = 0.0
        self.failure: Failure | None = None
        self.is_closed = False

    def step_of(self, device: int) -> int:
        return sum(d == device for _, d in self.tickets)

    def told(self, message: Message) -> list[Effect]:
        """The effects that a message should have."""
        match message:
            case Tick(now_s=now_s):
                return self.time(now_s)
            case Close():
                return self.close()
            case Settle(ticket=ticket):
                if ticket not in self.deferred:
                    return [Refuse(reason="ticket")]
                self.deferred.remove(ticket)
                return []
            case Fail(cause=cause, devices=devices):
                return self.fail("crash", self.num_done, devices, (), cause)
            case Finish(step=number):
                if self.failure is None and not self.running.get(number):
                    return [Refuse(reason="step")]
                self.running[number] = self.running.get(number, 0) - 1
                return self.go_on()
        if self.failure is not None:
            return [Refuse(reason="failed", failure=self.failure)]
        if isinstance(message, Defer):
            self.deferred.add(message.ticket)
            return []
        return self.told_by_device(message)

    def told_by_device(self, message: Register | Submit | Sync) -> list[Effect]:
        device = message.device
        if device not in self.devices:
            return [Refuse(reason="device")]
        leaves = set() if isinstance(message, Sync) else set(bits(message.leaves))
        if leaves - self.leaves:
            return [refuse("leaf", leaves - self.leaves)]
        at = (self.step_of(device), device)
        if at[0] - self.num_done > 1:
            return [Refuse(reason="ahead")]
        implied = {Register: leaves, Submit: self.leaves, Sync: set()}[type(message)]
        announced = self.announced.get(at, implied)
        handed_over = self.submitted.get(at, set())
        if isinstance(message, Register) and at in self.announced:
            return [refuse("registered", handed_over)]
        if isinstance(message, Submit) and leaves - announced:
            return [refuse("unannounced", leaves - announced)]
        if isinstance(message, Submit) and leaves & handed_over:
            return [refuse("submitted", leaves & handed_over)]
        if isinstance(message, Sync):
            self.tickets[at] = message.ticket
            self.waiting_since.setdefault(at[0], self.now_s)
        self.announced[at] = announced
        for other in self.devices:
            if (theirs := self.announced.get((at[0], other), announced)) != announced:
                pair = sorted([(other, mask_of(theirs)), (device, mask_of(announced))])
                return self.fail("mismatch", at[0], *zip(*pair, strict=True))
        if isinstance(message, Sync) and handed_over != announced and self.setup.is_strict:
            return self.fail("missing", at[0], (device,), (mask_of(announced - handed_over),))
        if isinstance(message, Sync):
            self.submitted[at] = announced
        if isinstance(message, Submit):
            self.submitted[at] = handed_over | leaves
        return self.go_on()

    def go_on(self) -> list[Effect]:
        """Launches and answers all that is due."""
        if self.failure is not None:
            return []
        effects: list[Effect] = []
        for number in itertools.count(self.num_done):
            while self.has_next(number):
                effects += self.launch_next(number)
            if self.launched.get(number, 0) < len(self.buckets) or number > self.num_done:
                break
        while all((self.num_done, device) in self.tickets for device in self.devices):
            number = self.num_done
            if self.launched.get(number, 0) < len(self.buckets) or self.running.get(number):
                break
            tickets = [(device, self.tickets[number, device]) for device in self.devices]
            effects += [Answer(ticket=ticket, step=number, device=device) for device, ticket in tickets]
            effects.append(Forget(step=number))
            self.num_done += 1
            if self.num_done in self.waiting_since:
                self.waiting_since[self.num_done] = self.now_s
        return effects

    def has_next(self, number: int) -> bool:
        at = self.launched.get(number, 0)
        if at == len(self.buckets) or any((number, d) not in self.announced for d in self.devices):
            return False
        due = self.buckets[at] & self.announced[number, 0]
        return all(due <= self.submitted.get((number, device), set()) for device in self.devices)

    def launch_next(self, number: int) -> list[Effect]:
        at = self.launched.get(number, 0)
        due = self.buckets[at] & self.announced[number, 0]
        self.launched[number] = at + 1
        if at + 1 == len(self.buckets) and number in self.waiting_since:
            self.waiting_since[number] = self.now_s
            self.warned.discard(number)
        if not due:
            return []
        self.running[number] = self.running.get(number, 0) + 1
        return [Launch(step=number, bucket=at, leaves=mask_of(due))]

    def owed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        number = self.num_done
        known = [self.announced[number, d] for d in self.devices if (number, d) in self.announced]
        devices = tuple(d for d in self.devices if (number, d) not in self.tickets) if known else ()
        owed = ((known or [set()])[0] - self.submitted.get((number, d), set()) for d in devices)
        return devices, tuple(mask_of(leaves) for leaves in owed)

    def time(self, now_s: float) -> list[Effect]:
        self.now_s = max(now_s, self.now_s)
        if self.failure is not None or self.num_done not in self.waiting_since:
            return []
        waited_s = self.now_s - self.waiting_since[self.num_done]
        devices, leaves = self.owed()
        if waited_s >= self.setup.timeout_s:
            return self.fail("timeout" if devices else "stuck", self.num_done, devices, leaves)
        if waited_s >= self.setup.stall_s and self.num_done not in self.warned:
            self.warned.add(self.num_done)
            return [Warn(step=self.num_done, devices=devices, leaves=leaves)]
        return []

    def fail(
        self,
        kind: str,
        number: int,
        devices: tuple[int, ...],
        leaves: tuple[int, ...],
        cause: int | None = None,
    ) -> list[Effect]:
        if self.failure is not None:
            return []
        self.failure = Failure(kind=kind, step=number, devices=devices, leaves=leaves, cause=cause)
        waiting = sorted(at for at in self.tickets if at[0] >= self.num_done)
        return list(rejects(self.failure, *(self.tickets[at] for at in waiting)))

    def close(self) -> list[Effect]:
        if self.is_closed:
            return []
        self.is_closed = True
        devices, leaves = self.owed() if self.failure is None else ((), ())
        closed = Failure(kind="closed", step=self.num_done, devices=devices, leaves=leaves)
        effects = self.fail("closed", self.num_done, devices, leaves)
        effects += [Reject(ticket=ticket, failure=closed) for ticket in sorted(self.deferred)]
        self.deferred = set()
        return [*effects, Stop()]


def mask_of(leaves: Iterable[int]) -> int:
    return sum(1 << leaf for leaf in leaves)


def refuse(reason: str, leaves: set[int]) -> Refuse:
    return Refuse(reason=reason, leaves=mask_of(leaves))


class Devices(RuleBasedStateMachine):
    """2 to 8 devices that mostly do what is right, and sometimes anything."""

    @initialize(
        num_devices=st.integers(2, 8),
        owners=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        is_strict=st.booleans(),
        is_whole=st.booleans(),
    )
    def start(self, num_devices: int, owners: list[int], is_strict: bool, is_whole: bool) -> None:
        buckets = [mask_of(leaf for leaf, owner in enumerate(owners) if owner == b) for b in range(4)]
        state = make_state(num_devices, tuple(leaves for leaves in buckets if leaves), is_strict=is_strict)
        self.state, self.model = state, Model(state.setup)
        self.num_devices, self.num_leaves, self.is_whole = num_devices, len(owners), is_whole
        self.num_tickets = 0
        self.effects: list[Effect] = []

    def tell(self, message: Message) -> None:
        before = self.state
        self.state, effects = step(before, message)
        assert list(effects) == self.model.told(message)
        if any(isinstance(effect, Refuse) for effect in effects):
            assert self.state == before
        self.effects += effects

    def announced_in(self, number: int) -> int:
        """What all devices announce for a step: everything, or another part of it each time."""
        everything = (1 << self.num_leaves) - 1
        return everything if self.is_whole else everything & (0b101101 >> (number % 3))

    def next_ticket(self) -> int:
        self.num_tickets += 1
        return self.num_tickets

    @rule(device=st.integers(0, 7))
    def register(self, device: int) -> None:
        device %= self.num_devices
        self.tell(register(device, self.announced_in(self.model.step_of(device))))

    @rule(device=st.integers(0, 7), part=st.integers(0, 0b111111))
    def submit_some_that_is_owed(self, device: int, part: int) -> None:
        device %= self.num_devices
        self.register_if_needed(device)
        self.tell(submit(device, self.owed(device) & part))

    @rule(devices=st.sets(st.integers(0, 7)), is_reversed=st.booleans())
    def complete_devices(self, devices: set[int], is_reversed: bool) -> None:
        for device in sorted({device % self.num_devices for device in devices}, reverse=is_reversed):
            self.register_if_needed(device)
            self.tell(submit(device, self.owed(device)))
            self.tell(sync(device, self.next_ticket()))

    @rule()
    def complete_the_oldest_step(self) -> None:
        number = self.model.num_done
        self.complete_devices({d for d in range(self.num_devices) if self.model.step_of(d) == number}, False)
        while self.model.running.get(number, 0) > 0 and self.model.failure is None:
            self.tell(Finish(step=number))

    def register_if_needed(self, device: int) -> None:
        """To submit is to announce everything, and to sync nothing."""
        is_implied = self.is_whole and self.owed(device)
        if not is_implied and (self.model.step_of(device), device) not in self.model.announced:
            self.register(device)

    def owed(self, device: int) -> int:
        number = self.model.step_of(device)
        handed_over = self.model.submitted.get((number, device), set())
        return self.announced_in(number) & ~mask_of(handed_over)

    @rule(ahead=st.integers(0, 1))
    def finish(self, ahead: int) -> None:
        self.tell(Finish(step=self.model.num_done + ahead))

    @rule(device=st.integers(0, 7))
    def sync_when_all_is_submitted(self, device: int) -> None:
        device %= self.num_devices
        if not self.model.setup.is_strict or not self.owed(device):
            if (self.model.step_of(device), device) not in self.model.announced:
                self.register(device)
            self.tell(sync(device, self.next_ticket()))

    @rule(seconds=st.sampled_from([0.0, 4.0, 10.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.tell(tick(self.model.now_s + seconds))

    @rule()
    def defer(self) -> None:
        self.tell(Defer(ticket=self.next_ticket()))

    @rule(data=st.data())
    @precondition(lambda self: self.model.deferred)
    def settle(self, data: st.DataObject) -> None:
        self.tell(Settle(ticket=data.draw(st.sampled_from(sorted(self.model.deferred)))))

    @rule(device=st.integers(-1, 8), leaves=st.integers(0, 0b1111111), is_submit=st.booleans())
    def say_what_is_refused(self, device: int, leaves: int, is_submit: bool) -> None:
        """Anything a device could say, as long as it harms nobody."""
        kind = submit if is_submit else register
        for message in (kind(device, leaves), kind(device % self.num_devices, leaves % 2**self.num_leaves)):
            if any(isinstance(effect, Refuse) for effect in step(self.state, message)[1]):
                self.tell(message)

    @rule(number=st.integers(-1, 5), ticket=st.integers(0, 30))
    def name_what_is_not_there(self, number: int, ticket: int) -> None:
        self.tell(Finish(step=number))
        self.tell(Settle(ticket=ticket))

    @rule(
        dice=st.integers(0, 4),
        message=st.one_of(
            st.builds(Register, device=st.integers(0, 7), leaves=st.integers(0, 63)),
            st.builds(Submit, device=st.integers(0, 7), leaves=st.integers(0, 63)),
            st.builds(Sync, device=st.integers(0, 7), ticket=st.integers(1000, 2000)),
        ),
    )
    def say_anything(self, dice: int, message: Message) -> None:
        """Seldom, since most of it is the end."""
        if dice == 2:
            self.tell(message)

    @rule(
        dice=st.integers(0, 4),
        message=st.one_of(
            st.builds(Tick, now_s=st.sampled_from([0.0, 1000.0])),
            st.builds(Fail, cause=st.integers(1, 3), devices=st.sampled_from([(), (0,), (0, 1)])),
            st.just(Close()),
        ),
    )
    def end(self, dice: int, message: Message) -> None:
        if dice == 2:
            self.tell(message)

    @invariant()
    def every_ticket_is_answered_at_most_once(self) -> None:
        answered = self.answered()
        assert len(answered) == len(set(answered))

    @invariant()
    def at_most_two_steps_are_open(self) -> None:
        assert len(self.state.steps) <= 2

    @invariant()
    def launches_are_in_order_each_once(self) -> None:
        launches = [(e.step, e.bucket) for e in self.effects if isinstance(e, Launch)]
        assert launches == sorted(set(launches))

    def answered(self) -> list[int]:
        return [effect.ticket for effect in self.effects if isinstance(effect, Answer | Reject)]

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        self.tell(Close())
        self.tell(Close())
        self.tell(sync(0, 3000))
        assert set(self.model.tickets.values()) <= set(self.answered())
        assert self.effects.count(Stop()) == 1
        self.every_ticket_is_answered_at_most_once()


Devices.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, derandomize=True, deadline=None
)
test_any_messages_have_the_effects_of_the_model = Devices.TestCase
