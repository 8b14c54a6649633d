"""The files of a run: written while it goes on, and read by `jaxsync report`.

`run.json` holds what is known at the start, and at the end what came out; it is replaced as a whole, so a
reader finds the old one or the new one. `steps.jsonl` has a JSON object a line for each step that was looked
at, and is only added to: a run that is killed leaves at most its last line unfinished. Files `events-*`, if
there are any, are those of `jaxsync.host.recorder`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jaxsync.errors import RunReadError, RunWriteError
from jaxsync.host.recorder import event_facts, read_event_file
from jaxsync.plan import SyncPlan
from jaxsync.report.plan_rows import read_plan_rows
from jaxsync.report.run_view import RunView, StepRecord, step_spans
from jaxsync.report.timeline import Span, make_spans

HEADER_FILE, STEPS_FILE = "run.json", "steps.jsonl"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What is known when a run starts.

    Attributes:
        workload: What is trained.
        num_devices: Devices of the mesh.
        platform: Their platform.
        bytes_per_step: Bytes each device hands to the collectives of one sync: `plan.num_bytes`.
        plan: The plan; None leaves it out.
        config: The config, of values that JSON has: `dataclasses.asdict(config)`.
        versions: Package -> version: `jaxsync.versions.library_versions()`.
        audit: Collectives of the compiled step, kind -> number: `Audit.counts`.
    """

    workload: str
    num_devices: int
    platform: str
    bytes_per_step: int
    plan: SyncPlan | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    audit: Mapping[str, int] = field(default_factory=dict)


class RunLog:
    """Writes the files of a run. A context manager, which closes without a summary if an exception leaves it.

    Of several processes one writes.

    Threading: one thread at a time; each call writes to the file system before it returns.

    >>> import tempfile
    >>> header = RunHeader(workload="digits", num_devices=8, platform="cpu", bytes_per_step=24)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = RunLog.open(folder, header)
    ...     log.step(1, loss=0.5)
    ...     log.close({"accuracy": 0.9})
    ...     print(repr(read_run(folder)))
    RunView(digits: 1 step, loss 0.5000; ended)
    """

    def __init__(self, directory: Path, table: dict[str, Any], steps: IO[str]) -> None:
        self._directory = directory
        self._table = table
        self._steps = steps
        self._start_s: float = table["start_s"]

    @classmethod
    def open(cls, directory: str | os.PathLike[str], header: RunHeader, *, resume: bool = False) -> RunLog:
        """A log in `directory`, which is made if need be.

        Args:
            directory: The run's own.
            header: What is known.
            resume: Whether to go on with the run that is there, if there is one. Steps that are then done
                again replace those that were there, and all after them.

        Raises:
            RunWriteError: There is a run in it, and not `resume`; or it cannot be written to.
            RunReadError: The run to go on with is damaged.
        """
        path = Path(directory)
        is_there = (path / HEADER_FILE).exists()
        if not resume:
            check_no_run(path)
        table = {**_header_table(header), **(_kept(path) if is_there else {})}
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if is_there:
                _drop_unfinished_line(path / STEPS_FILE)
            _replace_json(path / HEADER_FILE, table)
            steps = open(path / STEPS_FILE, "a" if is_there else "w", encoding="utf-8")  # noqa: SIM115
        return cls(path, table, steps)

    def step(self, step: int, *, loss: float, steps_per_s: float | None = None, finite: bool = True) -> None:
        """Adds a step that was looked at.

        Args:
            step: Its number, from 1.
            loss: Its mean training loss; any float.
            steps_per_s: As known now.
            finite: Whether all steps since the last call were finite, and so none was skipped.

        Raises:
            RunWriteError: It cannot be written, or the log is closed.
        """
        self._check_open()
        record = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,  # JSON has no NaN
            "steps_per_s": steps_per_s,
            "finite": finite,
            "at_s": round(time.monotonic() - self._start_s, 6),
        }
        with _writing(self._directory):
            self._steps.write(json.dumps(record, allow_nan=False) + "\n")
            self._steps.flush()

    def stall(self, text: str) -> None:
        """Adds a stall report, at once.

        Raises:
            RunWriteError: It cannot be written, or the log is closed.
        """
        self._check_open()
        self._table["stalls"].append(text)
        with _writing(self._directory):
            _replace_json(self._directory / HEADER_FILE, self._table)

    def close(
        self, summary: Mapping[str, Any] | None = None, events: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Ends the log. Closing again does nothing.

        Args:
            summary: What came out, of values that JSON has; a float that is not finite becomes None. Without
                it the run counts as one that did not end.
            events: `json.loads(client.record())`, of a client that was made together with the log.

        Raises:
            RunWriteError: It cannot be written.
        """
        if self._steps.closed:
            return
        self._table["summary"] = None if summary is None else _finite(summary)
        self._table["events"] = [dict(event) for event in events]
        with _writing(self._directory):
            self._steps.close()
            _replace_json(self._directory / HEADER_FILE, self._table)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._steps.closed:
            raise RunWriteError(directory=str(self._directory), reason="its log is closed")


def check_no_run(directory: str | os.PathLike[str]) -> None:
    """Refuses a directory that has a run in it: what `RunLog.open` does, before there is anything to write.

    Raises:
        RunWriteError: There is a run in it.

    >>> check_no_run("no/such/directory")
    """
    if (Path(directory) / HEADER_FILE).exists():
        raise RunWriteError(directory=str(directory), reason="there is a run in it")


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunWriteError(directory=str(directory), reason=_reason(error)) from error


def _kept(path: Path) -> dict[str, Any]:
    """What stays of a header when its run is resumed: when it started, its clock, its stalls."""
    old, steps = _read_header(path), _read_steps(path / STEPS_FILE, path)
    elapsed_s = steps[-1].at_s if steps else 0.0
    return {
        "started": old.get("started", ""),
        "start_s": time.monotonic() - elapsed_s,  # the time between the two does not count
        "stalls": list(old.get("stalls", [])),
    }


def read_run(directory: str | os.PathLike[str]) -> RunView:
    """The run in `directory`, whether it has ended, goes on, or was killed.

    Raises:
        RunReadError: There is no run in it, or a file is damaged other than by a last line cut short.
    """
    path = Path(directory)
    table = _read_header(path)
    steps = _read_steps(path / STEPS_FILE, path)
    try:
        return RunView(
            workload=str(table["workload"]),
            started=str(table["started"]),
            num_devices=int(table["num_devices"]),
            platform=str(table["platform"]),
            bytes_per_step=int(table["bytes_per_step"]),
            plan=None if table["plan"] is None else read_plan_rows(table["plan"]),
            config=dict(table["config"]),
            versions=dict(table["versions"]),
            audit={str(kind): int(number) for kind, number in table["audit"].items()},
            steps=steps,
            stalls=tuple(map(str, table["stalls"])),
            spans=_read_spans(path, table, steps),
            summary=None if table["summary"] is None else dict(table["summary"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{HEADER_FILE} is damaged: {type(error).__name__}: {error}"
        raise RunReadError(directory=str(path), reason=reason, found=_found(path)) from error


def _header_table(header: RunHeader) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    facts = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    return {
        "format": _FORMAT,
        "started": now.isoformat(timespec="seconds"),
        "start_s": time.monotonic(),  # the clock of event files, which all processes of a machine share
        **facts,
        "plan": None if header.plan is None else dataclasses.asdict(header.plan.rows),
        "stalls": [],
        "events": [],
        "summary": None,
    }


def _replace_json(path: Path, table: Mapping[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(_finite(table), allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _drop_unfinished_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _found(path: Path) -> tuple[str, ...]:
    try:
        return tuple(f"there is {name}" for name in sorted(os.listdir(path)))
    except OSError:
        return ()


def _read_header(path: Path) -> dict[str, Any]:
    try:
        content = (path / HEADER_FILE).read_bytes()
    except OSError as error:
        reason = f"{HEADER_FILE} cannot be read: {_reason(error)}"
        raise RunReadError(directory=str(path), reason=reason, found=_found(path)) from error
    try:
        table = json.loads(content)
        version = table["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{HEADER_FILE} is damaged: it is no JSON object with a format"
        raise RunReadError(directory=str(path), reason=reason, found=_found(path)) from error
    if version != _FORMAT:
        reason = f"{HEADER_FILE} has format {version!r}; this jaxsync reads format {_FORMAT}"
        raise RunReadError(directory=str(path), reason=reason)
    found: dict[str, Any] = table
    return found


def _read_steps(path: Path, directory: Path) -> tuple[StepRecord, ...]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        reason = f"{STEPS_FILE} cannot be read: {_reason(error)}"
        raise RunReadError(directory=str(directory), reason=reason, found=_found(directory)) from error
    records: list[StepRecord] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is not finished
        try:
            record = _read_step(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            reason = f"{STEPS_FILE} is damaged in line {number}"
            raise RunReadError(directory=str(directory), reason=reason) from error
        while records and records[-1].step >= record.step:  # a resumed run did them again
            records.pop()
        records.append(record)
    return tuple(records)


def _read_step(table: Mapping[str, Any]) -> StepRecord:
    speed = table["steps_per_s"]
    return StepRecord(
        step=int(table["step"]),
        loss=math.nan if table["loss"] is None else float(table["loss"]),
        steps_per_s=None if speed is None else float(speed),
        finite=bool(table["finite"]),
        at_s=float(table["at_s"]),
    )


def _read_spans(path: Path, table: Mapping[str, Any], steps: Sequence[StepRecord]) -> tuple[Span, ...]:
    spans = [*step_spans(steps), *make_spans(table["events"])]
    for file in sorted(path.glob("events-*")):
        process = file.name.split("-")[1]
        events = [event_facts(event) for event in read_event_file(file)]
        moved = [{**event, "at_s": event["at_s"] - table["start_s"]} for event in events]
        spans += make_spans(moved, int(process) if process.isdigit() else 0)
    return tuple(sorted(spans, key=lambda span: span.start_s))
