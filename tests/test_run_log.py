"""The files of a run, written and read back: whole, unfinished, resumed, and damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import jax
import pytest

import jaxsync
from jaxsync.errors import RunReadError, RunWriteError
from jaxsync.host.recorder import Event, EventFile
from jaxsync.run_log import RunHeader, RunLog, read_run


@pytest.fixture(scope="module")
def plan() -> jaxsync.SyncPlan:
    params = {"w": jax.ShapeDtypeStruct((3, 2), "float32"), "b": jax.ShapeDtypeStruct((2,), "float32")}
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))


@pytest.fixture
def header(plan: jaxsync.SyncPlan) -> RunHeader:
    return RunHeader(
        workload="digits",
        num_devices=8,
        platform="cpu",
        bytes_per_step=plan.num_bytes,
        plan=plan,
        config={"train": {"steps": 4, "learning_rate": math.inf}},
        versions={"jax": "0.10.2"},
        audit={"all-reduce": 1},
    )


def write(directory: Path, header: RunHeader, losses: list[float]) -> RunLog:
    log = RunLog.open(directory, header)
    for step, loss in enumerate(losses, start=1):
        log.step(step, loss=loss, steps_per_s=2.0 * step, finite=math.isfinite(loss))
    return log


def test_a_run_is_read_as_it_was_written(tmp_path: Path, header: RunHeader, plan: jaxsync.SyncPlan) -> None:
    log = write(tmp_path / "new" / "run", header, [2.0, math.nan, 0.5])
    log.stall("step 2 has waited for 10 s")
    log.close({"accuracy": 0.75, "error": math.nan}, events=[{"at_s": 1.0, "kind": "launch", "took_s": 0.25}])
    run = read_run(tmp_path / "new" / "run")
    assert [(record.step, record.steps_per_s, record.finite) for record in run.steps] == [
        (1, 2.0, True),
        (2, 4.0, False),
        (3, 6.0, True),
    ]
    assert [run.steps[0].loss, run.steps[2].loss] == [2.0, 0.5]
    assert math.isnan(run.steps[1].loss)
    assert run.plan == plan.rows
    assert run.bytes_per_step == plan.num_bytes == 32
    assert (run.config["train"], run.audit, run.versions) == (
        {"steps": 4, "learning_rate": None},
        {"all-reduce": 1},
        {"jax": "0.10.2"},
    )
    assert run.stalls == ("step 2 has waited for 10 s",)
    assert run.summary == {"accuracy": 0.75, "error": None}
    assert run.is_complete
    [launch] = [span for span in run.spans if span.kind == "launch"]
    assert (launch.start_s, launch.took_s) == (0.75, 0.25)


def test_a_run_can_be_read_while_it_goes_on_and_after_an_exception(tmp_path: Path, header: RunHeader) -> None:
    def train() -> None:
        with RunLog.open(tmp_path, header) as log:
            log.step(1, loss=2.0)
            assert read_run(tmp_path).num_steps == 1
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # our own
        train()
    run = read_run(tmp_path)
    assert (run.num_steps, run.is_complete) == (1, False)


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\x00\x00", b'{"step": 3, "loss": 1.0}'])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, header: RunHeader, tail: bytes) -> None:
    write(tmp_path, header, [2.0, 1.0]).close()
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(tail)
    assert read_run(tmp_path).num_steps == 2


def test_a_run_that_is_resumed_goes_on_from_its_last_whole_line(tmp_path: Path, header: RunHeader) -> None:
    log = write(tmp_path, header, [4.0, 3.0, 2.0])
    log.stall("a stall of the first part")
    log.close()
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'{"step": 4, "lo')
    before = read_run(tmp_path)
    with RunLog.open(tmp_path, header, resume=True) as resumed:
        resumed.step(3, loss=2.5)  # from the checkpoint of step 2
        resumed.step(4, loss=1.5)
    run = read_run(tmp_path)
    assert [(record.step, record.loss) for record in run.steps] == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.5)]
    times = [record.at_s for record in run.steps]
    assert times == sorted(times)
    assert (run.started, run.stalls) == (before.started, ("a stall of the first part",))


def test_resuming_nothing_starts_a_run(tmp_path: Path, header: RunHeader) -> None:
    RunLog.open(tmp_path, header, resume=True).close({})
    assert read_run(tmp_path).is_complete


def test_a_second_run_in_a_directory_is_refused(tmp_path: Path, header: RunHeader) -> None:
    write(tmp_path, header, [2.0]).close({})
    with pytest.raises(RunWriteError, match="there is a run in it") as error:
        RunLog.open(tmp_path, header)
    assert error.value.directory == str(tmp_path)
    assert read_run(tmp_path).num_steps == 1


def test_a_closed_log_refuses_steps_and_closes_again(tmp_path: Path, header: RunHeader) -> None:
    log = write(tmp_path, header, [2.0])
    log.close({"accuracy": 1.0})
    log.close()
    assert read_run(tmp_path).is_complete
    with pytest.raises(RunWriteError, match="its log is closed"):
        log.step(2, loss=1.0)
    with pytest.raises(RunWriteError, match="its log is closed"):
        log.stall("late")


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path, header: RunHeader) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunWriteError, match="Not a directory"):
        RunLog.open(tmp_path / "file" / "run", header)


def test_the_header_is_replaced_and_never_half_there(tmp_path: Path, header: RunHeader) -> None:
    log = write(tmp_path, header, [2.0])
    before = os.stat(tmp_path / "run.json").st_ino
    with open(tmp_path / "run.json") as held:
        log.stall("a stall")
        assert json.load(held)["stalls"] == []  # who has the old one open reads it to its end
    assert os.stat(tmp_path / "run.json").st_ino != before
    assert sorted(os.listdir(tmp_path)) == ["run.json", "steps.jsonl"]
    log.close()


def damage(tmp_path: Path, name: str, old: str, new: str) -> None:
    path = tmp_path / name
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("run.json", "{", "", "run.json is damaged: it is no JSON object with a format"),
        ("run.json", '"format": 1', '"format": 7', "run.json has format 7; this jaxsync reads format 1"),
        ("run.json", '"plan"', '"plane"', "run.json is damaged: KeyError: 'plan'"),
        (
            "run.json",
            '"kind": "fused"',
            '"kind": "odd"',
            "run.json is damaged: ValueError: a bucket of kind 'odd'",
        ),
        ("run.json", '"events": []', '"events": [3]', "run.json is damaged: TypeError"),
        ("steps.jsonl", '"loss": 2.0', '"loss": ?', "steps.jsonl is damaged in line 1"),
        ("steps.jsonl", '"finite"', '"fin"', "steps.jsonl is damaged in line 1"),
    ],
)
def test_damage_is_named_by_its_file(tmp_path, header: RunHeader, name, old, new, reason) -> None:
    write(tmp_path, header, [2.0, 1.0]).close({})
    damage(tmp_path, name, old, new)
    with pytest.raises(RunReadError) as error:
        read_run(tmp_path)
    assert error.value.reason.startswith(reason)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("run.json", b"\xff\xfe\x00{", "run.json is damaged: it is no JSON object with a format"),
        ("run.json", DEEP, "run.json is damaged: it is no JSON object with a format"),
        ("steps.jsonl", b"\xff\x00\n", "steps.jsonl is damaged in line 1"),
        ("steps.jsonl", DEEP + b"\n", "steps.jsonl is damaged in line 1"),
    ],
    ids=["binary header", "deep header", "binary steps", "deep steps"],
)
def test_files_that_are_no_text_or_nested_too_deep_are_damaged(
    tmp_path, header: RunHeader, name: str, content: bytes, reason: str
) -> None:
    write(tmp_path, header, [2.0]).close({})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunReadError) as error:
        read_run(tmp_path)
    assert error.value.reason == reason


def test_what_is_there_instead_of_a_run_is_listed(tmp_path: Path, header: RunHeader) -> None:
    with pytest.raises(RunReadError, match=r"run\.json cannot be read: No such file or directory"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunReadError) as error:
        read_run(tmp_path)
    assert error.value.found == ("there is notes.txt",)
    write(tmp_path, header, [1.0]).close({})
    (tmp_path / "steps.jsonl").unlink()
    with pytest.raises(RunReadError, match=r"steps\.jsonl cannot be read"):
        read_run(tmp_path)


def test_the_events_of_processes_are_on_the_clock_of_the_run(tmp_path: Path, header: RunHeader) -> None:
    write(tmp_path, header, [1.0]).close({})
    start_s = json.loads((tmp_path / "run.json").read_text())["start_s"]
    EventFile(tmp_path / "events-3-4711").append(Event(at_s=start_s + 2.5, kind="program", step=7))
    [span] = [span for span in read_run(tmp_path).spans if span.track != "training"]
    assert (span.process, span.name, round(span.start_s, 6)) == (3, "program", 2.5)
