"""`jaxsync audit`: a step of the user's own, from its name on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsync.cli import main
from jaxsync.errors import SubjectError
from jaxsync.reference import call_reference

STEPS = """
import jax, jax.numpy as jnp, jaxsync
from jax.sharding import PartitionSpec as P

mesh = jaxsync.make_mesh({"data": 4})
SPECS = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


def grad(w, x):
    return jax.grad(lambda w: (w * x).sum())(w)


def right():
    print("noise of the user's")
    plan = jaxsync.make_plan(jnp.float32(1), mesh)
    fn = lambda w, x: jaxsync.value_and_grad(lambda w, x: (w * x).sum(), plan)(w, x)[1]
    return jax.jit(jax.shard_map(fn, **SPECS)), jnp.float32(1), jnp.arange(8.0)


def twice():
    fn = lambda w, x: jax.lax.psum(grad(w, x), "data")
    return jax.jit(jax.shard_map(fn, **SPECS)), jnp.float32(1), jnp.arange(8.0)


def needs(batch):
    return batch


def too_little():
    return 3


def no_function():
    return 3, 4


NUMBER = 7
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_steps.py").write_text(STEPS)
    (tmp_path / "only_data.py").write_text("NUMBER = 7\n")
    (tmp_path / "broken_step.py").write_text("import no_such_module_either\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    return tmp_path


def test_a_right_step_is_a_table_and_exit_code_0(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    assert main(["audit", "my_steps:right"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2].split()[:2] == ["all-reduce", "data"]
    assert "warning" not in out
    assert err == "noise of the user's\n"
    assert sys.path == path


def test_a_wrong_step_is_a_warning_and_exit_code_1(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "my_steps:twice", "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["counts"] == {"all-reduce": 2}
    assert table["num_bytes"] == 8
    assert [c["axes"] for c in table["collectives"]] == [["data"], ["data"]]
    [warning] = table["warnings"]
    assert (warning["kind"], warning["axes"]) == ("double", ["data"])


def test_devices_are_simulated_before_the_module_is_imported(steps: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "jaxsync",
        "audit",
        "my_steps:right",
        "--devices",
        "4",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, json.loads(done.stdout)["counts"]) == (0, {"all-reduce": 1})


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("my_steps", 'wanted "package.module:function"'),
        ("my steps:right", 'wanted "package.module:function"'),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("my_steps:rihgt", "my_steps.py has no 'rihgt': the nearest is 'right'"),
        ("my_steps:loader", "my_steps.py has no 'loader': the nearest is 'grad'"),  # not '__loader__'
        ("only_data:make", "only_data.py has no 'make', and no function at all"),
        ("my_steps.py:right", "there is no module 'my_steps.py'; leave out .py: 'my_steps:right'"),
        ("./my_steps.py:right", "wanted \"package.module:function\"; leave out .py: 'my_steps:right'"),
        ("my_steps:NUMBER", "'NUMBER' is of type int; wanted a function"),
        ("my_steps:needs", "'needs' needs 'batch'; wanted a function of no arguments"),
        ("my_steps:too_little", "it returned a int; wanted (fn, *args), fn callable"),
        ("my_steps:no_function", "it returned a tuple that begins with a int; wanted (fn, *args)"),
    ],
)
def test_a_name_that_leads_to_no_step_is_refused(
    steps: Path, capsys: pytest.CaptureFixture[str], reference: str, problem: str
) -> None:
    assert main(["audit", reference]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert "returns (fn, *args)" in err


def test_a_module_that_lacks_another_says_so_itself(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(steps)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        call_reference("broken_step:make")


def test_the_facts_of_a_refusal_stay_readable(steps: Path) -> None:
    with pytest.raises(SubjectError) as error:
        call_reference("no_such_module:make")
    assert error.value.reference == "no_such_module:make"
