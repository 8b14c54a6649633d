"""JAX's coordination service: words that processes leave for each other, and points where they meet.

The one place that reaches it. JAX gives no public access to the client that it connects: `State.client` is
the only way, in 0.10.2 and in 0.12. When it moves, this module says so, and is to be mended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src import distributed  # noqa: TID251  # the reason is above

from jaxsync.errors import InitializationError, PeerLostError

_ROOT = "jaxsync/"  # before all our keys, since the store is the whole job's


class Coordination:
    """The service, as this process sees it. Made by `connect`.

    Threading: any thread.

    Attributes:
        process: This process.
        num_processes: All processes of the job.
    """

    def __init__(self, client: Any, process: int, num_processes: int) -> None:
        self._client = client
        self.process = process
        self.num_processes = num_processes

    def put(self, key: str, value: str) -> None:
        """Leaves a word, in place of the one that is there."""
        with _naming_the_coordinator():
            self._client.key_value_set(_ROOT + key, value, allow_overwrite=True)

    def list(self, directory: str) -> dict[str, str]:
        """All words below a directory, by the rest of their keys."""
        prefix = f"{_ROOT}{directory}/"
        with _naming_the_coordinator():
            return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}

    def delete(self, directory: str) -> None:
        """Takes away all words below a directory."""
        with _naming_the_coordinator():
            self._client.key_value_delete(f"{_ROOT}{directory}/")

    def meet(self, name: str, processes: Sequence[int], timeout_s: float) -> bool:
        """Waits until all `processes` wait here. Whether they came in time; if not, none may wait here again.

        Args:
            name: Of the point; each can be used once.
            processes: Who meets; this process is among them.
            timeout_s: How long to wait.
        """
        try:
            self._client.wait_at_barrier(_ROOT + name, max(1, round(timeout_s * 1000)), list(processes))
        except Exception as error:
            if _is_about_the_coordinator(error):
                raise _coordinator_lost(error) from error
            return False
        return True


def connect() -> Coordination | None:
    """The service of this job; None for a process that is alone.

    Raises:
        InitializationError: This version of JAX has it somewhere else.
    """
    state = _state()
    return None if state.client is None else Coordination(state.client, state.process_id, state.num_processes)


def let_go() -> None:
    """Keeps JAX from meeting the other processes at exit, where it would wait for those that do not come."""
    state = _state()
    for name in ("client", "service"):
        if (kept := getattr(state, name)) is not None:
            # Never freed: when the client goes, it waits for the others too; and when the service stops while
            # our own client is left, that one aborts the process (0.10.2).
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            setattr(state, name, None)


def _state() -> Any:
    state = getattr(distributed, "global_state", None)
    if not all(hasattr(state, name) for name in ("client", "service", "process_id", "num_processes")):
        problem = "jax._src.distributed.global_state is not what it was up to 0.12"
        raise InitializationError(reason="this version of JAX is not known", problems=(problem,))
    return state


@contextmanager
def _naming_the_coordinator() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _is_about_the_coordinator(error):
            raise _coordinator_lost(error) from error
        raise


def _is_about_the_coordinator(error: Exception) -> bool:
    return any(word in str(error) for word in ("UNAVAILABLE", "CANCELLED", "failed to connect"))


def _coordinator_lost(error: Exception) -> PeerLostError:
    return PeerLostError(seen="the coordinator does not answer", processes=("process 0",))
