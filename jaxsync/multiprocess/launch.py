"""Starting local processes as one job: their environment, their restarts, and what is left of each run."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxsync.devices import DEVICES_PER_PROCESS, THREADS_A_DEVICE
from jaxsync.errors import LaunchError
from jaxsync.host.recorder import RUN_DIR, read_events
from jaxsync.multiprocess.group import Group, SignalPipe, Sink
from jaxsync.multiprocess.guardian import Guardian
from jaxsync.multiprocess.outlet import Outlet
from jaxsync.multiprocess.postmortem import Run, should_restart
from jaxsync.multiprocess.rollcall import JOB

RESTART = "JAXSYNC_RESTART"  # in a process's environment: 0 in the first run, k in the k-th restart
_HOST = "127.0.0.1"
_PORTS = range(1, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What to start, and how.

    Attributes:
        command: The program and its arguments; each process runs it.
        num_processes: How many.
        devices_per_process: CPU devices that each simulates; None leaves that to the program.
        max_restarts: How often all are started again after one has failed.
        grace_s: How long processes have to end, once one has failed or the launcher is stopped.
        run_dir: Where processes record their events, a directory a run; None takes one that is removed.
        port: Of the coordinator; None takes a free one for each run.

    Raises:
        LaunchError: Names each value that cannot be meant.

    >>> LaunchConfig(command=("python", "train.py"), num_processes=4).grace_s
    5.0
    """

    command: tuple[str, ...]
    num_processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    grace_s: float = 5.0
    run_dir: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        checks = [
            ("command", bool(self.command), "a program and its arguments"),
            ("num_processes", self.num_processes >= 1, "1 or more"),
            (
                "devices_per_process",
                self.devices_per_process is None or self.devices_per_process >= 1,
                "1 or more",
            ),
            ("max_restarts", self.max_restarts >= 0, "0 or more"),
            ("grace_s", 0 < self.grace_s < float("inf"), "more than 0"),
            ("port", self.port is None or self.port in _PORTS, f"{_PORTS[0]} to {_PORTS[-1]}"),
        ]
        problems = tuple(
            f"{name} = {getattr(self, name)!r}: wanted {wanted}"
            for name, is_right, wanted in checks
            if not is_right
        )
        if problems:
            raise LaunchError(kind="options", problems=problems)


def launch(
    config: LaunchConfig,
    sink: Sink,
    on_end: Callable[[Run, bool], None],
    *,
    outlets: Sequence[Outlet] = (),
) -> tuple[Run, ...]:
    """Runs the command in all processes until they have ended, and again after a failure if asked to.

    SIGINT, SIGTERM and SIGHUP to this process end the others within the grace time; a second one ends them
    at once. If this process is killed, they are too.

    Threading: the main thread only; blocks until all processes have ended.

    Args:
        config: What to start.
        sink: Told their output: see `Group`.
        on_end: Told each run when it has ended, and whether all are started again. It must not block.
        outlets: What the sink writes to: see `Group`.

    Returns:
        The runs, the last of which is the one that counts.

    Raises:
        LaunchError: The command cannot be started, or the run directory cannot be written to.
    """
    runs: list[Run] = []
    with SignalPipe() as signals, Guardian() as guardian, _base_dir(config) as base:
        while not runs or should_restart(runs[-1], config.max_restarts):
            restart = len(runs)
            run_dir = _make_run_dir(base, restart)
            group = Group(
                config.command,
                make_environments(
                    os.environ,
                    config,
                    port=config.port or _free_port(),
                    restart=restart,
                    run_dir=run_dir,
                    job=secrets.token_hex(8),
                ),
                sink=sink,
                outlets=outlets,
                signals=signals,
                guardian=guardian,
                grace_s=config.grace_s,
            )
            run = _with_events(group.run(restart), run_dir, group.start_s)
            runs.append(run)
            on_end(run, should_restart(run, config.max_restarts))
    return tuple(runs)


def make_environments(
    base: Mapping[str, str], config: LaunchConfig, *, port: int, restart: int, run_dir: str, job: str
) -> list[dict[str, str]]:
    """The environment of each process: `base`, and what tells it which of how many it is.

    Args:
        base: The launcher's own.
        config: What to start.
        port: Of the coordinator, which is in process 0.
        restart: Which restart this is; 0 for none.
        run_dir: Where events go.
        job: Tells these processes from those of others that are given the same port.

    >>> config = LaunchConfig(command=("train",), num_processes=2, devices_per_process=4)
    >>> _, last = make_environments({}, config, port=1234, restart=0, run_dir="/run", job="a")
    >>> last["JAX_COORDINATOR_ADDRESS"], last["JAX_NUM_PROCESSES"], last["JAX_PROCESS_ID"]
    ('127.0.0.1:1234', '2', '1')
    >>> last["JAX_PLATFORMS"], last["JAX_NUM_CPU_DEVICES"], last["PJRT_NPROC"]
    ('cpu', '4', '8')
    """
    shared = {
        "PYTHONUNBUFFERED": "1",  # lines come when they are written, and are not lost with the process
        **{name: value for name, value in base.items() if name != DEVICES_PER_PROCESS},
        "JAX_COORDINATOR_ADDRESS": f"{_HOST}:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"{_HOST}:{port}",  # JAX's own default is every interface
        "JAX_NUM_PROCESSES": str(config.num_processes),
        RESTART: str(restart),
        JOB: job,
        RUN_DIR: run_dir,
    }
    if config.devices_per_process is not None:
        least = THREADS_A_DEVICE * config.devices_per_process
        pool = base.get("PJRT_NPROC", "")
        shared["JAX_NUM_CPU_DEVICES"] = str(config.devices_per_process)
        shared[DEVICES_PER_PROCESS] = str(config.devices_per_process)
        shared["PJRT_NPROC"] = str(max(least, int(pool) if pool.isdigit() else os.cpu_count() or 1))
        shared.setdefault("JAX_PLATFORMS", "cpu")
    return [{**shared, "JAX_PROCESS_ID": str(process)} for process in range(config.num_processes)]


def _free_port() -> int:
    # It may be taken by another between here and the coordinator's start: Linux hands out the ports of a
    # range in a random order, so that is rare, and the coordinator then says so.
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _base_dir(config: LaunchConfig) -> Iterator[str]:
    if config.run_dir is not None:
        yield os.path.abspath(config.run_dir)
        return
    with tempfile.TemporaryDirectory(prefix="jaxsync-launch-") as directory:
        yield directory


def _make_run_dir(base: str, restart: int) -> str:
    run_dir = Path(base, f"restart-{restart}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for old in run_dir.glob("events-*"):  # of an earlier launch with this directory
            old.unlink()
        with tempfile.TemporaryFile(dir=run_dir):  # the processes cannot say so if they cannot write
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(kind="run_dir", run_dir=str(run_dir), reason=reason) from error
    return str(run_dir)


def _with_events(run: Run, run_dir: str, start_s: float) -> Run:
    endings = tuple(
        replace(ending, events=read_events(run_dir, ending.process, start_s)) for ending in run.endings
    )
    return replace(run, endings=endings)
