"""A client in a notebook: cells that are run again, interrupted, awaited, and a kernel that is restarted."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

LIMIT_S = 60.0

SETUP = """
    import asyncio, gc, sys, threading
    import jax, numpy as np, jaxsync
    from jaxsync.errors import ClosedError

    jaxsync.simulate_devices(2)
    mesh = jaxsync.make_mesh({"data": 2})
    params = {"w": np.zeros(3, np.float32)}
    gradients = [jax.device_put(np.full(3, 2.0 * i, np.float32), d) for i, d in enumerate(jax.devices())]
    client = tickets = ticket = None
    sys.last_value = sys.last_traceback = sys.last_exc = None  # a failed cell's frames

    def loops():
        gc.collect()
        return [thread.name for thread in threading.enumerate()].count("jaxsync-loop")

    def submit(client, index):
        client.submit_gradient_sync(index, {"w": gradients[index]})
        return client.submit_sync_collective(index)
"""

SYNC = """
    client = {make}
    client.register_sync_parameters(params)
    tickets = [submit(client, index) for index in range(2)]
    loops(), tickets[0].wait()["w"].tolist()
"""


class OneSpec(KernelSpecManager):
    """The kernel of the running interpreter, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, language="python")


class Kernel:
    """A kernel, and what its cells answer."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_spec_manager=OneSpec())
        self.manager.start_kernel()
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, cell: str, on_output: Callable[[], None] = lambda: None) -> str:
        """What the cell's last line is worth, or the name of the exception it ended with."""
        found: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "execute_result":
                    found.append(content["data"]["text/plain"])
                case "error":
                    found.append(content["ename"])
                case "stream":
                    on_output()

        cell = textwrap.dedent(cell)
        self.client.execute_interactive(cell, timeout=LIMIT_S, output_hook=hook, allow_stdin=False)
        return found[-1] if found else ""

    def interrupt(self, cell: str) -> str:
        """As `run`, with an interrupt once the cell has printed something."""
        return self.run(cell, on_output=self.manager.interrupt_kernel)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel()
        self.connect()

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()

    def pid(self) -> int:
        return int(self.run("import os; os.getpid()"))


@pytest.fixture(scope="module")
def process() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        yield kernel
    finally:
        kernel.end()


@pytest.fixture
def kernel(process: Kernel) -> Kernel:
    """Set up, and without a client."""
    assert process.run(SETUP) == ""
    assert process.run("loops()") == "0"
    return process


@pytest.mark.parametrize("make", ["jaxsync.start(mesh)", "jaxsync.SyncClient(mesh)"])
def test_a_cell_that_is_run_again_leaves_one_loop(kernel: Kernel, make: str) -> None:
    for _ in range(4):
        assert kernel.run(SYNC.format(make=make)) == "(1, [1.0, 1.0, 1.0])"
    assert kernel.run("client = tickets = None; loops()") == "0"


@pytest.mark.parametrize(("make", "left"), [("jaxsync.start(mesh)", 1), ("jaxsync.SyncClient(mesh)", 2)])
def test_a_cell_that_failed_can_be_run_again(kernel: Kernel, make: str, left: int) -> None:
    """Python keeps the frames of the last error, and with them the client that raised it: that one only."""
    for _ in range(3):
        assert kernel.run(f"client = {make}; client.submit_sync_collective(0)") == "NotRegisteredError"
    assert kernel.run(SYNC.format(make=make)) == f"({left}, [1.0, 1.0, 1.0])"
    assert kernel.run("1 / 0") == "ZeroDivisionError"
    assert kernel.run("loops()") == "1"


def test_an_interrupt_ends_a_wait_and_the_next_cell_works(kernel: Kernel) -> None:
    kernel.run("client = jaxsync.start(mesh); client.register_sync_parameters(params)")
    kernel.run("ticket = submit(client, 0)")
    for _ in range(3):
        assert kernel.interrupt("print('waits', flush=True); ticket.wait()") == "KeyboardInterrupt"
    assert kernel.run("submit(client, 1).wait()['w'].tolist()") == "[1.0, 1.0, 1.0]"
    assert kernel.run("ticket.wait()['w'].tolist()") == "[1.0, 1.0, 1.0]"
    assert kernel.run(SYNC.format(make="jaxsync.start(mesh)")) == "(1, [1.0, 1.0, 1.0])"


def test_a_ticket_can_be_awaited_in_a_cell(kernel: Kernel) -> None:
    kernel.run("client = jaxsync.start(mesh); client.register_sync_parameters(params)")
    cell = """
        tickets = [submit(client, index) for index in range(2)]
        [value["w"].tolist() for value in await asyncio.gather(*tickets)]
    """
    assert kernel.run(cell) == "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]"
    assert kernel.run("await client.defer(lambda value: float(value.sum()), gradients[1])") == "6.0"


def test_a_kernel_restarts_in_the_middle_of_a_step_and_leaves_no_process(kernel: Kernel) -> None:
    kernel.run("client = jaxsync.start(mesh); client.register_sync_parameters(params)")
    kernel.run("ticket = submit(client, 0)")
    before = kernel.pid()
    kernel.restart()
    assert kernel.pid() != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert kernel.run(SETUP) == ""
    assert kernel.run(SYNC.format(make="jaxsync.start(mesh)")) == "(1, [1.0, 1.0, 1.0])"
