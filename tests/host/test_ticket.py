"""Ticket on its own: one answer, for every kind of waiter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxsync.errors import ClosedError, TicketTimeoutError, WrongThreadError
from jaxsync.host.ticket import Ticket, raising

pytestmark = pytest.mark.timeout(60)


def make_ticket(
    poke: Callable[[], None] = lambda: None, is_loop_thread: Callable[[], bool] = lambda: False
) -> Ticket[Any]:
    return Ticket("the answer", poke=poke, is_loop_thread=is_loop_thread)


def test_an_answer_that_is_there_is_returned_at_once_and_again() -> None:
    ticket = make_ticket()
    assert not ticket.done()
    assert repr(ticket) == "<Ticket the answer: pending>"
    ticket.answer(lambda: 5)
    assert ticket.done()
    assert repr(ticket) == "<Ticket the answer: done>"
    assert [ticket.wait(), ticket.wait(timeout=0)] == [5, 5]


def test_the_first_answer_counts() -> None:
    ticket = make_ticket()
    ticket.answer(lambda: 1)
    ticket.answer(lambda: 2)
    assert ticket.wait() == 1


def test_waiters_on_several_threads_get_the_answer() -> None:
    ticket = make_ticket()
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(ticket.wait) for _ in range(8)]
        pool.submit(ticket.answer, lambda: 5)
        assert [future.result(timeout=30) for future in waiting] == [5] * 8


def test_an_answer_comes_while_its_waiter_sleeps_between_looks() -> None:
    """The waiter pokes before it sleeps, and here that is what brings the answer."""
    pokes: list[int] = []

    def poke() -> None:
        pokes.append(1)
        if len(pokes) == 3:  # the waiter has slept twice, and looked again
            ticket.answer(lambda: 5)

    ticket = make_ticket(poke)
    assert ticket.wait() == 5
    assert len(pokes) == 3


@pytest.mark.parametrize("timeout", [0, 0.01, -1])
def test_a_wait_that_is_over_raises_and_can_be_repeated(timeout: float) -> None:
    ticket = make_ticket()
    for _ in range(2):
        assert not ticket.wait_until_done(timeout)
        with pytest.raises(TicketTimeoutError) as caught:
            ticket.wait(timeout)
        assert (caught.value.what_for, caught.value.timeout_s) == ("the answer", timeout)
    ticket.answer(lambda: 5)
    assert ticket.wait(timeout) == 5


def test_each_waiter_gets_an_error_of_its_own() -> None:
    ticket = make_ticket()
    ticket.answer(raising(lambda: ClosedError(function="wait")))
    found = []
    for _ in range(2):
        with pytest.raises(ClosedError) as caught:
            ticket.wait()
        found.append(caught.value)
    assert found[0] is not found[1]
    assert str(found[0]) == str(found[1])


def test_waiting_without_looking_does_not_count_as_seen() -> None:
    ticket = make_ticket()
    ticket.answer(raising(lambda: ClosedError(function="wait")))
    assert ticket.wait_until_done()
    assert not ticket.is_observed
    with pytest.raises(ClosedError):
        ticket.wait()
    assert ticket.is_observed


def test_the_thread_that_answers_may_look_and_not_wait() -> None:
    here = threading.get_ident()
    ticket = make_ticket(is_loop_thread=lambda: threading.get_ident() == here)

    async def wait() -> Any:
        return await ticket

    calls: list[Callable[[], Any]] = [ticket.wait, ticket.wait_until_done, lambda: asyncio.run(wait())]
    for call in calls:
        with pytest.raises(WrongThreadError) as caught:
            call()
        assert caught.value.function == "waiting for the answer"
    ticket.answer(lambda: 5)
    assert [call() for call in calls] == [5, True, 5]


def test_an_awaited_ticket_is_answered_from_another_thread() -> None:
    async def main() -> list[Any]:
        ticket = make_ticket()

        async def wait() -> Any:
            return await ticket

        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(ticket.answer, lambda: 5)
        return [*await asyncio.gather(*waiting), await ticket]

    assert asyncio.run(main()) == [5] * 4


def test_an_await_raises_what_the_ticket_was_answered_with() -> None:
    async def main() -> None:
        ticket = make_ticket()
        asyncio.get_running_loop().call_soon(ticket.answer, raising(lambda: ClosedError(function="wait")))
        await ticket

    with pytest.raises(ClosedError):
        asyncio.run(main())


def test_a_cancelled_await_harms_nobody() -> None:
    async def main() -> Any:
        ticket = make_ticket()

        async def wait() -> Any:
            return await ticket

        gone, stays = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        ticket.answer(lambda: 5)
        return await stays

    assert asyncio.run(main()) == 5


def test_an_await_with_a_limit_of_its_own_can_be_repeated() -> None:
    async def main() -> Any:
        ticket = make_ticket()

        async def wait() -> Any:
            return await ticket

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), timeout=0.01)
        ticket.answer(lambda: 5)
        return await asyncio.wait_for(wait(), timeout=30)

    assert asyncio.run(main()) == 5


def test_an_event_loop_that_has_ended_is_no_obstacle_to_an_answer() -> None:
    ticket = make_ticket()

    async def leave() -> None:
        async def wait() -> Any:
            return await ticket

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    ticket.answer(lambda: 5)
    assert ticket.wait() == 5


def test_an_interrupted_wait_can_be_repeated() -> None:
    pokes: list[int] = []

    def interrupt() -> None:
        pokes.append(1)
        if len(pokes) == 1:
            raise KeyboardInterrupt

    ticket = make_ticket(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    ticket.answer(lambda: 5)
    assert ticket.wait() == 5
