"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jaxsync
from jaxsync import SyncConfig
from jaxsync.cli import main
from jaxsync.cli.progress import progress_bar
from jaxsync.cli.train import format_result
from jaxsync.cli.tune import format_tune_result
from jaxsync.reference import importing_from
from jaxsync.workloads.subject import load_subject
from jaxsync.workloads.train import TrainResult
from jaxsync.workloads.tune import Measurement, TuneResult, make_candidates, tune_file
from jaxsync.workloads.verdict import Interval

pytestmark = pytest.mark.usefixtures("standard_promotion")

CONFIGS = Path(__file__).parents[1] / "configs"
DIGITS, CHARLM = str(CONFIGS / "digits.toml"), str(CONFIGS / "charlm.toml")
SHORT = ["--set", "train.steps=4", "--set", "model.hidden=[16]"]


def run_process(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *args], capture_output=True, text=True, timeout=200, check=False
    )


def test_a_run_prints_its_report_on_stdout_and_its_progress_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", DIGITS, *SHORT]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    labels = [line.partition("  ")[0] for line in lines]
    assert labels == [
        "test accuracy",
        "final training loss",
        "steps",
        "steps skipped as not finite",
        "steps/s",
        "collectives per step",
        "bytes synced per step",
        "largest gradient difference",
    ]
    columns = {len(line) - len(line.partition("  ")[2].lstrip()) for line in lines}
    assert len(columns) == 1  # aligned
    # No terminal: nothing moves, and there is a line for the first step and one for the last.
    first, last = err.splitlines()
    assert re.fullmatch(r"digits  step 1/4  loss \d\.\d{4}  - steps/s", first)
    assert re.fullmatch(r"digits  step 4/4  loss \d\.\d{4}  [\d.]+ steps/s", last)


def test_lines_of_progress_are_few_and_the_last_is_among_them(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("job", list, "{description} {completed}/{total}", feature="", total=300) as move:
        for number in range(1, 201):
            move(completed=number)
        move(description="end")
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("job 1/300", "end 200/300")
    assert len(lines) < 10


def test_a_run_with_a_directory_says_how_to_look_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "a run")
    assert main(["train", DIGITS, *SHORT, "--run-dir", directory]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    label, _, said = last.partition("  ")
    assert (label, said.partition("; ")[0].strip()) == ("run", f"in {directory}")
    command = said.partition("to look at it: ")[2]
    assert main(shlex.split(command)[1:]) == 0
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    # The same things have the same names and forms as where they were trained.
    assert main(["report", directory, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert shown["test accuracy"] == f"{100 * summary['metrics']['test_accuracy']:.2f} %"
    assert shown["final training loss"] == f"{summary['final_loss']:.4f}"
    assert shown["steps skipped as not finite"] == "0"
    error = f"{summary['gradient_error']:.1e} of the norm, to one device"
    assert shown["largest gradient difference"] == error
    assert shown["collectives per step"] == "1 all-reduce"
    assert shown["bytes synced per step"].startswith("4840 (4.7 KiB)")
    assert not {"num skipped", "gradient error", "metrics", "collectives in loop"} & set(shown)


def test_json_is_one_object_on_stdout_and_nothing_else() -> None:
    done = run_process("-m", "jaxsync", "train", DIGITS, "--json", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert list(result) == [
        "workload",
        "test_accuracy",
        "final_loss",
        "steps",
        "num_skipped",
        "steps_per_s",
        "collectives_per_step",
        "collectives_in_loop",
        "bytes_synced_per_step",
        "gradient_error",
        "num_devices",
    ]
    assert (result["workload"], result["steps"], result["num_skipped"]) == ("digits", 4, 0)
    assert (result["collectives_per_step"], result["collectives_in_loop"]) == (1, 0)
    assert result["bytes_synced_per_step"] == 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert 0 <= result["gradient_error"] <= 1e-6
    assert 0 <= result["test_accuracy"] <= 1
    assert result["num_devices"] == 8


def test_a_number_that_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DIGITS, "--json", *SHORT, "--set", "train.learning_rate=1e38"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_skipped"] > 0
    assert result["final_loss"] is None
    assert result["gradient_error"] is None


def test_a_dry_run_prints_the_plan_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DIGITS, "--dry-run", "--set", "train.steps=1000000000"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "SyncPlan over mesh (data=8), mean over data"
    assert "6 leaves (0 pass through), 2 buckets, 1 all-reduce, 198.5 KiB a step and device" in out
    assert err == ""


def test_a_dry_run_gives_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", CHARLM, "--dry-run", "--json", "--set", "sync.reduce=sum"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["mesh"], plan["data_axes"], plan["reduce"]) == ({"data": 8}, ["data"], "sum")
    assert plan["num_all_reduces"] == 1
    assert plan["num_leaves"] == sum(len(bucket["leaves"]) for bucket in plan["buckets"]) == 15
    assert plan["num_bytes"] == sum(bucket["bytes"] for bucket in plan["buckets"])
    assert len(plan["fingerprint"]) == 64


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["no-such.toml"], ["no-such.toml", "cannot be read: No such file or directory"]),
        (
            [DIGITS, "--set", "train.stesp=3"],
            [DIGITS, "unknown key 'train.stesp': the nearest is 'train.steps'"],
        ),
        ([DIGITS, "--set", "steps=3"], ["unknown key 'steps': the nearest is 'train.steps'"]),
        ([DIGITS, "--set", "train.steps=many"], [DIGITS, "train.steps = 'many': wanted int"]),
        ([DIGITS, "--set", "train.steps"], ["'train.steps': wanted key=value"]),
        ([DIGITS, "--set", "sync.reduce=avg"], ["sync.reduce = 'avg': wanted 'mean' or 'sum'"]),
        (
            [DIGITS, "--set", "train.batch_size=60"],
            ["train.batch_size = 60: wanted a multiple of 8 (8 devices x 1 microbatches), such as 64"],
        ),
        ([DIGITS, "--set", "mesh.data=16"], ["mesh = {'data': 16}: needs 16 devices, and devices = 8"]),
        (
            [DIGITS, "--set", "mesh={batch=8}"],
            ["sync.axis names 'data', which the mesh does not have: its axes are ['batch']"],
        ),
        ([DIGITS, "--set", "train.batch_size=1440"], ["the data set has 1437 rows"]),
        ([CHARLM, "--set", "model.context=1000000"], ["model.context = 1000000: the held-out text has"]),
        (
            [DIGITS, "--set", "devices=0", "--set", "mesh.data=16"],
            ["The mesh needs 16 devices; JAX has 8", "make a smaller mesh"],
        ),
        (
            [DIGITS, "--set", "devices=4", "--set", "mesh.data=4"],
            ["Cannot simulate 4 CPU devices: simulate_devices(8) was called before."],
        ),
        (
            [DIGITS, "--set", "mesh={data=4, model=2}", "--set", "train.transform=pmap"],
            ["transform='pmap' has one axis: use transform='shard_map'"],
        ),
        ([DIGITS, "--set", "sync.max_in_flight=99"], ["max_in_flight=99 is not between 1 and 32"]),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"], ["--dry-run"]], ids=["text", "json", "dry_run"])
def test_a_job_that_cannot_run_gives_one_message_and_exit_code_2(
    args: list[str], parts: list[str], form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *args, *form]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxsync: ")
    assert err.count("To fix it: ") == 1
    for part in parts:
        assert part in err


def test_a_file_that_is_no_toml_is_named_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("workload = \n")
    assert main(["train", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"Not a valid configuration: {file}." in err
    assert "(at line 1, column 12)" in err
    assert "correct the file at that place" in err


def test_a_file_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits.toml"]) == 2
    fix = capsys.readouterr().err.partition("To fix it: ")[2]
    assert fix == (
        "give the path of a TOML file that is there and can be read; "
        f"digits.toml was looked for in the current folder, {tmp_path}.\n"
    )
    assert main(["train", str(tmp_path / "digits.toml")]) == 2
    assert "current folder" not in capsys.readouterr().err


def test_a_directory_with_a_run_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    args = [DIGITS, "--set", "train.steps=1000000000", "--run-dir", str(tmp_path)]
    assert main(["train", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxsync: The run cannot be written to {tmp_path}: there is a run in it.\n")
    assert "--run-dir DIR" in err
    assert "--resume" in err


def test_an_error_in_a_process_of_its_own_has_no_traceback() -> None:
    done = run_process("-m", "jaxsync", "train", DIGITS, "--set", "devices=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxsync: The mesh needs 8 devices; JAX has ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "package", "feature"),
    [
        ("optax", "optax", "jaxsync train"),
        ("rich", "rich", "The progress bar of jaxsync train"),
        ("sklearn", "scikit-learn", "The digits workload"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    module: str, package: str, feature: str
) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; from jaxsync.cli import main; "
        f"sys.exit(main(['train', {DIGITS!r}]))"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"jaxsync: {feature} needs the package {package!r}, which is not installed.\n"
        "To fix it: pip install 'jaxsync[train]'\n"
    )


def test_checkpoints_need_an_extra_of_their_own(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['orbax'] = None; from jaxsync.cli import main; "
        f"sys.exit(main(['train', {DIGITS!r}, '--checkpoints', {str(tmp_path)!r}]))"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "jaxsync: jaxsync train with checkpoints (--checkpoints, train.checkpoint_dir) needs the package "
        "'orbax-checkpoint', which is not installed.\n"
        "To fix it: pip install 'jaxsync[checkpoint]'\n"
    )


def test_json_needs_no_progress_bar() -> None:
    code = (
        "import sys; sys.modules['rich'] = None; from jaxsync.cli import main; "
        f"sys.exit(main(['train', {DIGITS!r}, '--json', *{SHORT!r}]))"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["steps"] == 4


def test_an_interrupt_ends_a_run_with_one_line_and_exit_code_130() -> None:
    args = ["train", DIGITS, "--set", "train.steps=1000000000"]
    seen, stdout, code = _interrupt(args, mark=b"20/1000000000")
    assert (stdout, code) == ("", 130)
    assert seen.endswith(b"jaxsync: interrupted\r\n")
    assert b"Traceback" not in seen


def test_an_interrupted_run_says_how_to_resume_and_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "a run")
    args = [DIGITS, "--set", "train.steps=100000", "--set", "train.checkpoint_every=10"]
    seen, stdout, code = _interrupt(["train", *args, "--checkpoints", directory], mark=b"40/100000")
    assert (stdout, code) == ("", 130)
    last = seen.decode().splitlines()[-1]
    said = re.search(r"jaxsync: interrupted; to go on from step (\d+): (.*)", last)
    assert said, seen.decode()
    newest = int(said[1])
    assert newest == jaxsync.list_checkpoints(directory)[-1] >= 30
    assert shlex.split(said[2]) == [
        *("jaxsync", "train", DIGITS, "--set=train.steps=100000", "--set=train.checkpoint_every=10"),
        *("--checkpoints", directory, "--resume"),
    ]
    again = [*shlex.split(said[2])[1:], "--json", "--set", f"train.steps={newest + 2}"]
    assert main(again) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"] == newest + 2
    assert err == ""


def test_resume_without_checkpoints_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", DIGITS, "--resume"]) == 2
    assert "--resume needs --checkpoints DIR (train.checkpoint_dir)" in capsys.readouterr().err
    assert main(["train", DIGITS, "--resume", "--checkpoints", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"jaxsync: No checkpoint could be loaded from {tmp_path / 'none'}: ")
    assert "there is no such directory" in err


def _interrupt(args: list[str], mark: bytes) -> tuple[bytes, str, int]:
    """Runs the command until stderr shows `mark`, and interrupts it: stderr, stdout and the exit code."""
    # A terminal of its own for stderr, so that the bar shows when it is under way. The handler is set here
    # because a process started in the background inherits one that ignores the signal.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from jaxsync.cli import main; sys.exit(main({args!r}))"
    )
    terminal, stderr = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
    ) as child:
        os.close(stderr)
        try:
            seen = _read_until(terminal, mark)
            child.send_signal(signal.SIGINT)
            seen += _read_until(terminal, None)
            returncode = child.wait(timeout=60)
            assert child.stdout is not None
            return seen, child.stdout.read(), returncode
        finally:
            child.kill()
            os.close(terminal)


def _read_until(terminal: int, mark: bytes | None) -> bytes:
    """What the terminal shows up to and with `mark`; None reads to the end."""
    seen = b""
    while mark is None or mark not in seen:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # Linux: the other end is closed
            chunk = b""
        if not chunk:
            assert mark is None, seen
            break
        seen += chunk
    return seen


OWN_MODULE = """
import jax.numpy as jnp, numpy as np

print("loading")

def make():
    params = {f"w{i:02}": np.ones(3, np.float32) for i in range(20)}

    def loss_fn(params, batch):
        print("tracing")
        return jnp.mean((batch @ sum(params.values())) ** 2) * 1e-3

    return loss_fn, params, np.ones((8, 3), np.float32)
"""
OWN_CONFIG = """
[mesh]
data = 8
[sync]
max_in_flight = 4
[tune]
module = "tune_printing_model:make"
"""


@pytest.fixture
def own_config(tmp_path: Path) -> str:
    sys.modules.pop("tune_printing_model", None)  # that of another test, in another folder
    (tmp_path / "tune_printing_model.py").write_text(OWN_MODULE)
    file = tmp_path / "tune.toml"
    file.write_text(OWN_CONFIG)
    return str(file)


def test_tune_prints_nothing_but_toml_on_stdout(own_config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", own_config, "--repeats", "10"]) == 0
    out, err = capsys.readouterr()
    assert list(tomllib.loads(out)) == ["sync"]
    assert re.match(r"# jaxsync tune on 8 cpu devices, \d+ steps a round\n# candidate +buckets ", out)
    assert re.search(r"^# .* is best: ", out, re.MULTILINE)
    # What the user's own code prints is no TOML, and goes where the bar is.
    assert "loading" in err
    assert "tracing" in err
    assert re.search(r"round \d+ of 10, \d candidates", err)


def test_the_printed_toml_gives_the_plan_that_was_measured(own_config: str, tmp_path: Path) -> None:
    result = tune_file(own_config, num_rounds=10)
    with importing_from(tmp_path):
        subject = load_subject(own_config)
    candidates = make_candidates(subject)
    assert len(candidates) == len(result.measurements) == 4
    for index, candidate in enumerate(candidates):  # whichever the clock makes the best
        file = tmp_path / "best.toml"
        file.write_text(format_tune_result(dataclasses.replace(result, best=index)))
        plan = jaxsync.make_plan(subject.params, subject.mesh, config=SyncConfig.from_toml(file))
        assert plan == candidate.plan
        assert len(plan.buckets) == result.measurements[index].num_buckets


def test_tune_gives_one_json_object_and_no_bar() -> None:
    # No rich is needed for it; and a job of one leaf each way has nothing to choose from.
    code = (
        "import sys; sys.modules['rich'] = None; from jaxsync.cli import main; "
        f"sys.exit(main(['tune', {DIGITS!r}, '--set', 'model.hidden=[]', '--json', '--repeats', '10']))"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert list(result) == [
        "best",
        "is_default_best",
        "sync",
        "num_devices",
        "platform",
        "steps_per_round",
        "spread",
        "candidates",
    ]
    assert [each["label"] for each in result["candidates"]] == ["default", "fuse_max_bytes = 0"]
    assert [each["num_buckets"] for each in result["candidates"]] == [1, 2]
    default, other = result["candidates"]
    assert (default["ratio"], default["ratio_low"], default["ratio_high"]) == (1, 1, 1)
    assert other["changes"] == {"fuse_max_bytes": 0}
    assert result["is_default_best"] is (result["best"] == "default")
    best = default if result["is_default_best"] else other
    assert SyncConfig(**result["sync"]) == SyncConfig(**best["changes"])


def measurement(label: str, *, step_s: float, ratio: tuple[float, float, float], num_rounds: int = 20) -> Any:
    low, median, high = ratio
    changes = {} if label == "default" else {"bucket_max_leaves": int(label.split()[-1])}
    return Measurement(
        label=label,
        changes=changes,
        sync=SyncConfig(**changes),
        num_buckets=3,
        compile_s=1.25,
        step_s=step_s,
        num_rounds=num_rounds,
        ratio=Interval(low=low, median=median, high=high),
    )


RESULT = TuneResult(
    measurements=(
        measurement("default", step_s=0.005, ratio=(1, 1, 1)),
        measurement("bucket_max_leaves = 8", step_s=0.01, ratio=(-math.inf, 2, math.inf), num_rounds=5),
        measurement("bucket_max_leaves = 64", step_s=0.004, ratio=(0.75, 0.801, 0.875)),
    ),
    best=2,
    steps_per_round=9,
    spread=0.1,
    num_devices=8,
    platform="cpu",
)


def test_the_report_of_tune_says_by_how_much_the_best_is_better() -> None:
    assert format_tune_result(RESULT) == (
        "# jaxsync tune on 8 cpu devices, 9 steps a round\n"
        "# candidate               buckets      step  compile  rounds        ratio to default\n"
        "# ----------------------  -------  --------  -------  ------  ----------------------\n"
        "# default                       3   5.00 ms   1.25 s      20                       1\n"
        "# bucket_max_leaves = 8         3  10.00 ms   1.25 s       5   2.000, clearly slower\n"
        "# bucket_max_leaves = 64        3   4.00 ms   1.25 s      20  0.801 (0.750 to 0.875)\n"
        "#\n"
        "# bucket_max_leaves = 64 is best: a step takes 19.9 % less time (at least 12.5 %) than with "
        "default,\n"
        "# 4.00 ms and not 5.00 ms; it compiles in 1.25 s and not 1.25 s.\n"
        + SyncConfig(bucket_max_leaves=64).to_toml().rstrip()
    )


def test_the_report_of_tune_says_that_the_default_is_best() -> None:
    report = format_tune_result(dataclasses.replace(RESULT, best=0))
    assert "\n# default is best: none takes 2.0 % less time beyond the noise.\n[sync]\n" in report
    alone = dataclasses.replace(RESULT, best=0, measurements=RESULT.measurements[:1])
    assert "\n# default is best: all candidates make the same buckets.\n[sync]\n" in format_tune_result(alone)


def test_the_report_of_tune_says_that_the_machine_was_busy() -> None:
    report = format_tune_result(dataclasses.replace(RESULT, best=0, spread=0.713))
    assert report.partition("#\n")[2].startswith(
        "# default is best: none takes 2.0 % less time beyond the noise.\n"
        "# The machine was busy: the middle half of the rounds of default differ by 71.3 %.\n"
        "# Step times would be others on an idle machine, and small gains may be hidden: run again when it "
        "is idle, or with more --repeats.\n[sync]\n"
    )


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["no-such.toml"], ["no-such.toml", "cannot be read: No such file or directory"]),
        ([DIGITS, "--repeats", "3"], ["configuration: --repeats.", "repeats = 3: wanted 10 or more"]),
        ([DIGITS, "--set", "train.stesp=3"], ["unknown key 'train.stesp': the nearest is 'train.steps'"]),
        (
            [DIGITS, "--set", "tune.module=a:b"],
            ["workload = 'digits' and a [tune] table: give one of the two"],
        ),
        ([DIGITS, "--set", "devices=4", "--set", "mesh.data=4"], ["Cannot simulate 4 CPU devices"]),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_what_cannot_be_tuned_gives_one_message_and_exit_code_2(
    args: list[str], parts: list[str], form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *args, *form]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("jaxsync: ") == err.count("To fix it: ") == 1
    for part in parts:
        assert part in err


def test_an_interrupt_ends_tuning_with_one_line_and_exit_code_130() -> None:
    args = ["tune", DIGITS, "--set", "model.hidden=[]", "--repeats", "1000000000"]
    seen, stdout, code = _interrupt(args, mark=b"round 2 of")
    assert (stdout, code) == ("", 130)
    assert seen.endswith(b"jaxsync: interrupted\r\n")
    assert b"Traceback" not in seen


def test_no_command_prints_the_help_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: jaxsync")
    assert "train" in err
    assert "tune" in err


@pytest.mark.parametrize(
    "args", [["train"], ["fly"], ["train", DIGITS, "--jsn=1"], ["tune", DIGITS, "--repeats", "few"]]
)
def test_arguments_that_make_no_sense_are_refused(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: jaxsync")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxsync {jaxsync.__version__}\n"


def test_importing_the_command_line_starts_no_backend_and_needs_no_extra() -> None:
    code = (
        "import sys, jaxsync.cli\n"
        "print([name for name in ('optax', 'rich', 'sklearn') if name in sys.modules])\n"
        "import jax, jaxsync\n"
        "jaxsync.simulate_devices(3)\n"  # refused if there were devices already
        "print(len(jax.devices()))\n"
    )
    done = run_process("-c", code)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[]\n3\n")


def test_the_report_tells_of_collectives_in_loops_and_of_no_speed() -> None:
    result = TrainResult(
        workload="charlm",
        metrics={"val_bits_per_char": 2.0, "unigram_bits_per_char": 4.5},
        final_loss=1.5,
        steps=1,
        num_skipped=0,
        steps_per_s=None,
        collectives_per_step=1,
        collectives_in_loop=2,
        bytes_synced_per_step=2048,
        gradient_error=2.5e-8,
        num_devices=8,
    )
    assert format_result(result) == (
        "val bits per char            2.000\n"
        "unigram bits per char        4.500\n"
        "final training loss          1.5000\n"
        "steps                        1 on 8 devices\n"
        "steps skipped as not finite  0\n"
        "steps/s                      -\n"
        "collectives per step         1, and 2 in loops, which run more than once\n"
        "bytes synced per step        2048 (2.0 KiB)\n"
        "largest gradient difference  2.5e-08 of the norm, to one device"
    )
