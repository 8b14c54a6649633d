"""The programs that need every process: how many this one has launched, and how many are known to be over."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence

import jax
from jax.sharding import Sharding

_MAX_KEPT = 64  # twice what a window may hold; without a window, as on accelerators, they are let go sooner


class Together:
    """Counts the launched programs whose outputs lie on devices of all processes.

    All processes launch the same of these in the same order, and none of them ends before all have launched
    it. So the counts of two processes can be compared, as those of all programs cannot.

    A launch may last until the program is over (on CPU with one device a process). So what a caller launches
    is taken for what it launched the last time, until its outputs are there.

    Threading: none; the launcher's lock protects it.
    """

    def __init__(self) -> None:
        self._num_launched = 0
        self._num_finished = 0
        self._running: deque[tuple[int, jax.Array]] = deque(maxlen=_MAX_KEPT)  # oldest first
        self._before: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()
        self._expected: bool | None = None  # whether what is being launched is one of those, if that is known

    def begin(self, caller: object | None) -> None:
        """A program is about to be launched. `caller`: who always launches programs of one kind."""
        self._expected = None if caller is None else self._before.get(caller)
        self._num_launched += self._expected is True

    def end(self, caller: object | None, outputs: Sequence[jax.Array]) -> None:
        """It was launched, and has such outputs."""
        is_one = bool(outputs) and _is_of_all(outputs[0].sharding)
        self._num_launched += is_one - (self._expected is True)
        self._expected = is_one
        if caller is not None:
            self._before[caller] = is_one
        if is_one:
            self._running.append((self._num_launched, outputs[0]))

    def cancel(self) -> None:
        """It was not launched, since the call of it failed."""
        if self._expected:
            self._num_launched -= 1
            self._expected = False

    def counts(self) -> dict[str, int]:
        """How many were launched, and how many of these are known to be over; does not block.

        Nothing, while it is not known whether what is being launched is one of them.
        """
        for number, output in self._running:
            # One that was donated meanwhile tells nothing; a later one that is over does, for it as well.
            if (is_over := _is_ready(output)) is False:
                break
            if is_over:
                self._num_finished = number
        while self._running and self._running[0][0] <= self._num_finished:
            self._running.popleft()
        if self._expected is None:
            return {}
        return {"together": self._num_launched, "finished": self._num_finished}


def _is_ready(output: jax.Array) -> bool | None:
    """Whether it is there; None if it was donated."""
    try:
        return None if output.is_deleted() else bool(output.is_ready())  # type: ignore[attr-defined]  # stubs
    except RuntimeError:  # another thread donated it between the two calls
        return None


@functools.lru_cache(maxsize=256)
def _is_of_all(sharding: Sharding) -> bool:
    """Whether each process has a device of it."""
    devices: set[jax.Device] = sharding.device_set
    return len({device.process_index for device in devices}) == int(jax.process_count())
