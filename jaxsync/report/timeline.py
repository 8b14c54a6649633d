"""A timeline: what ran when, as an SVG picture and as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsync.report import svg
from jaxsync.report.markup import Markup, element
from jaxsync.report.text import format_bytes

_WIDTH, _LEFT, _ROW = 760.0, 120.0, 18.0
_MAX_SPANS = 3000  # of a picture; a trace has all
_COLOURS = {
    "wait": svg.ORANGE,
    "launch": svg.PINK,
    "flight": svg.GREEN,
    "callback": svg.OCHRE,
    "step": svg.BLUE,
}
_MEANINGS = {
    "step": "training",
    "wait": "a device waits",
    "launch": "launch",
    "flight": "in flight",
    "callback": "callback",
    "moment": "other events",
    "trouble": "stalls, failures, not finite",
}
_TROUBLE = frozenset({"stall", "reject", "crash", "timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time, or happened at a moment.

    Attributes:
        process: The process it was in.
        track: What it happened on, such as `"device 3"`.
        name: What it was.
        kind: `"step"`, `"wait"`, `"launch"`, `"flight"`, `"callback"`, `"moment"` or `"trouble"`.
        start_s: When it began.
        took_s: How long it took; None for a moment.
        facts: What else is known: name -> value.
    """

    process: int = 0
    track: str
    name: str
    kind: str
    start_s: float
    took_s: float | None = None
    facts: tuple[tuple[str, str | int | float], ...] = ()

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + (self.took_s or 0.0)


def make_spans(events: Iterable[Mapping[str, Any]], process: int = 0) -> tuple[Span, ...]:
    """What the events of a client or a process mean, by start.

    Args:
        events: As `json.loads(client.record())` gives them: `at_s` and `kind`, and maybe `step`, `device`,
            `what`, `num_bytes` and `took_s`. What has a `took_s` ended at its `at_s`.
        process: The process they are from.

    Returns:
        A span for each event; and one for each wait of a device, from its sync to its answer.

    >>> spans = make_spans([{"at_s": 1.0, "kind": "sync", "step": 0, "device": 2},
    ...                     {"at_s": 1.5, "kind": "answer", "step": 0, "device": 2}])
    >>> [(span.track, span.name, span.took_s) for span in spans]
    [('device 2', 'wait for step 0', 0.5)]
    """
    spans, waits = [], {}
    for event in sorted(events, key=lambda event: float(event["at_s"])):
        key = event.get("device"), event.get("step")
        if event["kind"] == "sync" and None not in key:
            waits[key] = event
        elif event["kind"] == "answer" and key in waits:
            spans.append(_wait_span(waits.pop(key), event, process))
        else:
            spans.append(_event_span(event, process))
    spans += [_event_span(event, process) for event in waits.values()]  # never answered
    return tuple(sorted(spans, key=lambda span: span.start_s))


def _wait_span(sync: Mapping[str, Any], answer: Mapping[str, Any], process: int) -> Span:
    start_s = float(sync["at_s"])
    return Span(
        process=process,
        track=f"device {sync['device']}",
        name=f"wait for step {sync['step']}",
        kind="wait",
        start_s=start_s,
        took_s=float(answer["at_s"]) - start_s,
        facts=(("step", sync["step"]),),
    )


def _event_span(event: Mapping[str, Any], process: int) -> Span:
    kind, took_s = str(event["kind"]), event.get("took_s")
    what = str(event.get("what", ""))
    known = {"launch": ("loop", "launch"), "finish": ("programs", "flight"), "callback": ("loop", "callback")}
    track, colour = known.get(kind, ("loop", "moment"))
    if kind in _TROUBLE:
        colour = "trouble"
    elif event.get("device") is not None:
        track = f"device {event['device']}"
    if took_s is None and colour != "trouble":
        colour = "moment"
    return Span(
        process=process,
        track=track,
        name=f"{kind} {what}".strip(),
        kind=colour,
        start_s=float(event["at_s"]) - float(took_s or 0.0),
        took_s=None if took_s is None else float(took_s),
        facts=tuple((name, event[name]) for name in ("step", "num_bytes") if event.get(name) is not None),
    )


def make_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """A trace in the JSON form that ui.perfetto.dev and chrome://tracing open.

    Google, "Trace Event Format" (2016). Complete events (`ph` X), moments (`i`) and names (`M`); times in
    microseconds. Spans that overlap on one track get a thread each, since complete events must nest.

    >>> [span] = make_spans([{"at_s": 2.0, "kind": "launch", "what": "bucket 0", "took_s": 0.5}])
    >>> make_trace([span])["traceEvents"][-1]["dur"]
    500000.0
    """
    rows = _rows(spans)
    threads = {row: number for number, row in enumerate(rows, start=1)}
    named: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": process,
            "tid": 0,
            "ts": 0,
            "name": "process_name",
            "args": {"name": f"process {process}"},
        }
        for process in sorted({process for process, _, _ in rows})
    ]
    named += [
        {"ph": "M", "pid": row[0], "tid": tid, "ts": 0, "name": "thread_name", "args": {"name": row[1]}}
        for row, tid in threads.items()
    ]
    made = [_trace_event(span, threads[row]) for row, members in rows.items() for span in members]
    return {"traceEvents": named + sorted(made, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


def _trace_event(span: Span, thread: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": span.name,
        "cat": span.kind,
        "pid": span.process,
        "tid": thread,
        "ts": span.start_s * 1e6,
        "args": dict(span.facts),
    }
    if span.took_s is None:
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": span.took_s * 1e6}


_Row = tuple[int, str, int]  # process, track, lane


def _rows(spans: Sequence[Span]) -> dict[_Row, list[Span]]:
    """Spans by row, none of which overlap in one: what does not fit goes to a further lane of its track."""
    rows: dict[_Row, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        lane = 0
        while (row := rows.get((span.process, span.track, lane))) and row[-1].end_s > span.start_s:
            lane += 1
        rows.setdefault((span.process, span.track, lane), []).append(span)
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], _natural(item[0][1]), item[0][2])))


def _natural(track: str) -> tuple[bool, str, int]:
    name, _, number = track.rpartition(" ")
    return (track != "training", name or track, int(number) if number.isdigit() else -1)


def draw_timeline(spans: Sequence[Span]) -> str:
    """An SVG picture: one row for each track, time to the right; only the last 3,000 spans.

    >>> spans = make_spans([{"at_s": 2.0, "kind": "launch", "what": "bucket 0", "took_s": 0.5}])
    >>> "launch bucket 0, 500.0 ms from 1.500 s" in draw_timeline(spans)
    True
    """
    shown = sorted(spans, key=lambda span: span.start_s)[-_MAX_SPANS:]
    rows = _rows(shown)
    start_s = shown[0].start_s if shown else 0.0
    end_s = max((span.end_s for span in shown), default=1.0)
    scale = (_WIDTH - _LEFT - 8) / ((end_s - start_s) or 1.0)
    is_many = len({process for process, _, _ in rows}) > 1
    parts: list[str] = []
    for number, ((process, track, lane), members) in enumerate(rows.items()):
        y = number * _ROW
        label = f"{process}: {track}" if is_many else track
        parts += [
            svg.line(_LEFT, y + _ROW, _WIDTH - 8, y + _ROW),
            *([svg.text(0, y + 13, svg.shorten(label, _LEFT - 8))] if lane == 0 else []),
            *(_draw_span(span, _LEFT + (span.start_s - start_s) * scale, y, scale) for span in members),
        ]
    low = len(rows) * _ROW
    parts += _time_marks(start_s, end_s, low + 14)
    kinds = {span.kind for span in shown}
    meaning = {text: _colour(kind) for kind, text in _MEANINGS.items() if kind in kinds}
    parts.append(svg.legend(_LEFT, low + 34, meaning))
    return svg.picture(f"timeline of {end_s - start_s:.3f} s", _WIDTH, low + 44, *parts)


def _colour(kind: str) -> str:
    return svg.RED if kind == "trouble" else _COLOURS.get(kind, "#8c8c8c")


def _draw_span(span: Span, x: float, y: float, scale: float) -> Markup:
    about = f"{span.name} at {span.start_s:.3f} s"
    if span.took_s is not None:
        about = f"{span.name}, {span.took_s * 1e3:.1f} ms from {span.start_s:.3f} s"
    for name, value in span.facts:
        about += f"\n{name} {format_bytes(value)}" if isinstance(value, int) and name == "num_bytes" else ""
    width = 2.0 if span.took_s is None else max(span.took_s * scale, 1.0)  # a shorter one is not seen
    return svg.rect(x, y + 3, width, _ROW - 6, _colour(span.kind), element("title", about))


def _time_marks(start_s: float, end_s: float, y: float) -> list[Markup]:
    parts = []
    for index in range(5):
        x = _LEFT + index / 4 * (_WIDTH - _LEFT - 8)
        anchor = "start" if index == 0 else "end" if index == 4 else "middle"
        seconds = start_s + index / 4 * (end_s - start_s)
        digits = max(0, 2 - math.floor(math.log10((end_s - start_s) or 1.0)))
        parts.append(svg.text(x, y, f"{seconds:.{digits}f} s", anchor=anchor))
    return parts
