"""`jaxsync train` under `jaxsync launch`: the numbers of one process, and a death that changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxsync
from jaxsync.cli import main
from jaxsync.workloads.job import JobConfig
from jaxsync.workloads.train import prepare_job

pytestmark = pytest.mark.usefixtures("standard_promotion")

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.toml")
SHORT = ["train.steps=6", "train.report_every=1", "train.checkpoint_every=3", "model.hidden=[16]"]
OVERRIDES = [argument for override in SHORT for argument in ("--set", override)]


def launched(num_processes: int, *args: str) -> subprocess.CompletedProcess[str]:
    options = [sys.executable, "-m", "jaxsync", "launch", "-n", str(num_processes)]
    return subprocess.run([*options, *args], capture_output=True, text=True, timeout=250, check=False)


def test_two_processes_train_like_one_with_as_many_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, shared = str(tmp_path / "alone"), str(tmp_path / "shared")
    train = ["train", DIGITS, *OVERRIDES, "--json", "--checkpoints"]
    assert main([*train, alone]) == 0
    wanted = json.loads(capsys.readouterr().out)
    done = launched(2, "--", sys.executable, "-m", "jaxsync", *train, shared)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.removeprefix("[0] "))  # the first process's, and nothing else
    assert found["num_devices"] == wanted["num_devices"] == 8
    assert found["collectives_per_step"] == 1
    assert found["test_accuracy"] == wanted["test_accuracy"]
    np.testing.assert_allclose(found["final_loss"], wanted["final_loss"], rtol=1e-6)
    assert found["gradient_error"] <= 1e-6
    assert jaxsync.list_checkpoints(shared) == (3, 6)
    step = prepare_job(JobConfig.from_toml(DIGITS, SHORT)).step
    states = [jaxsync.load_checkpoint(directory, step) for directory in (alone, shared)]
    for a, b in zip(*(jax.tree.leaves((state.params, state.opt_state)) for state in states), strict=True):
        # Eight numbers are summed in another order: Gloo adds within a process first.
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-7)


DIES_ONCE = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
import jaxsync

class Momentum:  # optax takes longer to import than this takes to train
    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads, state, params=None):
        state = jax.tree.map(lambda grad, old: 0.9 * old + grad, grads, state)
        return jax.tree.map(lambda x: -0.1 * x, state), state

def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"]))

def train(directory, die_at=None):
    there = jaxsync.list_checkpoints(directory)
    state = jaxsync.load_checkpoint(directory, step) if there else step.init(params)
    print("from", int(state.step), flush=True)
    for number in range(int(state.step), 6):
        if number == die_at:
            jax.block_until_ready(state)
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = step(state, rows[number])
        if number % 3 == 2:
            jaxsync.save_checkpoint(directory, state)
    return state

jaxsync.initialize()
mesh = jaxsync.make_mesh({"data": 4})
params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
plan = jaxsync.make_plan(params, mesh)
step = jaxsync.make_train_step(loss_fn, Momentum(), plan)
rows = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
is_victim = os.environ["JAXSYNC_RESTART"] == "0" and os.environ["JAX_PROCESS_ID"] == "2"
killed = train(sys.argv[1] + "/killed", die_at=5 if is_victim else None)
whole = train(sys.argv[1] + "/whole")
leaves = [jax.tree.leaves((state.params, state.opt_state)) for state in (killed, whole)]
for a, b in zip(*leaves, strict=True):
    assert np.any(np.asarray(a))
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
print("equal at", int(killed.step), flush=True)
"""


def test_a_process_that_is_killed_in_training_changes_no_bit_of_the_result(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIES_ONCE)
    options = ["--devices-per-process", "1", "--max-restarts", "2", "--grace-s", "2", "--json"]
    done = launched(4, *options, "--", sys.executable, str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    died, well = json.loads(done.stdout)["runs"]
    assert (died["first_failure"], died["exit_code"], well["exit_code"]) == (2, 137, 0)
    for process in died["processes"]:  # each has left what it launched last
        launches = [event["step"] for event in process["events"] if event["kind"] == "program"]
        assert launches[-1] >= 5
    for process in well["processes"]:
        own = [line for line in process["last_lines"] if "Gloo" not in line]
        assert own == ["from 3", "from 0", "equal at 6"]
