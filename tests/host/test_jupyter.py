"""A client in a notebook: cells that are run again, interrupted, awaited, and a kernel that is restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

LIMIT_S = 60.0

SETUP = """
    import asyncio, gc, threading
    import jax, numpy as np, jaxsync

    jaxsync.simulate_devices(2)
    mesh = jaxsync.make_mesh({"data": 2})
    params = {"w": np.zeros(3, np.float32)}
    gradients = [jax.device_put(np.full(3, 2.0 * i, np.float32), d) for i, d in enumerate(jax.devices())]

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
    {wait}
    loops(), synced["w"].tolist()
"""


class Kernel:
    """A kernel of the running interpreter, and what its cells answer."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.connect()

    def connect(self) -> None:
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, cell: str, on_output: Callable[[str], None] | None = None) -> str:
        """What the cell's last line is, or the name of the exception it ended with."""
        found: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "execute_result":
                found.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                found.append(content["ename"])
            elif message["msg_type"] == "stream" and on_output is not None:
                on_output(content["text"])

        self.client.execute_interactive(
            textwrap.dedent(cell), timeout=LIMIT_S, output_hook=hook, allow_stdin=False
        )
        return found[-1] if found else ""

    def interrupt(self, cell: str) -> str:
        """As `run`, with an interrupt after the cell has printed its first line."""
        return self.run(cell, on_output=lambda text: self.manager.interrupt_kernel())

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self.connect()

    @property
    def pid(self) -> int:
        return int(self.run("import os; os.getpid()"))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    manager.start_kernel(stderr=subprocess.DEVNULL)
    kernel = None
    try:
        kernel = Kernel(manager)
        yield kernel
    finally:
        if kernel is not None:
            kernel.client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@pytest.fixture
def fresh(kernel: Kernel) -> Kernel:
    """The kernel, set up; without a client."""
    kernel.run("client = tickets = ticket = synced = None")
    kernel.run(SETUP)
    return kernel
