"""What a run looks like: its steps, figures and events as plain values, and their forms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxsync.report import figures
from jaxsync.report.chart import draw_line
from jaxsync.report.markup import Markup, element, fragment, join, page, table
from jaxsync.report.plan_form import plan_markup
from jaxsync.report.plan_rows import PlanRows
from jaxsync.report.text import format_bytes, format_count
from jaxsync.report.timeline import Span, draw_timeline, make_trace

_MAX_STALLS = 50  # of a page
_MAX_STEP_SPANS = 100_000  # of a trace: more are slow to make, and slower to open


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that was looked at.

    Attributes:
        step: Its number, from 1.
        loss: Its mean training loss; NaN if it was not finite.
        steps_per_s: As known then; None before the second look.
        finite: Whether all steps since the last record were finite, and so none was skipped.
        at_s: Seconds since the log was opened.
    """

    step: int
    loss: float
    steps_per_s: float | None
    finite: bool
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunView:
    """A run for people. Made by `jaxsync.run_log.read_run`.

    In a notebook it shows itself as the page that `jaxsync report --html` writes.

    Attributes:
        workload: What was trained.
        started: When, in UTC, as ISO 8601 has it.
        num_devices: Devices of the mesh.
        platform: Their platform.
        bytes_per_step: Bytes each device hands to the collectives of one sync.
        plan: The plan; None if the run has none.
        config: The config: key -> value.
        versions: Package -> version.
        audit: Collectives of the compiled step: kind -> number.
        steps: The steps that were looked at, in order.
        stalls: What the stall reports said, in order.
        spans: What ran when, steps included.
        summary: What came out of it: name -> value; None if the run did not end.
    """

    workload: str
    started: str
    num_devices: int
    platform: str
    bytes_per_step: int
    plan: PlanRows | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    audit: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()
    stalls: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    summary: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        last = f", loss {self.steps[-1].loss:.4f}" if self.steps else ""
        state = "ended" if self.is_complete else "did not end"
        return f"RunView({self.workload}: {format_count(self.num_steps, 'step')}{last}; {state})"

    def __str__(self) -> str:
        rows = self.figures()
        width = max(len(label) for label, _ in rows)
        lines = [f"{label.ljust(width)}  {value}" for label, value in rows]
        return "\n".join(lines + [f"stall: {stall}" for stall in self.stalls])

    def _repr_html_(self) -> str:
        return fragment(self._body())

    @property
    def is_complete(self) -> bool:
        """Whether the run ended by itself, and not by a crash, a kill or an interrupt."""
        return self.summary is not None

    @property
    def num_steps(self) -> int:
        """The number of the last step that was looked at."""
        return self.steps[-1].step if self.steps else 0

    @property
    def num_not_finite(self) -> int:
        """Records in which something was not finite."""
        return sum(not record.finite for record in self.steps)

    @property
    def steps_per_s(self) -> float | None:
        """The last that is known."""
        known = [record.steps_per_s for record in self.steps if record.steps_per_s is not None]
        return known[-1] if known else None

    @property
    def bytes_synced(self) -> int:
        """Bytes each device has handed to collectives, as far as steps were looked at."""
        return self.bytes_per_step * self.num_steps

    def figures(self) -> list[tuple[str, str]]:
        """The figures of the run, each with its label."""
        collectives = ", ".join(f"{number} {kind}" for kind, number in self.audit.items()) or "-"
        if in_loop := self._in_loop():
            collectives += f", of which {in_loop} {figures.IN_LOOPS}"
        synced = figures.format_bytes_synced(self.bytes_per_step)
        rows = [
            ("run", f"{self.workload}, started {self.started}"),
            ("state", "ended" if self.is_complete else "did not end: stopped, or still running"),
            ("devices", f"{self.num_devices} {self.platform}"),
            ("steps", str(self.num_steps)),
            (
                figures.FINAL_LOSS if self.is_complete else "last training loss",
                f"{self.steps[-1].loss:.4f}" if self.steps else "-",
            ),
            (figures.SKIPPED, self._skipped()),
            (figures.SPEED, figures.format_speed(self.steps_per_s)),
            (figures.BYTES_SYNCED, f"{synced} a device, {format_bytes(self.bytes_synced)} in all"),
            (figures.COLLECTIVES, collectives),
            ("stalls", str(len(self.stalls))),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "-"),
        ]
        return rows + list(self._outcome())

    def _skipped(self) -> str:
        number = (self.summary or {}).get("num_skipped")
        if isinstance(number, int):
            return str(number)
        # Of a run that did not end, or counts none itself, only this is known.
        found = self.num_not_finite
        return f"some, before {found} of {format_count(len(self.steps), 'look')}" if found else "0"

    def _in_loop(self) -> int:
        number = (self.summary or {}).get("collectives_in_loop")
        return number if isinstance(number, int) else 0

    def _outcome(self) -> Iterator[tuple[str, str]]:
        """What the summary adds, each under the name that `jaxsync train` has for it."""
        shown = self._shown()
        for name, value in (self.summary or {}).items():
            if name == "metrics" and isinstance(value, Mapping):
                yield from ((_words(key), _metric(key, part)) for key, part in value.items())
            elif name == "gradient_error" and isinstance(value, float | None):
                yield figures.GRADIENT_ERROR, figures.format_gradient_error(value)
            elif name not in shown or shown[name] != value:
                yield _words(name), _value(value)

    def _shown(self) -> dict[str, Any]:
        """What the figures say already, under the names that a summary has for it."""
        loss = self.steps[-1].loss if self.steps else math.nan
        return {
            "workload": self.workload,
            "num_devices": self.num_devices,
            "steps": self.num_steps,
            "final_loss": loss if math.isfinite(loss) else None,  # JSON has no NaN
            "steps_per_s": self.steps_per_s,
            "bytes_synced_per_step": self.bytes_per_step,
            "collectives_per_step": sum(self.audit.values()) - self._in_loop(),
            "collectives_in_loop": self._in_loop(),
            "num_skipped": (self.summary or {}).get("num_skipped"),
        }

    def to_page(self) -> str:
        """The run as one HTML page that loads nothing."""
        return page(f"jaxsync run: {self.workload}", self._body())

    def to_json(self) -> dict[str, Any]:
        """The figures of the run, for machines; a number that is not finite is None."""
        loss = self.steps[-1].loss if self.steps else math.nan
        return {
            "workload": self.workload,
            "started": self.started,
            "is_complete": self.is_complete,
            "num_devices": self.num_devices,
            "platform": self.platform,
            "steps": self.num_steps,
            "last_loss": loss if math.isfinite(loss) else None,
            "num_not_finite": self.num_not_finite,
            "steps_per_s": self.steps_per_s,
            "bytes_per_step": self.bytes_per_step,
            "bytes_synced": self.bytes_synced,
            "audit": dict(self.audit),
            "stalls": list(self.stalls),
            "versions": dict(self.versions),
            "fingerprint": self.plan.fingerprint if self.plan else None,
            "summary": None if self.summary is None else dict(self.summary),
        }

    def to_trace(self) -> dict[str, Any]:
        """What ran when, for Perfetto: see `jaxsync.report.timeline.make_trace`."""
        return make_trace(self.spans)

    def _body(self) -> Markup:
        parts = [] if self.is_complete else [element("p", "This run did not end.", class_="bad")]
        parts.append(table(("", ""), self.figures()))
        parts += [element("h2", "Loss"), *_chart(self.steps, "loss")]
        parts += [element("h2", "Steps per second"), *_chart(self.steps, "steps_per_s")]
        parts += [element("h2", "Timeline"), _timeline(self.spans)]
        parts += [element("h2", "Stalls"), _stalls(self.stalls)]
        parts += [element("h2", "Plan"), plan_markup(self.plan) if self.plan else element("p", "none")]
        parts += [element("h2", "Config"), table(("key", "value"), _flat(self.config))]
        return join(parts)


def step_spans(steps: Sequence[StepRecord]) -> tuple[Span, ...]:
    """The time between looks at steps, on the track "training"; with more than 100,000, of several in one."""
    spans, before = [], StepRecord(step=0, loss=math.nan, steps_per_s=None, finite=True, at_s=0.0)
    size = math.ceil(len(steps) / _MAX_STEP_SPANS) or 1
    for index in range(0, len(steps), size):
        part = steps[index : index + size]
        record = part[-1]
        first = before.step + 1
        spans.append(
            Span(
                track="training",
                name=f"step {record.step}" if first >= record.step else f"steps {first} to {record.step}",
                kind="step" if all(each.finite for each in part) else "trouble",
                start_s=before.at_s,
                took_s=max(record.at_s - before.at_s, 0.0),
                facts=(("step", record.step),),
            )
        )
        before = record
    return tuple(spans)


def _chart(steps: Sequence[StepRecord], name: str) -> list[Markup]:
    values = [(record.step, getattr(record, name)) for record in steps]
    points = [(step, value) for step, value in values if value is not None]
    if not points:
        return [element("p", "none")]
    return [Markup(draw_line(points, title=name.replace("steps_per_s", "steps/s")))]


def _timeline(spans: Sequence[Span]) -> Markup:
    return Markup(draw_timeline(spans)) if spans else element("p", "none")


def _stalls(stalls: Sequence[str]) -> Markup:
    parts = [element("p", stall, class_="bad") for stall in stalls[:_MAX_STALLS]]
    if len(stalls) > _MAX_STALLS:
        parts.append(element("p", f"and {len(stalls) - _MAX_STALLS} more"))
    return join(parts or [element("p", "none")])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _metric(name: str, value: Any) -> str:
    return figures.format_metric(name, value) if isinstance(value, float) else _value(value)


def _value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part)}" for name, part in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "-" if value is None or value == "" else str(value)))
    return rows
