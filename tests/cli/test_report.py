"""`jaxsync report` and `jaxsync doctor`: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import jaxsync
from jaxsync.cli import main
from jaxsync.run_log import RunHeader, RunLog


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    header = RunHeader(workload="digits", num_devices=8, platform="cpu", bytes_per_step=24)
    log = RunLog.open(tmp_path / "run", header)
    log.step(1, loss=2.0)
    log.step(5, loss=0.5, steps_per_s=4.0)
    log.close({"accuracy": 0.75})
    return str(tmp_path / "run")


def test_a_run_is_its_figures_on_stdout(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run_dir]) == 0
    lines = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["steps"], lines["steps/s"], lines["accuracy"]) == ("5", "4.0", "0.75")


def test_the_page_the_trace_and_the_json_come_from_one_call(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "run.html", tmp_path / "trace.json"
    assert main(["report", run_dir, "--html", str(page), "--trace", str(trace), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"jaxsync report: wrote {page}\njaxsync report: wrote {trace}\n"
    assert out.count("\n") == 1
    assert json.loads(out)["bytes_synced"] == 5 * 24
    assert page.read_text().startswith("<!DOCTYPE html>\n<html")
    assert "step 5: loss 0.5" in page.read_text()
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names == ["step 1", "steps 2 to 5"]


def test_what_cannot_be_read_or_written_is_named(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "run.json cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["report", run_dir, "--html", str(tmp_path / "nowhere" / "run.html")]) == 2
    assert "nowhere/run.html: No such file or directory" in capsys.readouterr().err


def test_the_doctor_tells_of_a_flag_that_aborts_jax_and_outlives_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["devices", "none"]
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1. To fix it: take that flag out" in out


def test_the_doctor_lists_what_a_process_would_have_and_notes_do_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    settings = {"JAX_NUM_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PJRT_NPROC": "6"}
    for name, value in {**settings, "SOMETHING_ELSE": "x"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["backend"] == {"platform": "cpu", "device_kind": "cpu", "num_devices": 3, "error": ""}
    assert table["environment"] == settings
    assert table["versions"]["jaxsync"] == jaxsync.__version__
    assert table["num_cores"] >= 1
    assert "train" in table["extras"]
    assert not {"dev", "docs"} & set(table["extras"])  # for work on jaxsync itself
    assert [finding["level"] for finding in table["findings"]] == ["note"]
