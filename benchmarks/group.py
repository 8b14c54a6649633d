"""Groups of worker processes that run one call at a time, as they are told, so that groups interleave.

A worker reads one line for each thing to do from stdin and answers with one line of JSON on stdout. Between
two commands it waits in a read and takes no time from the others.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent


class GroupError(Exception):
    """A worker ended, or did not answer in time; the text is the end of what it wrote to stderr."""


class Group:
    """Processes of one program that compute together.

    Args:
        script: The program, beside this file.
        arguments: For each process, its arguments.
        wrap: Process number, command -> the command that runs it, as on another host.
        environment: Added to that of this process.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[Sequence[str]],
        *,
        wrap: Callable[[int, list[str]], list[str]] = lambda _, command: command,
        environment: Mapping[str, str] | None = None,
        log_dir: Path,
    ) -> None:
        self._logs = [log_dir / f"{Path(script).stem}-{index}.err" for index in range(len(arguments))]
        self._workers = [
            subprocess.Popen(
                wrap(index, [sys.executable, str(HERE / script), *own]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[index].open("wb"),
                bufsize=0,
                env={**os.environ, **(environment or {})},
            )
            for index, own in enumerate(arguments)
        ]
        self._unread = [b""] * len(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.stdin is not None:
                worker.stdin.close()
        deadline_s = time.monotonic() + 10
        for worker in self._workers:
            try:
                worker.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def ask(self, command: Mapping[str, Any], timeout_s: float = 300) -> list[Any]:
        """The answers of all workers to one command, which they run together.

        Raises:
            GroupError: A worker ended, or one has not answered in time.
        """
        for worker in self._workers:
            if worker.stdin is None or worker.poll() is not None:
                raise GroupError(self._failure())
            worker.stdin.write(json.dumps(command).encode() + b"\n")
        deadline_s = time.monotonic() + timeout_s
        return [self._answer(index, deadline_s) for index in range(len(self._workers))]

    def _answer(self, index: int, deadline_s: float) -> Any:
        pipe = self._workers[index].stdout
        assert pipe is not None
        while True:
            line, is_whole, rest = self._unread[index].partition(b"\n")
            if is_whole:
                self._unread[index] = rest
                if line.startswith(b"{"):  # what libraries print beside it is no answer
                    return json.loads(line)
                continue
            # Not through a buffer of Python's own, whose lines `select` would not see.
            if not select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise GroupError(f"no answer in time. {self._failure()}")
            if not (more := os.read(pipe.fileno(), 1 << 16)):
                raise GroupError(self._failure())
            self._unread[index] += more

    def _failure(self) -> str:
        ends = [log.read_text(errors="replace")[-800:].strip() for log in self._logs]
        return "\n".join(f"[{index}] {end}" for index, end in enumerate(ends) if end)


def serve(handlers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """Answers commands from stdin until it is closed: `{"do": name, ...}`."""
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(dict(handlers[command.pop("do")](**command))), flush=True)
