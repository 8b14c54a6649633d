"""The last events of the host side: what a hang report shows, and what a process that was killed leaves."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxsync.report import format_bytes, format_table

_WIDTH = 60  # of the column that says what: a table must fit a terminal

RUN_DIR = "JAXSYNC_RUN_DIR"  # names the directory that event files go to; set by `jaxsync launch`
_NUM_LINES = 256  # of an event file, and so the events it keeps
_LINE_BYTES = 256
_WHAT_SIZES = (160, 24, 0)  # characters of an event's text, the first that fits a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        at_s: Seconds since the recorder was made.
        kind: Such as `"announce"`, `"sync"`, `"launch"`, `"finish"`, `"answer"`, `"reject"`; in an event file
            also `"program"`, before a program is launched, and `"await"`, before one is waited for.
        step: The step it belongs to; of a program, how many the process has launched with it.
        device: The device it came from.
        what: The leaf, bucket, callback or failure.
        num_bytes: Bytes reduced, on one device.
        took_s: How long it took.
        together: When a program was launched, or one is waited for: how many programs that need every process
            the process had launched by then.
        finished: How many of these were known to be over.
    """

    at_s: float
    kind: str
    step: int | None = None
    device: int | None = None
    what: str = ""
    num_bytes: int | None = None
    took_s: float | None = None
    together: int | None = None
    finished: int | None = None


_FIELDS = tuple(field.name for field in fields(Event))


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
        note(kind, **facts)

    def events(self) -> tuple[Event, ...]:
        """The events that are kept, oldest first."""
        while True:
            try:
                return tuple(self._events)
            except RuntimeError:  # another thread appended while this one looked
                continue

    def to_json(self) -> str:
        """The events as a JSON list of objects; what an event does not have is left out."""
        return json.dumps([event_facts(event) for event in self.events()])

    def format(self, last: int = 20) -> str:
        """The last events as a table."""
        return format_events(self.events()[-last:])


class EventFile:
    """A file with the last events, which can be read however its process ends.

    A ring of text lines of one length in a memory map. A line that is written belongs to the kernel: neither
    an abort nor SIGKILL takes it back, and no system call was made. An event costs about 6 us.

    Threading: any thread may append, without waiting: each append has a line of its own.

    Args:
        path: Made anew. Two processes must not write to one file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        size = _NUM_LINES * _LINE_BYTES
        with open(path, "w+b") as file:
            # Written and not only sized: on a full disk this fails, where a hole in the file would end the
            # process with SIGBUS when an event is put there.
            file.write((b" " * (_LINE_BYTES - 1) + b"\n") * _NUM_LINES)
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = itertools.count()  # `next` of it is atomic

    def append(self, event: Event) -> int:
        """Puts an event in place of the oldest, and says where. A text that is too long is cut."""
        start = next(self._numbers) % _NUM_LINES * _LINE_BYTES
        self.put(event, start)
        return start

    def put(self, event: Event, start: int) -> None:
        """Puts an event where `append` has put another."""
        for size in _WHAT_SIZES:
            cut = event if len(event.what) <= size else replace(event, what=event.what[:size])
            line = json.dumps(event_facts(cut)).encode()
            if len(line) < _LINE_BYTES:
                break
        self._map[start : start + _LINE_BYTES - 1] = line[: _LINE_BYTES - 1].ljust(_LINE_BYTES - 1)


def read_event_file(path: str | os.PathLike[str]) -> tuple[Event, ...]:
    """The events of an `EventFile`, oldest first; a line that was being written is left out."""
    found = []
    for line in Path(path).read_bytes().splitlines():
        try:
            facts = json.loads(line)
            found.append(Event(**{name: value for name, value in facts.items() if name in _FIELDS}))
        except (ValueError, TypeError, AttributeError):  # half of a line, in any of its forms
            continue
    return tuple(sorted(found, key=lambda event: event.at_s))


def read_events(directory: str | os.PathLike[str], process: int, start_s: float = 0.0) -> tuple[Event, ...]:
    """The events that a process, and the processes it started, left in a run's directory, oldest first.

    Args:
        directory: What `JAXSYNC_RUN_DIR` named.
        process: Its number.
        start_s: The `time.monotonic()` from which `at_s` counts.
    """
    files = Path(directory).glob(f"events-{process}-*")
    events = [event for file in files for event in read_event_file(file)]
    return tuple(
        replace(event, at_s=event.at_s - start_s) for event in sorted(events, key=lambda event: event.at_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """An event in the event file of this process: when it was, and where it is."""

    at_s: float
    start: int


def is_noting() -> bool:
    """Whether `note` has a file to write to: whether to make facts that take time."""
    return _directory is not None


def note(kind: str, *, instead_of: Noted | None = None, **facts: Any) -> Noted | None:
    """Adds an event to the event file of this process, if the environment names a directory for it.

    The time of such an event is `time.monotonic()`, which all processes of a machine share.

    Threading: as for `EventFile`.

    Args:
        kind: As for `Event`.
        instead_of: An earlier event that this one tells more of: it takes its place and its time.
        **facts: Fields of `Event`.

    Returns:
        The event, for `instead_of`; None if it was not noted.
    """
    if _directory is None or (file := _process_file()) is None:
        return None
    if instead_of is not None:
        file.put(Event(at_s=instead_of.at_s, kind=kind, **facts), instead_of.start)
        return instead_of
    at_s = round(time.monotonic(), 6)
    return Noted(at_s=at_s, start=file.append(Event(at_s=at_s, kind=kind, **facts)))


# Read once: a look at the environment costs more than all else of a `note` that does nothing.
_directory: str | None = os.environ.get(RUN_DIR)
_file: EventFile | None = None  # written under `_opening`, and in a forked child
_opening = threading.Lock()


def _process_file() -> EventFile | None:
    """Made with the first event: most processes that import jaxsync have none."""
    global _file, _directory
    if _file is not None or _directory is None:
        return _file
    with _opening:
        if _file is None:
            name = f"events-{os.environ.get('JAX_PROCESS_ID', '0')}-{os.getpid()}"
            try:
                os.makedirs(_directory, exist_ok=True)
                _file = EventFile(os.path.join(_directory, name))
            except OSError as error:
                lost, _directory = _directory, None
                warnings.warn(f"no events are written to {RUN_DIR}={lost}: {error}", stacklevel=4)
        return _file


def _forget_file() -> None:
    """In a forked child, whose map is that of its parent."""
    global _file, _opening
    _file, _opening = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_file)


def event_facts(event: Event) -> dict[str, Any]:
    """The event as JSON has it: what it does not have is left out."""
    return {name: value for name in _FIELDS if (value := getattr(event, name)) not in (None, "")}


def format_events(events: Sequence[Event]) -> str:
    """Events as a table."""
    header = ["at", "event", "step", "device", "what", "bytes", "took"]
    return format_table(header, [list(_cells(event)) for event in events])


def _cells(event: Event) -> Iterator[str]:
    yield f"{event.at_s:.3f} s"
    yield event.kind
    yield "" if event.step is None else str(event.step)
    yield "" if event.device is None else str(event.device)
    yield event.what if len(event.what) <= _WIDTH else event.what[: _WIDTH - 3] + "..."
    yield "" if event.num_bytes is None else format_bytes(event.num_bytes)
    yield "" if event.took_s is None else f"{event.took_s * 1e3:.1f} ms"
