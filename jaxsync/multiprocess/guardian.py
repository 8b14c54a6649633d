"""Kills the process groups of a launcher that is gone. A script: `launch` runs it in a process of its own.

The kernel can end a child whose parent died, but not what that child has started. So this process reads from
a pipe which groups there are (`+GROUP`, `-GROUP`, one a line); the pipe ends when the launcher does, however
it does, and then every group that is left is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO, Any


class Guardian:
    """The launcher's end of the pipe. A context manager: on leaving, the guardian goes and kills nothing.

    Threading: one thread.
    """

    def __enter__(self) -> Guardian:
        # As a file and isolated, so that it imports neither jaxsync nor JAX; in a session of its own, so that
        # what is sent to the launcher's terminal does not end it first.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._popen.wait()

    def guard(self, group: int) -> None:
        """From now on the group ends with this process."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """The group has ended: its number may belong to others soon."""
        self._tell(f"-{group}\n")

    @property
    def _pipe(self) -> IO[bytes]:
        pipe: Any = self._popen.stdin
        return pipe  # type: ignore[no-any-return]

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the guardian: go on without it
            self._pipe.write(line.encode())
            self._pipe.flush()


def main() -> None:
    """Reads stdin to its end, and kills the groups that were guarded and not released."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
