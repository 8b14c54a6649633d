"""The roll call: who is there, before JAX's own start, which ends a process that waits in vain.

`jax.distributed.initialize` aborts every process when one does not come, and names none. So process 0 first
listens on the coordinator's port itself, hears the others, and tells all of them the outcome: to go on, who
is missing, or in what they differ. Then JAX's coordinator takes the port over.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxsync.errors import AbsentProcessError, DisagreementError, InitializationError
from jaxsync.multiprocess.differences import Facts, find_differences
from jaxsync.versions import library_versions

JOB = "JAXSYNC_JOB"  # in the environment: what tells the processes of a job from those of another
_MAX_LINE = 4096
_GRACE_S = 5.0  # after its own timeout a process still waits so long for the verdict of process 0
_RETRY_S = 0.02
_HANDOVER_S = 2.0  # JAX's coordinator listens milliseconds after; a client that comes too early waits 1 s
_KIND = "jaxsync roll call"


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port` or `[host]:port`; None if it is no such thing.

    >>> split_address("[::1]:9000"), split_address("localhost")
    (('::1', 9000), None)
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    is_port = port.isdigit() and 0 < int(port) < 65536
    return (host.removeprefix("[").removesuffix("]"), int(port)) if host and is_port else None


def versions() -> dict[str, str]:
    """The versions that must be the same in all processes."""
    found = library_versions()
    return {name: found[name] for name in ("jax", "jaxlib", "jaxsync")}


def call_roll(
    address: str, bind_address: str, num_processes: int, process: int, *, timeout_s: float, job: str = ""
) -> None:
    """Returns when all processes are there and agree on their number and versions.

    Args:
        address: Host and port of process 0.
        bind_address: Where process 0 listens.
        num_processes: How many there are.
        process: Which of them this is.
        timeout_s: How long to wait for the others.
        job: The same in all processes of this job; those that have another are sent away.

    Raises:
        AbsentProcessError: Names those that did not come.
        DisagreementError: Names in what they differ.
        InitializationError: The address cannot be listened on, or another job listens there.
    """
    facts = {"num_processes": str(num_processes), **versions()}
    deadline = time.monotonic() + timeout_s
    if process == 0:
        verdict = _hear(bind_address, num_processes, facts, deadline, job)
    else:
        verdict = _report(address, process, facts, deadline, job)
    if verdict.get("is_other_job"):
        problem = "each job needs a port of its own; without --port, jaxsync launch takes one that is free"
        reason = f"process 0 of another job listens at {address}"
        raise InitializationError(reason=reason, problems=(problem,))
    if verdict.get("differences"):
        raise DisagreementError(subject="how to start", differences=tuple(verdict["differences"]))
    if verdict.get("missing"):
        raise AbsentProcessError(
            waited_for=f"jaxsync.initialize at {address}",
            missing=tuple(verdict["missing"]),
            num_processes=num_processes,
            timeout_s=timeout_s,
        )
    if process != 0:
        _await_coordinator(address)


def judge(said: Mapping[int, Facts], twice: tuple[int, ...], num_processes: int, is_over: bool) -> Any:
    """The verdict on who has come so far, as all processes are told it; None while there is none.

    Args:
        said: For each process that came its facts.
        twice: Processes that came twice.
        num_processes: How many there should be.
        is_over: Whether nobody is waited for any more.
    """
    if len(said) + len(twice) < num_processes and not is_over:
        return None  # not even if they differ: all are to hear of it
    differences = [f"process_id: {process} in two processes" for process in twice]
    differences += find_differences(said)
    missing = sorted(set(range(num_processes)) - set(said))
    return {"differences": differences} if differences else {"missing": missing}


class _Desk:
    """Where process 0 hears the others. One thread.

    Attributes:
        said: For each process that came its facts.
        twice: Processes that came twice.
    """

    def __init__(self, server: socket.socket, facts: Facts, job: str) -> None:
        self.said: dict[int, Facts] = {0: facts}
        self.twice: tuple[int, ...] = ()
        self._server = server
        self._job = job
        self._heard: dict[socket.socket, bytes] = {}  # what an open connection has said so far
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def hear(self, timeout_s: float) -> None:
        """Takes what comes next, if something comes in time."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._heard[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]  # a connection, as all others are

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            piece = connection.recv(_MAX_LINE)
            self._heard[connection] += piece
            if piece and not piece.endswith(b"\n") and len(self._heard[connection]) < _MAX_LINE:
                return  # there is more to come
        self._selector.unregister(connection)
        found = parse_report(self._heard[connection])
        if found is None:  # somebody else's: a port scan, or a client of an earlier job
            del self._heard[connection]
            connection.close()
            return
        process, facts, job = found
        if job != self._job:
            del self._heard[connection]
            _tell(connection, {"is_other_job": True})
        elif process in self.said:
            self.twice += (process,)
        else:
            self.said[process] = facts

    def tell(self, verdict: Any) -> None:
        """Tells it to all who came, and closes."""
        self._selector.close()
        for connection in self._heard:
            _tell(connection, verdict)


def _tell(connection: socket.socket, verdict: Any) -> None:
    """Tells it, and closes."""
    with connection, contextlib.suppress(OSError):  # if it is gone, who waits for it will see
        connection.settimeout(_GRACE_S)
        connection.sendall(json.dumps(verdict).encode())


def parse_report(line: bytes) -> tuple[int, Facts, str] | None:
    """Process, facts and job of a report; None if it is none.

    >>> parse_report(b'{"kind": "jaxsync roll call", "process": 1, "facts": {"num_processes": "2"}}')
    (1, {'num_processes': '2'}, '')
    >>> parse_report(b"GET / HTTP/1.1")
    """
    try:
        report = json.loads(line)
        if report["kind"] != _KIND:
            return None
        process, facts, job = report["process"], dict(report["facts"]), report.get("job", "")
        # By its own count: one that has another is no stranger, but differs, and all are to hear of it.
        is_one = type(process) is int and 0 < process < int(facts["num_processes"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_text = all(isinstance(text, str) for text in (*facts.values(), job))
    return (process, facts, job) if is_one and is_text else None


def _hear(bind_address: str, num_processes: int, facts: Facts, deadline: float, job: str) -> Any:
    with _listen(bind_address) as server:
        desk, verdict = _Desk(server, facts, job), None
        while verdict is None:
            left = deadline - time.monotonic()
            desk.hear(max(0.0, left))
            verdict = judge(desk.said, desk.twice, num_processes, is_over=left <= 0)
    desk.tell(verdict)  # once nobody listens: who is told to go on finds JAX's coordinator, not this
    return verdict


def _listen(bind_address: str) -> socket.socket:
    found = split_address(bind_address)
    assert found is not None  # checked by initialize
    host, port = found
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        problem = f"{bind_address}: {error.strerror or error}"
        raise InitializationError(reason="process 0 cannot listen there", problems=(problem,)) from error
    return server


def _report(address: str, process: int, facts: Facts, deadline: float, job: str) -> Any:
    report = json.dumps({"kind": _KIND, "process": process, "facts": facts, "job": job}).encode() + b"\n"
    connection = _connect(address, deadline)
    if connection is None:
        return {"missing": [0]}
    with connection:
        try:
            connection.sendall(report)
            connection.settimeout(max(0.0, deadline - time.monotonic()) + _GRACE_S)
            with connection.makefile("rb") as answer:
                verdict = json.loads(answer.read())
        except (OSError, ValueError, RecursionError):  # it went away, or is no jaxsync
            verdict = None
    return verdict if isinstance(verdict, dict) else {"missing": [0]}


def _connect(address: str, deadline: float) -> socket.socket | None:
    """A connection to process 0, as soon as it listens; None if it did not in time."""
    found = split_address(address)
    assert found is not None  # checked by initialize
    while True:
        try:
            return socket.create_connection(found, timeout=max(0.1, deadline - time.monotonic()))
        except OSError:
            if time.monotonic() >= deadline:
                return None
        threading.Event().wait(_RETRY_S)  # there is nothing to wait on but that somebody listens


def _await_coordinator(address: str) -> None:
    """Waits until JAX's coordinator listens. It is no matter if it does not: JAX tries again each second."""
    connection = _connect(address, time.monotonic() + _HANDOVER_S)
    if connection is not None:
        connection.close()
