"""Scenarios that break a naive sync protocol: each ends in the right value or in a named error.

The number in front of a section is that of the fault in the list this suite works off; the name of each test
says what happens.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsync
from jaxsync.errors import (
    ClosedError,
    DeviceCountError,
    DuplicateError,
    JaxsyncError,
    MissingGradientError,
    NotRegisteredError,
    SetMismatchError,
    StartConflictError,
    StepOverlapError,
    SubmissionError,
    SyncFailedError,
    SyncTimeoutError,
    UnknownNameError,
)

pytestmark = pytest.mark.timeout(60)

NUM_DEVICES = 4
DEVICES = range(NUM_DEVICES)
PARAMS = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
PATHS = ("['a']", "['b']")


def make_client(**config: Any) -> jaxsync.SyncClient:
    """A client with two leaves that travel alone; a hang is found after seconds, not a minute."""
    config = {"fuse_max_bytes": 0, "timeout_s": 20.0, **config}
    client = jaxsync.SyncClient(jaxsync.make_mesh({"data": NUM_DEVICES}), jaxsync.SyncConfig(**config))
    client.register_sync_parameters(PARAMS)
    return client


@pytest.fixture
def client():
    with make_client() as client:
        yield client


@pytest.fixture
def impatient():
    """Its steps are over after 0.3 s; what broke it does not matter to the next test."""
    client = make_client(timeout_s=0.3)
    yield client
    client.close()


def gradient(device: int, step: int = 0) -> dict[str, np.ndarray]:
    value = np.float32(100 * step + device)
    return {"a": np.full(2, value), "b": np.full(3, -value)}


def mean(step: int = 0) -> dict[str, np.ndarray]:
    value = np.float32(100 * step + (NUM_DEVICES - 1) / 2)
    return {"a": np.full(2, value), "b": np.full(3, -value)}


def finish(client: jaxsync.SyncClient, device: int, step: int = 0) -> Any:
    client.submit_gradient_sync(device, gradient(device, step))
    return client.submit_sync_collective(device)


def check_step(tickets: Any, step: int = 0) -> None:
    for ticket in tickets:
        check_tree(ticket.wait(), mean(step))


def check_tree(tree: Any, expected: Any) -> None:
    assert tree.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(tree[key], value)


def run_step(client: jaxsync.SyncClient, step: int = 0) -> None:
    check_step([finish(client, device, step) for device in DEVICES], step)


def outcomes(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs each job on a thread of its own: what it returned or raised."""

    def run(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def name(client: jaxsync.SyncClient, device: int) -> str:
    return str(client.mesh.devices.flat[device])


def error_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(JaxsyncError) as caught:
        call()
    return caught.value


def waiters_errors(tickets: Any) -> list[BaseException]:
    return outcomes(*[ticket.wait for ticket in tickets])


# 1


@pytest.mark.parametrize("slow", DEVICES)
def test_a_fast_device_starts_the_next_step_while_a_slow_one_is_still_in_this_one(client, slow: int) -> None:
    fast = [device for device in DEVICES if device != slow]
    first = [finish(client, device) for device in fast]
    second = [finish(client, device, 1) for device in fast]
    first.append(finish(client, slow))
    check_step(first)
    second.append(finish(client, slow, 1))
    check_step(second, 1)


def test_threads_that_only_wait_for_their_own_ticket_never_lock_each_other_out(client) -> None:
    def work(device: int) -> None:
        for step in range(50):
            check_step([finish(client, device, step)], step)

    assert outcomes(*[functools.partial(work, device) for device in DEVICES]) == [None] * NUM_DEVICES


# 2


def test_a_device_that_never_comes_is_named_to_all_who_wait(impatient) -> None:
    tickets = [finish(impatient, device) for device in (0, 1, 3)]
    for error in waiters_errors(tickets):
        assert type(error) is SyncTimeoutError
        assert (error.step, error.timeout_s) == (0, 0.3)
        assert error.owed == (
            f"{name(impatient, 2)} has not synced, nor handed over the gradients of ['a'], ['b']",
        )


# 3


def test_a_gradient_that_never_comes_is_named_with_its_device(impatient) -> None:
    tickets = [finish(impatient, device) for device in (0, 1, 3)]
    impatient.submit_gradient_sync(2, "['b']", gradient(2)["b"])
    for error in waiters_errors(tickets):
        assert type(error) is SyncTimeoutError
        assert error.owed == (f"{name(impatient, 2)} has not synced, nor handed over the gradients of ['a']",)


def test_a_sync_without_a_gradient_fails_for_all_at_once_and_names_it(client) -> None:
    tickets = [finish(client, device) for device in (0, 1, 3)]
    client.submit_gradient_sync(2, "['b']", gradient(2)["b"])
    tickets.append(client.submit_sync_collective(2))
    for error in waiters_errors(tickets):
        assert type(error) is MissingGradientError
        assert (error.step, error.device, error.leaves) == (0, name(client, 2), ("['a']",))


# 4


@pytest.mark.parametrize("announced", [("a",), ("a", "b")])
def test_a_gradient_that_no_device_hands_over_fails_at_the_first_sync(client, announced) -> None:
    for device in DEVICES:
        client.register_sync_parameters({key: PARAMS[key] for key in announced}, device=device)
        for key in announced[1:]:
            client.submit_gradient_sync(device, f"['{key}']", gradient(device)[key])
    ticket = client.submit_sync_collective(0)
    errors = [error_of(ticket.wait), error_of(lambda: client.submit_sync_collective(1))]
    for error in errors:
        assert type(error) is MissingGradientError
        assert (error.device, error.leaves) == (name(client, 0), ("['a']",))


def test_a_gradient_that_no_device_hands_over_is_zero_where_that_was_asked_for() -> None:
    with make_client(unused="zero") as client:
        for device in DEVICES:
            client.register_sync_parameters(PARAMS, device=device)
            client.submit_gradient_sync(device, "['b']", gradient(device)["b"])
        for ticket in [client.submit_sync_collective(device) for device in DEVICES]:
            check_tree(ticket.wait(), {"a": np.zeros(2, np.float32), "b": mean()["b"]})


# 5


def test_a_device_without_leaves_that_syncs_among_others_that_have_some_fails_all(client) -> None:
    tickets = [finish(client, device) for device in (0, 1, 2)]
    tickets.append(client.submit_sync_collective(3))
    for error in waiters_errors(tickets):
        assert type(error) is SetMismatchError
        assert error.problems == (
            f"{name(client, 0)} announces ['a'], ['b'], which {name(client, 3)} does not",
        )


def test_a_step_in_which_no_device_has_leaves_is_answered_with_none(client) -> None:
    for ticket in [client.submit_sync_collective(device) for device in DEVICES]:
        assert ticket.wait() == {"a": None, "b": None}
    run_step(client, 1)


# 6


def test_a_second_sync_of_a_device_belongs_to_its_next_step(client) -> None:
    first = finish(client, 0)
    extra = client.submit_sync_collective(0)
    check_step([first, *[finish(client, device) for device in (1, 2, 3)]])
    error = error_of(lambda: finish(client, 1, 1))
    assert type(error) is SetMismatchError
    assert error.step == 1
    assert error.problems == (f"{name(client, 1)} announces ['a'], ['b'], which {name(client, 0)} does not",)
    assert type(error_of(extra.wait)) is SetMismatchError


def test_a_third_sync_of_a_device_is_refused_and_harms_nobody(client) -> None:
    first, second = finish(client, 0), finish(client, 0, 1)
    error = error_of(lambda: client.submit_sync_collective(0))
    assert type(error) is StepOverlapError
    assert (error.device, error.step) == (name(client, 0), 0)
    check_step([first, *[finish(client, device) for device in (1, 2, 3)]])
    check_step([second, *[finish(client, device, 1) for device in (1, 2, 3)]], 1)


# 7


def test_a_device_that_does_one_step_more_times_out_and_the_others_are_named(impatient) -> None:
    run_step(impatient)
    error = error_of(finish(impatient, 2, 1).wait)
    assert type(error) is SyncTimeoutError
    assert error.step == 1
    others = ", ".join(name(impatient, device) for device in (0, 1, 3))
    assert error.owed == (f"{others} have not synced, nor handed over the gradients of ['a'], ['b']",)


# 8


def test_a_data_error_on_one_device_reaches_the_others_that_wait(client) -> None:
    cause = ValueError("row 17 is no number")
    tickets = [finish(client, device) for device in (0, 1, 2)]

    def broken() -> None:
        try:
            raise cause
        except ValueError as error:
            client.abort(error, 3)

    *errors, aborted = outcomes(*[ticket.wait for ticket in tickets], broken)
    assert aborted is None
    for error in errors:
        assert type(error) is SyncFailedError
        assert (error.step, error.devices, error.reason) == (0, (name(client, 3),), "ValueError was raised")
        assert error.__cause__ is cause


def test_a_device_that_stops_alone_is_named_to_the_others(impatient) -> None:
    def work(device: int) -> int:
        for step in range(3):
            if device == 1 and step == 2:  # it alone saw the stop flag
                return step
            check_step([finish(impatient, device, step)], step)
        return 3

    found = outcomes(*[functools.partial(work, device) for device in DEVICES])
    assert found.pop(1) == 2
    for error in found:
        assert type(error) is SyncTimeoutError
        assert error.step == 2
        assert error.owed == (
            f"{name(impatient, 1)} has not synced, nor handed over the gradients of ['a'], ['b']",
        )


# 9


def test_a_gradient_of_an_unregistered_leaf_raises_to_its_sender_alone(client) -> None:
    for call in (
        lambda: client.submit_gradient_sync(1, "['c']", np.zeros(2, np.float32)),
        lambda: client.submit_gradient_sync(1, {"c": np.zeros(2, np.float32), **gradient(1)}),
    ):
        error = error_of(call)
        assert type(error) is UnknownNameError
        assert (error.kind, error.names, error.known) == ("leaf", ("['c']",), PATHS)
    run_step(client)


# 10


def test_a_gradient_submitted_twice_raises_to_its_sender_and_counts_once(client) -> None:
    client.submit_gradient_sync(1, "['a']", gradient(1)["a"])
    error = error_of(lambda: client.submit_gradient_sync(1, "['a']", np.full(2, 999, np.float32)))
    assert type(error) is DuplicateError
    assert (error.function, error.device, error.step) == ("submit_gradient_sync", name(client, 1), 0)
    assert error.leaves == ("['a']",)
    client.submit_gradient_sync(1, "['b']", gradient(1)["b"])
    check_step([client.submit_sync_collective(1), *[finish(client, device) for device in (0, 2, 3)]])


# 11


def test_gradients_that_come_before_the_last_announcement_are_reduced(client) -> None:
    for device in (0, 1, 2):
        client.register_sync_parameters(PARAMS, device=device)
        client.submit_gradient_sync(device, gradient(device))
    assert client.statistics()["launches"] == 0
    client.register_sync_parameters(PARAMS, device=3)
    client.submit_gradient_sync(3, gradient(3))
    check_step([client.submit_sync_collective(device) for device in DEVICES])


# 12


def test_a_worker_that_dies_after_its_announcement_is_named(impatient) -> None:
    [death] = outcomes(functools.partial(impatient.register_sync_parameters, PARAMS, device=3))
    assert death is PARAMS
    tickets = [finish(impatient, device) for device in (0, 1, 2)]
    for error in waiters_errors(tickets):
        assert type(error) is SyncTimeoutError
        assert error.owed == (
            f"{name(impatient, 3)} has not synced, nor handed over the gradients of ['a'], ['b']",
        )


# 13


@pytest.mark.parametrize("odd", DEVICES)
def test_devices_that_announce_different_sets_fail_all_before_any_launch(client, odd: int) -> None:
    waiting = [device for device in DEVICES if device != odd]
    for device in waiting:
        client.register_sync_parameters({"b": PARAMS["b"]}, device=device)
        client.submit_gradient_sync(device, "['b']", gradient(device)["b"])
    tickets = [client.submit_sync_collective(device) for device in waiting]
    offender = error_of(lambda: client.register_sync_parameters(PARAMS, device=odd))
    first = waiting[0]
    pair = f"{name(client, odd)} announces ['a'], which {name(client, first)} does not"
    for error in [offender, *waiters_errors(tickets), error_of(lambda: client.submit_sync_collective(odd))]:
        assert type(error) is SetMismatchError
        assert (error.step, error.problems) == (0, (pair,))
    assert client.statistics()["launches"] == 0


# 14


def test_a_device_that_announces_twice_counts_once(client) -> None:
    client.register_sync_parameters(PARAMS, device=0)
    for again in (PARAMS, {"a": PARAMS["a"]}):
        error = error_of(functools.partial(client.register_sync_parameters, again, device=0))
        assert type(error) is DuplicateError
        assert (error.function, error.device) == ("register_sync_parameters", name(client, 0))
    for device in (1, 2):
        client.register_sync_parameters(PARAMS, device=device)
    tickets = [finish(client, device) for device in (0, 1, 2)]
    assert not any(ticket.done() for ticket in tickets)  # two announcements of one device are not two devices
    check_step([*tickets, finish(client, 3)])


# 15


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.register_sync_parameters(PARAMS),
        lambda client: client.register_sync_parameters(PARAMS, device=0),
        lambda client: client.submit_gradient_sync(0, gradient(0)),
        lambda client: client.submit_sync_collective(0),
        lambda client: client.defer(print),
        lambda client: client.abort(ValueError()),
        lambda client: client.__enter__(),
    ],
    ids=["register", "announce", "submit", "sync", "defer", "abort", "enter"],
)
def test_a_call_with_nobody_there_raises(call) -> None:
    client = make_client()
    client.close()
    assert type(error_of(lambda: call(client))) is ClosedError


def test_a_call_before_anything_is_registered_raises() -> None:
    with jaxsync.SyncClient(jaxsync.make_mesh({"data": NUM_DEVICES})) as client:
        for call in (
            lambda: client.submit_gradient_sync(0, gradient(0)),
            lambda: client.submit_sync_collective(0),
            lambda: client.plan,
        ):
            assert type(error_of(call)) is NotRegisteredError


# 16


@pytest.mark.parametrize(
    ("num_devices", "config", "difference"),
    [
        (2, jaxsync.SyncConfig(), "mesh: open with (data=4), asked for (data=2)"),
        (4, jaxsync.SyncConfig(reduce="sum"), "reduce='sum'"),
    ],
)
def test_a_second_start_with_other_settings_raises_and_leaves_the_first_alone(
    num_devices: int, config: jaxsync.SyncConfig, difference: str
) -> None:
    with jaxsync.start(jaxsync.make_mesh({"data": 4})) as client:
        client.register_sync_parameters(PARAMS)
        error = error_of(lambda: jaxsync.start(jaxsync.make_mesh({"data": num_devices}), config))
        assert type(error) is StartConflictError
        assert difference in error.differences[0]
        run_step(client)


# 17


def test_of_two_clients_that_work_side_by_side_one_may_go() -> None:
    with make_client() as stays:
        goes = make_client()
        tickets = [finish(stays, device) for device in (0, 1, 2)]
        run_step(goes)
        gone = weakref.ref(goes)
        del goes
        gc.collect()
        assert gone() is None
        check_step([*tickets, finish(stays, 3)])
        run_step(stays, 1)


# 18


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros(3, np.float32), "has shape (3,); wanted (2,)"),
        (np.zeros(2, np.float16), "has dtype float16; wanted float32"),
        (np.zeros(2, np.int32), "has dtype int32; wanted float32"),
    ],
)
def test_a_gradient_of_another_shape_or_dtype_raises_to_its_sender_alone(client, value, problem: str) -> None:
    error = error_of(lambda: client.submit_gradient_sync(1, "['a']", value))
    assert type(error) is SubmissionError
    assert (error.device, error.problems) == (name(client, 1), (f"grads['a'] {problem}",))
    run_step(client)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros(3, np.float32), "has shape (3,); wanted (2,)"),
        (np.zeros(2, np.float16), "has dtype float16; wanted float32"),
    ],
)
def test_a_device_that_announces_another_shape_or_dtype_fails_all(client, value, problem: str) -> None:
    tickets = [finish(client, device) for device in (0, 1, 2)]
    offender = error_of(lambda: client.register_sync_parameters({**PARAMS, "a": value}, device=3))
    for error in [offender, *waiters_errors(tickets)]:
        assert type(error) is SetMismatchError
        assert error.problems == (f"{name(client, 3)}: ['a'] {problem}",)
    assert client.statistics()["launches"] == 0


# 19


def test_what_a_late_device_says_counts_for_the_step_it_is_in(client) -> None:
    first = [finish(client, device) for device in (1, 2, 3)]
    second = [finish(client, device, 1) for device in (1, 2, 3)]
    first.append(finish(client, 0, 0))
    check_step(first, 0)
    second.append(finish(client, 0, 1))
    check_step(second, 1)


# 20


@pytest.mark.parametrize("seed", range(5))
def test_launches_are_in_plan_order_whatever_the_order_of_arrival(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = {f"w{i}": np.zeros(2, np.float32) for i in range(8)}
    with make_client() as client:
        client.register_sync_parameters(params)
        parts = [(device, key) for device in DEVICES for key in params]
        for device, key in (parts[i] for i in rng.permutation(len(parts))):
            client.submit_gradient_sync(device, f"['{key}']", np.full(2, device, np.float32))
        for ticket in [client.submit_sync_collective(int(device)) for device in rng.permutation(NUM_DEVICES)]:
            check_tree(ticket.wait(), {key: np.full(2, 1.5, np.float32) for key in params})
        launched = [event["what"] for event in json.loads(client.record()) if event["kind"] == "launch"]
    assert launched == [f"bucket {index}" for index in range(8)]


# 21


def test_gradients_that_their_sender_drops_or_writes_over_keep_their_value(client) -> None:
    for device in DEVICES:
        place = client.mesh.devices.flat[device]
        client.submit_gradient_sync(device, "['a']", jax.device_put(gradient(device)["a"], place) + 0)
        buffer = gradient(device)["b"]
        client.submit_gradient_sync(device, "['b']", buffer)
        buffer[:] = 999
        del buffer
        gc.collect()
    check_step([client.submit_sync_collective(device) for device in DEVICES])


# 22


def test_the_callers_gradients_are_left_as_they_are(client) -> None:
    given = [
        jax.device_put(gradient(device), place)
        for device, place in zip(DEVICES, client.mesh.devices.flat, strict=True)
    ]
    for device in DEVICES:
        client.submit_gradient_sync(device, given[device])
    check_step([client.submit_sync_collective(device) for device in DEVICES])
    for device in DEVICES:
        check_tree(given[device], gradient(device))


# 23


def test_whoever_waits_while_the_client_is_closed_is_told_what_was_pending() -> None:
    client = make_client()
    tickets = [finish(client, device) for device in (0, 1)]
    *errors, closed = outcomes(*[ticket.wait for ticket in tickets], client.close)
    assert closed is None
    for device, error in enumerate(errors):
        assert type(error) is ClosedError
        assert error.pending == (
            f"the sync of {name(client, device)}",
            f"{name(client, 2)}, {name(client, 3)} have not synced, nor handed over the gradients of "
            "['a'], ['b']",
        )


# 24


def test_four_threads_that_start_at_once_get_one_client() -> None:
    mesh = jaxsync.make_mesh({"data": NUM_DEVICES})
    for _ in range(25):
        barrier = threading.Barrier(4)

        def begin(barrier: threading.Barrier = barrier) -> jaxsync.SyncClient:
            barrier.wait()
            return jaxsync.start(mesh)

        found = outcomes(*[begin] * 4)
        assert len({id(client) for client in found}) == 1
        found[0].close()


# 25


def test_a_crash_while_one_waits_is_told_with_its_cause(client) -> None:
    cause = OSError("disk full")
    ticket = finish(client, 0)
    error, _ = outcomes(ticket.wait, lambda: client.abort(cause))
    assert type(error) is SyncFailedError
    assert error.__cause__ is cause
    later = error_of(lambda: client.submit_gradient_sync(1, gradient(1)))
    assert type(later) is SyncFailedError
    assert later.__cause__ is cause


def test_a_duplicate_while_one_waits_does_not_reach_the_waiter(client) -> None:
    ticket = finish(client, 0)
    client.submit_gradient_sync(1, gradient(1))
    assert type(error_of(lambda: client.submit_gradient_sync(1, gradient(1)))) is DuplicateError
    check_step([ticket, client.submit_sync_collective(1), finish(client, 2), finish(client, 3)])


# 26, 27


def test_one_reduction_that_fails_is_told_to_all_and_a_new_client_works(client) -> None:
    place = client.mesh.devices.flat[1]
    lost = jax.device_put(gradient(1), place)
    client.submit_gradient_sync(1, lost)
    lost["a"].delete()  # what a donation by the caller does
    tickets = [client.submit_sync_collective(1), *[finish(client, device) for device in (0, 2, 3)]]
    for error in waiters_errors(tickets):
        assert type(error) is SyncFailedError
        assert "deleted" in str(error.__cause__)
        assert error.__cause__.__notes__ == [f"gradient ['a'] of {name(client, 1)}"]
    with make_client() as other:
        run_step(other)


def test_close_and_start_again_after_a_failure() -> None:
    mesh = jaxsync.make_mesh({"data": NUM_DEVICES})
    for _ in range(3):
        client = jaxsync.start(mesh)
        client.register_sync_parameters(PARAMS)
        client.abort(ValueError("again"))
        client.close()
    with jaxsync.start(mesh) as client:
        client.register_sync_parameters(PARAMS)
        run_step(client)


# 28


def test_waiters_that_have_gone_away_harm_nobody(client) -> None:
    for device in (0, 1):
        finish(client, device)  # and nobody keeps the ticket
    gc.collect()
    with pytest.raises(TimeoutError):
        finish(client, 2).wait(timeout=0.01)  # and nobody waits again
    check_step([finish(client, 3)])
    run_step(client, 1)


# 29


def test_two_syncs_of_one_device_are_both_answered(client) -> None:
    first, second = finish(client, 0), finish(client, 0, 1)
    assert first is not second
    for step, ticket in enumerate((first, second)):
        check_step([*[finish(client, device, step) for device in (1, 2, 3)], ticket], step)


# 30


def test_close_joins_its_thread_and_may_be_called_again() -> None:
    before = set(threading.enumerate())
    client = make_client()
    [thread] = set(threading.enumerate()) - before
    assert thread.name == "jaxsync-loop"
    for _ in range(3):
        client.close()
        assert not thread.is_alive()
        assert client.is_closed


# 31


def test_handles_kept_across_close_raise_or_hold_their_answer() -> None:
    client = make_client()
    done = [finish(client, device) for device in DEVICES]
    check_step(done)
    pending = finish(client, 0, 1)
    submit = client.submit_gradient_sync
    client.close()
    check_step(done)
    assert type(error_of(pending.wait)) is ClosedError
    assert type(error_of(lambda: submit(0, gradient(0)))) is ClosedError


# 32


def test_a_backward_pass_that_fails_after_the_announcement_can_be_repeated(client) -> None:
    for device in DEVICES:
        client.register_sync_parameters(PARAMS, device=device)
    with pytest.raises(TypeError, match="grad requires real"):
        client.submit_gradient_sync(1, jax.grad(lambda n: n * 1.0)(jnp.int32(3)))
    error = error_of(lambda: client.submit_gradient_sync(1, {**gradient(1), "a": "no array"}))
    assert type(error) is SubmissionError
    assert error.problems == ("grads['a'] is a str, no array",)
    run_step(client)


# 33


def test_a_gradient_replaced_twice_counts_once(client) -> None:
    client.submit_gradient_sync(0, gradient(0))
    for _ in range(2):
        assert type(error_of(lambda: client.submit_gradient_sync(0, gradient(7)))) is DuplicateError
    assert client.statistics()["submissions"] == 2
    check_step([client.submit_sync_collective(0), *[finish(client, device) for device in (1, 2, 3)]])


# 34


def test_after_a_failure_nothing_of_the_step_is_kept_but_its_cause(client) -> None:
    place = client.mesh.devices.flat[0]
    kept = jax.device_put(gradient(0), place)
    alive = [weakref.ref(leaf) for leaf in kept.values()]
    client.submit_gradient_sync(0, kept)
    del kept
    ticket = client.submit_sync_collective(0)
    client.abort(ValueError("the first"))
    client.abort(KeyError("the second"))
    calls = [ticket.wait, lambda: client.submit_sync_collective(1), lambda: client.defer(print)]
    for error in map(error_of, calls):
        assert type(error) is SyncFailedError
        assert repr(error.__cause__) == "ValueError('the first')"
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


# 35


def test_a_device_cannot_queue_up_more_than_two_steps(client) -> None:
    tickets = [finish(client, 0, step) for step in range(2)]
    for call in (
        lambda: client.submit_gradient_sync(0, gradient(0, 2)),
        lambda: client.register_sync_parameters(PARAMS, device=0),
    ):
        error = error_of(call)
        assert type(error) is StepOverlapError
        assert (error.device, error.step) == (name(client, 0), 0)
    for step, ticket in enumerate(tickets):
        check_step([ticket, *[finish(client, device, step) for device in (1, 2, 3)]], step)


# 36


def test_a_step_that_stalls_is_logged_and_described(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="jaxsync"), make_client(stall_warning_s=0.05) as client:
        tickets = [finish(client, device) for device in (0, 1, 3)]
        with pytest.raises(TimeoutError):
            tickets[0].wait(timeout=0.5)
        assert "step 0: of 2 buckets 0 are launched and 0 finished" in client.describe()
        check_step([*tickets, finish(client, 2)])
    [record] = caplog.records
    assert record.threadName == "jaxsync-loop"
    assert record.getMessage() == (
        f"step 0 has waited for 0.05 s: {name(client, 2)} has not synced, nor handed over the gradients of "
        "['a'], ['b']"
    )


# 37


def test_too_few_devices_are_an_error_and_not_a_smaller_test() -> None:
    error = error_of(lambda: jaxsync.make_mesh({"data": 16}))
    assert type(error) is DeviceCountError
    assert (error.asked, error.found) == (16, 8)
