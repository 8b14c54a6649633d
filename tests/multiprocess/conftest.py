"""One way to run a job of several real processes: on loopback, with hard limits, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys
sys.stdout = open(os.dup(1), "w", buffering=1, closefd=False)
os.dup2(2, 1)  # gloo prints, too
import jax, numpy as np, jaxsync
from jaxsync.errors import *
ME, NUM = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process of a job: how it ended (negative: by which signal), and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_job(tmp_path: Path) -> Callable[..., list[Ended]]:
    """Runs code in several processes at once, after `before`; the answer has one entry a process.

    Those in `left` do not end by themselves: they are killed when all others have ended, and must still be
    there then. All others must have ended within `limit_s`.
    """

    def run(
        code: str,
        num_processes: int = 2,
        *,
        before: str = "",
        left: tuple[int, ...] = (),
        limit_s: float = 60,
        **env: str,
    ) -> list[Ended]:
        program = PRELUDE + before + textwrap.dedent(code)
        with _started(program, num_processes, tmp_path, env) as processes:
            deadline = time.monotonic() + limit_s
            for number, process in enumerate(processes):
                if number not in left:
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            for number in left:
                assert processes[number].poll() is None, f"process {number} has ended by itself"
        outs, errs = (
            [(tmp_path / f"{number}.{kind}").read_text() for number in range(num_processes)]
            for kind in ("out", "err")
        )
        codes = [process.returncode for process in processes]
        return [Ended(code=c, out=o, err=e) for c, o, e in zip(codes, outs, errs, strict=True)]

    return run


@contextlib.contextmanager
def _started(
    code: str, num_processes: int, directory: Path, env: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(num_processes):
            with (
                open(directory / f"{number}.out", "wb") as out,
                open(directory / f"{number}.err", "wb") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "error", "-c", code],
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # so that a child it might have can be looked for
                        env={
                            **os.environ,
                            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                            "JAX_NUM_PROCESSES": str(num_processes),
                            "JAX_PROCESS_ID": str(number),
                            "JAX_PLATFORMS": "cpu",
                            **env,
                        },
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        orphans = [process.pid for process in processes if _has_group(process.pid)]
        assert not orphans


def _has_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
