"""Each notebook runs in a kernel of its own, proves what it claims, and is what its source says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NAMES = [
    "01-first-sync",
    "02-why-gradients-are-8x-too-large",
    "03-one-thread-per-device",
    "04-sharded-state",
    "05-jaxsync-in-100-lines",
]


def load(name: str) -> ModuleType:
    """A program that stands beside the notebooks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pair, run = load("pair"), load("run")


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_shows_a_picture_and_ends_with_its_claim(name: str) -> None:
    done = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    run.execute(done)
    outputs = outputs_of(done)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "Warning" not in printed, printed
    last = [cell.source for cell in done.cells if cell.cell_type == "code"][-1]
    assert re.search(r"^assert ", last, re.M)


def test_there_are_these_notebooks_and_each_has_the_pair_that_its_source_makes() -> None:
    assert [source.stem for source in pair.sources()] == NAMES
    assert sorted(file.stem for file in (ROOT / "notebooks").glob("*.ipynb")) == NAMES
    for source in pair.sources():
        is_paired = source.with_suffix(".ipynb").read_text(encoding="utf-8") == pair.make_notebook(source)
        assert is_paired, f"{source.name} was changed: run scripts/notebook"


def test_a_pair_is_a_valid_notebook_without_outputs() -> None:
    for name in NAMES:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        nbformat.validate(notebook)
        assert outputs_of(notebook) == []
        assert len(notebook.cells) > 10


def test_links_between_notebooks_lead_somewhere() -> None:
    for name in NAMES:
        text = (ROOT / "notebooks" / f"{name}.py").read_text()
        for target in re.findall(r"\]\((?!\w+:)([^)#]*)", text):
            assert (ROOT / "notebooks" / target).exists(), f"{name}: {target}"


def test_a_name_that_no_notebook_has_is_answered_with_those_there_are() -> None:
    command = [str(ROOT / "scripts" / "notebook"), "09"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["No notebook begins with 09. There are:", *(f"  {n}" for n in NAMES)]


def cells(*sources: str) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_a_cell_that_fails_is_shown_with_its_error() -> None:
    with pytest.raises(AssertionError) as found:
        run.execute(cells("number = 7", "assert number == 8, f'got {number}'", "never = True"))
    assert "assert number == 8, f'got {number}'" in str(found.value)
    assert "AssertionError: got 7" in str(found.value)
    assert "never = True" not in str(found.value)


def test_a_cell_that_does_not_end_is_shown_and_its_kernel_killed() -> None:
    with pytest.raises(AssertionError, match=r"threading\.Event\(\)\.wait\(\)"):
        run.execute(cells("import threading", "threading.Event().wait()"), limit_s=3.0)


def test_cells_run_in_the_interpreter_that_runs_the_tests() -> None:
    notebook = cells("import sys\nprint(sys.executable)")
    run.execute(notebook)
    [output] = outputs_of(notebook)
    assert output.text.strip() == sys.executable


def test_what_ran_is_kept_when_a_cell_fails(tmp_path: Path) -> None:
    source, target = tmp_path / "source.ipynb", tmp_path / "target.ipynb"
    nbformat.write(cells("print('so far')", "assert 1 == 2", "never = True"), source)
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "assert 1 == 2" in done.stderr
    assert "without encryption" not in done.stderr
    first, second, third = nbformat.read(target, as_version=4).cells
    assert [output.get("text", output.get("ename")) for output in first.outputs + second.outputs] == [
        "so far\n",
        "AssertionError",
    ]
    assert third.outputs == []


def test_what_was_written_in_jupyter_is_not_overwritten(tmp_path: Path) -> None:
    source, target = tmp_path / "09-mine.py", tmp_path / "09-mine.ipynb"
    source.write_text("# %%\nx = 1\n")
    assert pair.write_pair(source) == ""
    made = target.read_text()
    target.write_text(made.replace("x = 1", "an_hour = 'of my work'"))
    os.utime(source, (1, 1))
    assert pair.write_pair(source).startswith(
        "09-mine.ipynb was changed after its source, and stays as it is."
    )
    assert "an_hour" in target.read_text()
    os.utime(target, (0, 0))  # the source is the newer one again
    assert pair.write_pair(source) == ""
    assert target.read_text() == made


def test_outputs_alone_are_taken_out_again(tmp_path: Path) -> None:
    source = tmp_path / "09-mine.py"
    source.write_text("# %%\nprint(1)\n")
    pair.write_pair(source)
    target = source.with_suffix(".ipynb")
    made, notebook = target.read_text(), nbformat.read(target, as_version=4)
    run.execute(notebook)
    nbformat.write(notebook, target)
    os.utime(source, (1, 1))
    assert target.read_text() != made
    assert pair.write_pair(source) == ""
    assert target.read_text() == made
