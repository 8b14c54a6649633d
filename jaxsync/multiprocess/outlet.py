"""Outlet: what is printed to a file that may be full, without waiting for who reads it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque

_PIECE_BYTES = 1 << 16
_FULL_BYTES = 1 << 18  # from here on the children are held back
_MOST_BYTES = 1 << 23  # beyond it output is dropped: only of children that are being ended, see `Group`


class Outlet:
    """A file that bytes are handed to, and that a thread of its own writes them to.

    A file that is full (`| less`, Ctrl-S) so stops the thread and not the caller. The file is not made
    non-blocking: others that have it open, such as the shell, would be surprised.

    Threading: one thread calls; none of the calls blocks, except `close`.

    Args:
        descriptor: Of the file. It stays open.

    >>> reader, writer = os.pipe()
    >>> outlet = Outlet(writer)
    >>> outlet.write(b"hello")
    >>> outlet.close(timeout_s=10.0), os.read(reader, 100)
    (True, b'hello')
    >>> os.close(reader), os.close(writer)
    (None, None)
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._change = threading.Condition()  # protects all below, which both threads write
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0  # not written yet, the piece that is being written included
        self._error: OSError | None = None
        self._is_closing = False
        # A daemon: it may be inside a write that never returns, and the process ends all the same.
        self._thread = threading.Thread(target=self._write_all, name="jaxsync-outlet", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that nothing should be added."""
        return self._num_bytes >= _FULL_BYTES and self._error is None

    def write(self, data: bytes) -> None:
        """Takes the bytes, to be written in order; or drops all of them, if 8 MiB wait already.

        Raises:
            BrokenPipeError: Nobody reads the file any more.
            OSError: It could not be written.
        """
        with self._change:
            if self._error is not None:
                raise self._error
            if self._num_bytes < _MOST_BYTES:
                self._pieces.append(data)
                self._num_bytes += len(data)
                self._change.notify_all()

    def fileno(self) -> int:
        """Readable when the file is not full any more, or has failed."""
        return self._receiver.fileno()

    def check(self) -> None:
        """Makes `fileno` unreadable until something new has happened.

        Raises:
            BrokenPipeError: Nobody reads the file any more.
            OSError: It could not be written.
        """
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(_PIECE_BYTES)
        with self._change:
            if self._error is not None:
                raise self._error

    def close(self, *, timeout_s: float | None) -> bool:
        """Whether all has been written in time. What has not is dropped.

        Args:
            timeout_s: How long to wait; None waits as long as it takes.
        """
        with self._change:
            self._is_closing = True
            self._change.notify_all()
            is_done = self._change.wait_for(lambda: not self._num_bytes or self._error is not None, timeout_s)
            self._pieces.clear()
        if is_done:  # else the thread may stand in its write for ever, and wakes nobody after it
            self._thread.join()
            self._receiver.close()
            self._sender.close()
        return is_done and self._error is None

    def _write_all(self) -> None:
        while (data := self._take()) is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[_write_some(self._descriptor, view[:_PIECE_BYTES]) :]
            except OSError as error:
                self._end(len(data), error)
                return
            self._end(len(data), None)

    def _take(self) -> bytes | None:
        """The next bytes to write; None if there will be none."""
        with self._change:
            self._change.wait_for(lambda: self._pieces or self._is_closing)
            return self._pieces.popleft() if self._pieces else None

    def _end(self, num_bytes: int, error: OSError | None) -> None:
        with self._change:
            was_full = self.is_full
            self._num_bytes -= num_bytes
            self._error = error
            if error is not None or (was_full and not self.is_full):
                self._wake()
            self._change.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the other end is readable already
            self._sender.send(b"\0")


def _write_some(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:  # somebody else has made the file non-blocking
        select.select([], [descriptor], [])
        return 0
