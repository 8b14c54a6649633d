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
    assert lines[0] == "SyncPlan over mesh (data=8), mean over data"
    [loss] = [float(line) for line in lines if re.fullmatch(r"[\d.e-]+", line)]
    assert loss < 1e-4
    assert sum(line.startswith("all-reduce") for line in lines) == 1


def test_its_scripts_and_files_exist() -> None:
    root = Path(__file__).parents[1]
    for path in re.findall(r"(?:scripts|configs)/[\w.]+", README) + re.findall(r"\]\(([\w./-]+)", README):
        assert (root / path).exists(), path
