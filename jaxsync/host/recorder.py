"""The last events of the host side: what a hang report shows."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jaxsync.report import format_bytes, format_table

_WIDTH = 60  # of the column that says what: a table must fit a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        at_s: Seconds since the recorder was made.
        kind: Such as `"announce"`, `"sync"`, `"launch"`, `"finish"`, `"answer"`, `"reject"`.
        step: The step it belongs to.
        device: The device it came from.
        what: The leaf, bucket, callback or failure.
        num_bytes: Bytes reduced, on one device.
        took_s: How long it took.
    """

    at_s: float
    kind: str
    step: int | None = None
    device: int | None = None
    what: str = ""
    num_bytes: int | None = None
    took_s: float | None = None


class Recorder:
    """A ring of the last events.

    Threading: any thread may record and read at any time, without waiting: appending to a deque of bounded
    length is atomic.
    """

    def __init__(self, size: int = 1000) -> None:
        self._start_s = time.monotonic()
        self._events: deque[Event] = deque(maxlen=size)

    def record(self, kind: str, **facts: Any) -> None:
        """Adds an event; the oldest is dropped when the ring is full. `facts` are fields of `Event`."""
        self._events.append(Event(at_s=time.monotonic() - self._start_s, kind=kind, **facts))

    def events(self) -> tuple[Event, ...]:
        """The events that are kept, oldest first."""
        while True:
            try:
                return tuple(self._events)
            except RuntimeError:  # another thread appended while this one looked
                continue

    def to_json(self) -> str:
        """The events as a JSON list of objects; what an event does not have is left out."""
        return json.dumps(
            [{k: v for k, v in asdict(e).items() if v not in (None, "")} for e in self.events()]
        )

    def format(self, last: int = 20) -> str:
        """The last events as a table."""
        header = ["at", "event", "step", "device", "what", "bytes", "took"]
        return format_table(header, [list(_cells(event)) for event in self.events()[-last:]])


def _cells(event: Event) -> Iterator[str]:
    yield f"{event.at_s:.3f} s"
    yield event.kind
    yield "" if event.step is None else str(event.step)
    yield "" if event.device is None else str(event.device)
    yield event.what if len(event.what) <= _WIDTH else event.what[: _WIDTH - 3] + "..."
    yield "" if event.num_bytes is None else format_bytes(event.num_bytes)
    yield "" if event.took_s is None else f"{event.took_s * 1e3:.1f} ms"
