"""Ctrl-C at every place of every public call leaves no lock held, and a client that goes on.

Python tells a signal's handler between two bytecodes, so a KeyboardInterrupt is raised before every bytecode
that the call runs in the host modules, and after every C function it calls there: the first stands for what
may strike, the second is where it mostly does. Left out is where no signal can strike, for Python looks for
signals when it calls and when it jumps back: `try:` itself, the end of a generator that is dropped, and a
`with` block's last bytecodes, from the end of its body to the call of `__exit__`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsync
from jaxsync.errors import (
    ClosedError,
    DuplicateError,
    MissingGradientError,
    SetMismatchError,
    SyncFailedError,
    TicketTimeoutError,
)
from jaxsync.host.launcher import CPU_WINDOW, process_launcher

PACKAGE = pathlib.Path(jaxsync.__file__).parent
WATCHED = (
    str(PACKAGE / "host") + "/",
    *(str(PACKAGE / f"{name}.py") for name in ("client", "calls", "progress", "exchange", "callbacks")),
    *(str(PACKAGE / f"{name}.py") for name in ("reductions", "registration", "submission", "crossing")),
)
PARAMS = {"w": np.zeros(3, np.float32)}
WAIT_S = 20.0
TOOL = 4  # of sys.monitoring


@functools.cache
def is_watched(code: CodeType) -> bool:
    return code.co_filename.startswith(WATCHED)


@functools.cache
def unreachable(code: CodeType) -> frozenset[int]:
    """Offsets of `try:`, of a generator's end, and from a `with` block's end to the call of `__exit__`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "PRECALL"]
    found = {step.offset for step in steps if step.opname == "NOP"}
    for step, following in itertools.pairwise(steps):
        if step.opname == "CALL_INTRINSIC_1" and "STOPITERATION" in step.argrepr:
            found |= {step.offset, following.offset}
    for index in range(len(steps) - 3):
        leave = steps[index : index + 4]
        if all(step.argval is None and step.opname == "LOAD_CONST" for step in leave[:3]) and (
            leave[3].opname == "CALL" and leave[3].argval == 2
        ):
            start = index - 1 if steps[index - 1].opname == "SWAP" else index
            found.update(range(steps[start].offset, leave[3].offset + 2, 2))
    return frozenset(found)


class Interrupt:
    """Raises KeyboardInterrupt in the thread that enters it, at the place with a number."""

    def __init__(self, where: str, number: int) -> None:
        self.is_before_bytecode = where == "before a bytecode"
        self.left = number
        self.struck = False

    def __enter__(self) -> Interrupt:
        self.thread = threading.get_ident()
        if not self.is_before_bytecode:
            sys.setprofile(self.after_call)
        elif sys.version_info >= (3, 12):  # there settrace leaves out the bytecodes of a frame's first run
            events = sys.monitoring.events
            sys.monitoring.use_tool_id(TOOL, "interrupt")
            sys.monitoring.register_callback(TOOL, events.INSTRUCTION, self.before_instruction)
            sys.monitoring.set_events(TOOL, events.INSTRUCTION)
            sys.monitoring.restart_events()
        else:
            self.before = sys.gettrace()
            sys.settrace(self.enter_frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if not self.is_before_bytecode:
            sys.setprofile(None)
        elif sys.version_info >= (3, 12):
            sys.monitoring.set_events(TOOL, 0)
            sys.monitoring.free_tool_id(TOOL)
        else:
            sys.settrace(self.before)
        return kind is KeyboardInterrupt and self.struck

    def enter_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if not is_watched(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.before_bytecode

    def before_bytecode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.count(frame.f_code, frame.f_lasti)
        return self.before_bytecode

    def before_instruction(self, code: CodeType, offset: int) -> Any:
        if not is_watched(code):
            return sys.monitoring.DISABLE
        if threading.get_ident() == self.thread:
            self.count(code, offset)
        return None

    def after_call(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "c_return" and is_watched(frame.f_code):
            self.count(frame.f_code, -1)

    def count(self, code: CodeType, offset: int) -> None:
        if offset in unreachable(code):
            return
        if self.left == 0 and not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        self.left -= 1


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jaxsync.make_mesh({"data": 2})


@functools.cache
def gradient(index: int) -> Any:
    return jax.device_put({"w": np.full(3, 2.0 * index, np.float32)}, place(index))


def place(index: int) -> jax.Device:
    return list(mesh().devices.flat)[index]


def registered() -> jaxsync.SyncClient:
    client = jaxsync.SyncClient(mesh())
    client.register_sync_parameters(PARAMS)
    return client


def again(call: Callable[[], object]) -> None:
    """Repeats what was interrupted: it had been done, or it is done now."""
    try:
        call()
    except DuplicateError:
        return


def submit(client: jaxsync.SyncClient, index: int) -> None:
    client.submit_gradient_sync(index, gradient(index))


def finish_step(client: jaxsync.SyncClient) -> None:
    """Both devices hand over what they have not, and get the mean."""
    for index in range(2):
        again(lambda index=index: submit(client, index))
    check(*[client.submit_sync_collective(index) for index in range(2)])


def check(*tickets: Any) -> None:
    for ticket in tickets:
        np.testing.assert_array_equal(ticket.wait(WAIT_S)["w"], [1.0, 1.0, 1.0])


def num_loops() -> int:
    return sum(thread.name == "jaxsync-loop" for thread in threading.enumerate())


# Each runs once for each place: up to the first yield it prepares the call that it yields, and after it
# looks at what the interrupted call has left. It ends with a client that is closed.
Scene = Callable[[], Iterator[Callable[[], object]]]


def announcing() -> Iterator[Callable[[], object]]:
    with registered() as client:
        announce = functools.partial(client.register_sync_parameters, PARAMS, device=0)
        yield announce
        again(announce)
        client.register_sync_parameters(PARAMS, device=1)
        finish_step(client)


def announcing_first() -> Iterator[Callable[[], object]]:
    with jaxsync.SyncClient(mesh()) as client:
        announce = functools.partial(client.register_sync_parameters, PARAMS, device=0)
        yield announce
        again(announce)
        finish_step(client)


def registering() -> Iterator[Callable[[], object]]:
    with jaxsync.SyncClient(mesh()) as client:
        register = functools.partial(client.register_sync_parameters, PARAMS)
        yield register
        register()
        finish_step(client)


def registering_others() -> Iterator[Callable[[], object]]:
    with jaxsync.SyncClient(mesh()) as client:
        client.register_sync_parameters({"a": np.zeros(2, np.float32), "z": np.zeros(5, np.float32)})
        register = functools.partial(client.register_sync_parameters, PARAMS)
        yield register
        register()
        finish_step(client)


def submitting() -> Iterator[Callable[[], object]]:
    with registered() as client:
        yield lambda: submit(client, 0)
        again(lambda: submit(client, 0))
        finish_step(client)


def syncing() -> Iterator[Callable[[], object]]:
    with registered() as client:
        for index in range(2):
            submit(client, index)
        yield lambda: client.submit_sync_collective(0)
        tickets = [client.submit_sync_collective(0)] if owes(client, 0) else []
        check(*tickets, client.submit_sync_collective(1))
        finish_step(client)


def owes(client: jaxsync.SyncClient, index: int) -> bool:
    lines = [line for line in client.describe().splitlines() if "not synced" in line]
    return any(str(place(index)) in line for line in lines)


def waiting() -> Iterator[Callable[[], object]]:
    with registered() as client:
        for index in range(2):
            submit(client, index)
        tickets = [client.submit_sync_collective(index) for index in range(2)]
        yield tickets[0].wait
        check(*tickets)
        finish_step(client)


def waiting_in_vain() -> Iterator[Callable[[], object]]:
    with registered() as client:
        submit(client, 0)
        ticket = client.submit_sync_collective(0)
        yield lambda: wait_in_vain(ticket)
        submit(client, 1)
        check(ticket, client.submit_sync_collective(1))


def wait_in_vain(ticket: Any) -> None:
    with pytest.raises(TicketTimeoutError):
        ticket.wait(0.002)


def deferring() -> Iterator[Callable[[], object]]:
    with registered() as client:
        seen: list[np.ndarray] = []
        defer = functools.partial(client.defer, seen.append, gradient(0)["w"])
        yield defer
        defer().wait(WAIT_S)
        client.defer(int).wait(WAIT_S)
        assert 1 <= len(seen) <= 2
        assert "\n0 callbacks wait\n" in client.describe()
        finish_step(client)


def closing() -> Iterator[Callable[[], object]]:
    client = registered()
    submit(client, 0)
    ticket, called = client.submit_sync_collective(0), client.defer(lambda: 3)
    yield client.close
    client.describe()
    client.close()
    assert called.wait(WAIT_S) == 3
    with pytest.raises(ClosedError):
        ticket.wait(WAIT_S)


def aborting() -> Iterator[Callable[[], object]]:
    client = registered()
    submit(client, 0)
    ticket = client.submit_sync_collective(0)
    abort = functools.partial(client.abort, ValueError("own"), 1)
    yield abort
    abort()
    with pytest.raises(SyncFailedError):
        ticket.wait(WAIT_S)
    client.close()


def looking() -> Iterator[Callable[[], object]]:
    with registered() as client:
        submit(client, 0)
        ticket = client.submit_sync_collective(0)
        yield lambda: (client.describe(), client.open_steps(), client.statistics(), client.record())
        submit(client, 1)
        check(ticket, client.submit_sync_collective(1))


def making() -> Iterator[Callable[[], object]]:
    made: list[jaxsync.SyncClient] = []
    yield lambda: made.append(jaxsync.SyncClient(mesh()))
    made.clear()
    with registered() as client:
        finish_step(client)


def dropping() -> Iterator[Callable[[], object]]:
    made = [registered()]
    submit(made[0], 0)
    ticket, called = made[0].submit_sync_collective(0), made[0].defer(lambda: 3)
    finalizer = made[0]._finalizer  # called here: Python would only print what strikes while it collects
    yield finalizer
    made.clear()
    assert called.wait(WAIT_S) == 3
    with pytest.raises(ClosedError):
        ticket.wait(WAIT_S)


def starting() -> Iterator[Callable[[], object]]:
    made: list[jaxsync.SyncClient] = []
    yield lambda: made.append(jaxsync.start(mesh()))
    with jaxsync.start(mesh()) as client:
        assert jaxsync.start(mesh()) is client
        client.register_sync_parameters(PARAMS)
        finish_step(client)


def launching() -> Iterator[Callable[[], object]]:
    guarded = jaxsync.guard_dispatch(increment)
    yield lambda: guarded(jnp.zeros(2))
    for _ in range(2 * CPU_WINDOW):
        value = guarded(jnp.zeros(2))
        assert process_launcher().num_in_flight <= CPU_WINDOW
    np.testing.assert_array_equal(value, [1.0, 1.0])


increment = jax.jit(lambda x: x + 1)


SCENES: list[Scene] = [
    announcing,
    announcing_first,
    registering,
    registering_others,
    submitting,
    syncing,
    waiting,
    waiting_in_vain,
    deferring,
    closing,
    aborting,
    looking,
    making,
    dropping,
    starting,
    launching,
]


def play(scene: Scene, where: str, number: int) -> bool:
    """Plays a scene with an interrupt at one place of its call. Whether there is such a place."""
    acts = scene()
    call = next(acts)
    with Interrupt(where, number) as interrupt:
        call()
    del call
    assert next(acts, None) is None
    return interrupt.struck


@pytest.mark.parametrize("where", ["before a bytecode", "after a C call"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_an_interrupt_at_any_place_harms_nobody(scene: Scene, where: str, record_property) -> None:
    number = 0
    while play(scene, where, number):
        number += 1
    gc.collect()
    assert num_loops() == 0
    assert number >= (50 if where == "before a bytecode" else 3)
    record_property("interrupts", number)


class Handle(Interrupt):
    """Does something in that thread instead, as a signal's handler may."""

    def __init__(self, number: int, what: Callable[[], object]) -> None:
        super().__init__("after a C call", number)
        self.what = what

    def count(self, code: CodeType, offset: int) -> None:
        try:
            super().count(code, offset)
        except KeyboardInterrupt:
            self.what()


@pytest.mark.parametrize("call", ["submit", "sync", "register"])
def test_a_signals_handler_may_abort_in_the_middle_of_any_call(call: str) -> None:
    """Even where the call holds the lock under which messages are taken."""
    cause, number, struck = OSError("told to stop"), 0, True
    while struck:
        client = registered()
        submit(client, 1)
        ticket = client.submit_sync_collective(1)
        calls = {
            "submit": lambda client=client: submit(client, 0),
            "sync": lambda client=client: client.submit_sync_collective(0),
            "register": lambda client=client: client.register_sync_parameters(PARAMS, device=0),
        }
        with (
            Handle(number, lambda client=client: client.abort(cause)) as handle,
            contextlib.suppress(SyncFailedError, MissingGradientError, SetMismatchError),
        ):
            calls[call]()
        struck, number = handle.struck, number + 1
        if struck:
            with pytest.raises((SyncFailedError, MissingGradientError, SetMismatchError)):
                ticket.wait(WAIT_S)
        client.close()
    assert number > 10


def test_a_signals_handler_that_closes_in_the_middle_of_a_call_ends_the_client_in_the_end() -> None:
    outcomes = set()
    for number in range(0, 60, 4):
        client = registered()

        def close(client: jaxsync.SyncClient = client) -> None:
            try:
                client.close(0.1)
                outcomes.add("closed")
            except TimeoutError:
                outcomes.add("asked to")

        with Handle(number, close), contextlib.suppress(ClosedError):
            submit(client, 0)
        client.close()
        assert client.is_closed
    assert outcomes == {"closed", "asked to"}


SIGNALS = """
    import contextlib, gc, os, queue, random, signal, sys, threading, time
    import jax, numpy as np, jaxsync
    from jaxsync.errors import DuplicateError

    gc.disable()  # a signal that strikes in the callback that JAX has there is lost, and nobody can tell
    jaxsync.simulate_devices(2)
    mesh = jaxsync.make_mesh({"data": 2})
    gradients = [jax.device_put(np.full(3, 2.0 * i, np.float32), d) for i, d in enumerate(jax.devices())]
    names = [str(d) for d in jax.devices()]
    asked = queue.SimpleQueue()  # for a signal, after so many seconds
    sent_s, num_lost = 0.0, 0
    struck = threading.Event()

    def send():
        global sent_s, num_lost
        while (delay_s := asked.get()) is not None:
            threading.Event().wait(delay_s)
            while True:
                sent_s = time.monotonic()
                os.kill(os.getpid(), signal.SIGINT)
                if struck.wait(5):
                    break
                num_lost += 1  # in a callback of a weak reference, say: nobody is told of that one
            struck.clear()

    def submit(index):
        with contextlib.suppress(DuplicateError):
            client.submit_gradient_sync(index, {"w": gradients[index]})

    def step():
        for index in range(2):
            submit(index)
        for ticket in [client.submit_sync_collective(index) for index in range(2)]:
            value = ticket.wait(20)["w"]
            assert value.tolist() == [1.0, 1.0, 1.0], value
        client.defer(lambda value: None, value)
        client.describe()

    def owe():
        lines = [line for line in client.describe().splitlines() if "not synced" in line]
        return [index for index in range(2) if any(names[index] in line for line in lines)]

    def interrupted(work, delay_s):
        try:
            asked.put(delay_s)
            while True:
                work()
        except KeyboardInterrupt:
            took_s = time.monotonic() - sent_s
            struck.set()
            return took_s

    client = jaxsync.SyncClient(mesh)
    client.register_sync_parameters({"w": np.zeros(3, np.float32)})
    step()
    sender = threading.Thread(target=send)
    sender.start()
    random.seed(0)
    busy_s = []
    for _ in range(120):
        busy_s.append(interrupted(step, random.uniform(0, 0.003)))
        for index in owe():
            submit(index)
            client.submit_sync_collective(index)
        step()
    submit(0)
    ticket = client.submit_sync_collective(0)
    waiting_s = [interrupted(ticket.wait, random.uniform(0, 0.02)) for _ in range(100)]
    submit(1)
    client.submit_sync_collective(1)
    assert ticket.wait(20)["w"].tolist() == [1.0, 1.0, 1.0]
    never = threading.Event()
    callback = client.defer(never.wait)
    closing_s = interrupted(lambda: client.close(20), 0.1)
    never.set()
    asked.put(None)
    sender.join()
    client.close()
    assert callback.wait(20) is True
    print(len(busy_s), len(waiting_s), max(waiting_s) < 2, closing_s < 2, num_lost <= 1)
    print(f"step {max(busy_s):.4f} s, wait {max(waiting_s):.4f} s, close {closing_s:.4f} s")
"""


def test_real_signals_end_every_wait_and_the_client_goes_on(run_python, record_property) -> None:
    done = run_python(SIGNALS, timeout_s=100)
    assert (done.returncode, done.stderr) == (0, "")
    counts, measured = done.stdout.splitlines()
    assert counts == "120 100 True True True"
    record_property("slowest", measured)
