"""The README's example is a program, and it does what it shows."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs_as_it_stands(run_python) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    example = next(block for block in blocks if "import" in block)
    done = run_python(example)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "SyncPlan over mesh (data=8), mean over ('data',)"
    [loss] = [float(line) for line in lines if re.fullmatch(r"[\d.e-]+", line)]
    assert loss < 1e-4
    assert sum(line.startswith("all-reduce") for line in lines) == 1


SETUP = """
import threading
import jax, jax.numpy as jnp, numpy as np, optax
import jaxsync

jaxsync.simulate_devices(4)
mesh = jaxsync.make_mesh({"data": 4})
params = {"w": jnp.ones(3), "b": jnp.zeros(())}
x = np.arange(24, dtype=np.float32).reshape(8, 3)
shards = np.split(x, 4)
loss_fn = lambda params, rows: jnp.mean((rows @ params["w"] + params["b"]) ** 2)
truth = jax.grad(loss_fn)(params, x)

def check(synced):
    for tree in synced:
        for name in truth:
            np.testing.assert_allclose(tree[name], truth[name], rtol=1e-6)
"""
THREADS = """
results = {}
threads = [
    threading.Thread(target=lambda d=d, r=r: results.update({d: work(d, r)}))
    for d, r in zip(mesh.devices.flat, shards)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
check(results.values())
assert len(results) == 4
"""
STEP = """
plan = jaxsync.make_plan(params, mesh)
step = jaxsync.make_train_step(loss_fn, optax.sgd(1e-4), plan)
state, batches, seen = step.init(params), [x] * 5, []
log = lambda metrics: seen.append(float(metrics["loss"]))
"""


def test_the_three_ways_of_working_run_as_they_stand(run_python) -> None:
    section = README.split("## When the step is not one program")[1].split("\n## ")[0]
    threads, one_thread, compiled = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    last = "assert len(seen) == 5 and seen == sorted(seen, reverse=True)\nprint('done')\n"
    program = "\n".join([SETUP, threads, THREADS, one_thread, "check(synced)", STEP, compiled, last])
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_its_scripts_and_files_exist() -> None:
    root = Path(__file__).parents[1]
    for path in re.findall(r"(?:scripts|configs)/[\w.]+", README) + re.findall(r"\]\(([\w./]+)\)", README):
        assert (root / path).exists(), path
