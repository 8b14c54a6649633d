"""Group: local processes that run together, whose output is read line by line, and that end together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from jaxsync.errors import LaunchError
from jaxsync.multiprocess.ending import Ending, Stop
from jaxsync.multiprocess.guardian import Guardian
from jaxsync.multiprocess.outlet import Outlet
from jaxsync.multiprocess.postmortem import Run

# Whole lines of one process: its number, whether they are of stderr, the lines without their ends.
Sink = Callable[[int, bool, Sequence[bytes]], None]

_STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ends a run
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # a longer one is cut, so that memory is bounded
_LAST_LINES = 20
_LAST_LINE_CHARS = 500
_DRAIN_S = 1.0  # for output that is held open by what has left its group

# When what is sent, in shares of the grace time. All are gone within it: nothing survives the last signal.
# A process whose peer failed is let alone first, since it may be about to say something of its own.
_Schedule = tuple[tuple[float, signal.Signals], ...]
_AFTER_FAILURE: _Schedule = ((0.2, signal.SIGINT), (0.5, signal.SIGTERM), (0.8, signal.SIGKILL))
_AFTER_STOP: _Schedule = ((0.0, signal.SIGINT), (0.4, signal.SIGTERM), (0.8, signal.SIGKILL))
_AT_ONCE: _Schedule = ((0.0, signal.SIGKILL),)


class SignalPipe:
    """Signals to this process, to be waited for beside files. A context manager.

    Inside it, signals that would end the process do not: they are read here. What is ignored (`nohup`) stays
    ignored.

    Threading: the main thread only, as Python wants it for handlers.
    """

    def __enter__(self) -> SignalPipe:
        self._receiver, sender = socket.socketpair()
        self._stack = contextlib.ExitStack()
        for end in (self._receiver, sender):
            end.setblocking(False)
            self._stack.callback(end.close)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGCHLD, *_STOPPED):
            handler = signal.getsignal(number)
            if number == signal.SIGCHLD or handler is not signal.SIG_IGN:
                signal.signal(number, _note_only)
                self._stack.callback(signal.signal, number, handler or signal.SIG_DFL)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._receiver.fileno()

    def read(self) -> bytes:
        """The numbers of the signals that have come; does not block."""
        try:
            return self._receiver.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return b""


def _note_only(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal's number is written to the pipe."""


class Lines:
    r"""Chunks of bytes -> whole lines.

    >>> lines = Lines()
    >>> lines.feed(b"one\ntw"), lines.feed(b"o\nthree"), lines.finish()
    ([b'one'], [b'two'], [b'three'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole now. One beyond 1 MiB comes in pieces of that size."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        while len(self._rest) >= _LONGEST_LINE_BYTES:
            whole.append(self._rest[:_LONGEST_LINE_BYTES])
            self._rest = self._rest[_LONGEST_LINE_BYTES:]
        return whole

    def finish(self) -> list[bytes]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    process: int
    popen: subprocess.Popen[bytes]
    told: list[int] = field(default_factory=list)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    code: int | None = None  # as `Ending.code`; None while it runs
    at_s: float = 0.0
    stop: Stop | None = None  # while it stands still; kept from when the processes are being ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    child: _Child
    is_error: bool
    lines: Lines
    file: IO[bytes]


class Group:
    """Runs one command in several processes until all have ended. `run` is called once.

    Each process leads a process group, which ends with the run: what a process has started and left behind
    too, unless it has gone to a session of its own.

    Threading: the main thread only.

    Args:
        command: The program and its arguments.
        environments: One for each process.
        sink: Told each chunk of whole lines. It may raise BrokenPipeError, which ends the run. It must not
            block: nothing else happens until it returns.
        outlets: What the sink writes to. While one is full, processes are not read, and so are held back when
            they write; unless they are being ended.
        signals: Open.
        guardian: Open.
        grace_s: How long the processes have to end, once one has failed or the run is stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        sink: Sink,
        outlets: Sequence[Outlet] = (),
        signals: SignalPipe,
        guardian: Guardian,
        grace_s: float,
    ) -> None:
        self._command = command
        self._environments = environments
        self._sink = sink
        self._outlets = outlets
        self._signals = signals
        self._guardian = guardian
        self._grace_s = grace_s
        self._children: list[_Child] = []
        self._order: list[_Child] = []  # as they ended
        self._streams: list[_Stream] = []  # that are open
        self._is_held = False  # whether none of them is in the selector
        self._due: deque[tuple[float, signal.Signals]] = deque()  # when to send what
        self._is_failing = False
        self._stopped_by: int | None = None

    def run(self, restart: int) -> Run:
        """How the processes ended.

        Args:
            restart: Goes into the result.

        Raises:
            LaunchError: The command cannot be started.
        """
        self._start_s = time.monotonic()
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ)
            for outlet in self._outlets:
                self._selector.register(outlet, selectors.EVENT_READ, outlet)
            try:
                for process, environment in enumerate(self._environments):
                    self._spawn(process, environment)
                while any(child.code is None for child in self._children):
                    self._wait(self._due[0][0] if self._due else None)
                    self._note_ends()
                    self._send_due()
            finally:
                self._finish()
        took_s = time.monotonic() - self._start_s
        endings = tuple(map(_ending, self._order))
        return Run(restart=restart, endings=endings, took_s=took_s, stopped_by=self._stopped_by)

    @property
    def start_s(self) -> float:
        """The `time.monotonic()` at which `run` was called."""
        return self._start_s

    def _spawn(self, process: int, environment: Mapping[str, str]) -> None:
        try:
            popen = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,  # several readers of one terminal would each get a part
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(command=tuple(self._command), process=process, reason=reason) from error
        self._guardian.guard(popen.pid)
        child = _Child(process=process, popen=popen)
        self._children.append(child)
        for file, is_error in ((popen.stdout, False), (popen.stderr, True)):
            if file is not None:
                stream = _Stream(child=child, is_error=is_error, lines=Lines(), file=file)
                self._streams.append(stream)
                if not self._is_held:
                    self._selector.register(file, selectors.EVENT_READ, stream)

    def _wait(self, until_s: float | None) -> None:
        """Reads what there is to read; returns at `until_s` if there is nothing."""
        self._hold_or_go_on()
        timeout = None if until_s is None else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, _Stream):
                self._hold_or_go_on()  # what was read just before may have filled an outlet
                if not self._is_held:
                    self._read(key.data)
            elif isinstance(key.data, Outlet):
                self._check(key.data)
            else:
                for number in self._signals.read():
                    if number in _STOPPED:
                        self._stop(number)

    def _hold_or_go_on(self) -> None:
        """Reads the processes as fast as somebody reads the outlets; always, once they are being ended."""
        is_held = not self._is_ending and any(outlet.is_full for outlet in self._outlets)
        if is_held == self._is_held:
            return
        self._is_held = is_held
        for stream in self._streams:
            if is_held:
                self._selector.unregister(stream.file)
            else:
                self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def _check(self, outlet: Outlet) -> None:
        try:
            outlet.check()
        except BrokenPipeError:
            self._lose_reader()

    def _read(self, stream: _Stream) -> None:
        if chunk := os.read(stream.file.fileno(), _CHUNK_BYTES):
            self._deliver(stream, stream.lines.feed(chunk))
        else:
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        if not self._is_held:
            self._selector.unregister(stream.file)
        stream.file.close()
        self._deliver(stream, stream.lines.finish())

    def _deliver(self, stream: _Stream, lines: Sequence[bytes]) -> None:
        for line in lines[-_LAST_LINES:]:
            stream.child.last_lines.append(line.decode(errors="replace")[:_LAST_LINE_CHARS])
        if lines:
            try:
                self._sink(stream.child.process, stream.is_error, lines)
            except BrokenPipeError:
                self._lose_reader()

    def _lose_reader(self) -> None:
        """Nobody reads our output any more."""
        if self._sink is not _to_nobody:  # once: being told twice to stop would be at once
            self._sink = _to_nobody
            self._stop(signal.SIGPIPE)

    def _note_ends(self) -> None:
        if not self._is_ending:  # all of them first, since what fails may have waited for what stands still
            for child in self._children:
                self._note_stop(child)
        for child in self._children:
            found = None if child.code is not None else _state_of(child)
            if found is None or found.si_code == os.CLD_STOPPED:
                continue
            is_exit = found.si_code == os.CLD_EXITED
            child.code = found.si_status if is_exit else -found.si_status
            child.at_s = time.monotonic() - self._start_s
            self._order.append(child)
            if child.code and not self._is_ending:
                self._is_failing = True
                self._schedule(_AFTER_FAILURE)

    def _note_stop(self, child: _Child) -> None:
        # SIGCHLD comes for these, too: when a child is stopped, and when it goes on.
        found = None if child.code is not None else _state_of(child)
        if found is None:
            child.stop = None
        elif found.si_code == os.CLD_STOPPED and child.stop is None:
            child.stop = Stop(by=found.si_status, at_s=time.monotonic() - self._start_s)

    @property
    def _is_ending(self) -> bool:
        return self._is_failing or self._stopped_by is not None

    def _stop(self, number: int) -> None:
        """The launcher was told to end. Told twice, it does not wait."""
        is_first, self._stopped_by = self._stopped_by is None, self._stopped_by or number
        self._schedule(_AFTER_STOP if is_first else _AT_ONCE)

    def _schedule(self, schedule: _Schedule) -> None:
        now_s = time.monotonic()
        self._due = deque((now_s + share * self._grace_s, number) for share, number in schedule)

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, number = self._due.popleft()
            for child in self._children:
                if child.code is None:
                    child.told.append(number)
                _send(child, number)

    def _finish(self) -> None:
        """Kills what is left of the groups, reads the rest of the output, and reaps."""
        for child in self._children:
            _send(child, signal.SIGKILL)
        until_s = time.monotonic() + _DRAIN_S
        while self._streams and time.monotonic() < until_s:
            self._wait(until_s)
            while self._is_held:  # for as long as it takes, or until the launcher is stopped
                self._wait(None)
                until_s = time.monotonic() + _DRAIN_S
        for stream in list(self._streams):
            self._close(stream)
        for child in self._children:
            child.popen.wait()
            self._guardian.release(child.popen.pid)


def _state_of(child: _Child) -> os.waitid_result | None:
    """That it has ended, or is stopped; None while it runs."""
    # Looked at and not reaped: as long as it is there nobody else can get its number, to which signals are
    # sent; and so a stop is reported for as long as it lasts.
    return os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG)


def _send(child: _Child, number: int) -> None:
    # A zombie alone in its group may be told anything, except on macOS, which says PermissionError.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.popen.pid, number)


def _to_nobody(process: int, is_error: bool, lines: Sequence[bytes]) -> None:
    """A sink."""


def _ending(child: _Child) -> Ending:
    return Ending(
        process=child.process,
        pid=child.popen.pid,
        code=child.code or 0,
        at_s=child.at_s,
        told=tuple(child.told),
        stop=child.stop,
        last_lines=tuple(child.last_lines),
    )
