"""Each notebook runs in a kernel of its own, proves what it claims, and is what its source says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NAMES = [
    "01-first-sync",
    "02-why-gradients-are-8x-too-large",
    "03-one-thread-per-device",
    "04-sharded-state",
    "05-jaxsync-in-100-lines",
]
LIMIT_S = 120.0  # for all cells of a notebook; a kernel that takes longer is killed


class OwnKernel(AsyncKernelManager):
    """The kernel of the running interpreter, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, language="python")


def execute(notebook: NotebookNode, limit_s: float = LIMIT_S) -> NotebookNode:
    """Runs all cells; a cell that fails or is not done in time is shown with what it ended with."""
    end_s = time.monotonic() + limit_s
    client = nbclient.NotebookClient(
        notebook,
        timeout_func=lambda _: max(end_s - time.monotonic(), 0.01),
        kernel_manager_class=OwnKernel,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    try:
        return client.execute()
    except (CellExecutionError, CellTimeoutError) as error:
        raise AssertionError(re.sub(r"\x1b\[[0-9;]*m", "", str(error))) from None


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_shows_a_picture_and_ends_with_its_claim(name: str) -> None:
    done = execute(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4))
    outputs = outputs_of(done)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "Warning" not in printed, printed
    last = [cell.source for cell in done.cells if cell.cell_type == "code"][-1]
    assert re.search(r"^assert ", last, re.M)


def test_there_are_these_notebooks_and_each_has_the_pair_that_its_source_makes() -> None:
    spec = importlib.util.spec_from_file_location("pair", ROOT / "notebooks/pair.py")
    pair = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pair)
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
        execute(cells("number = 7", "assert number == 8, f'got {number}'", "never = True"))
    assert "assert number == 8, f'got {number}'" in str(found.value)
    assert "AssertionError: got 7" in str(found.value)
    assert "never = True" not in str(found.value)


def test_a_cell_that_does_not_end_is_shown_and_its_kernel_killed() -> None:
    with pytest.raises(AssertionError, match=r"threading\.Event\(\)\.wait\(\)"):
        execute(cells("import threading", "threading.Event().wait()"), limit_s=3.0)


def test_cells_run_in_the_interpreter_that_runs_the_tests() -> None:
    [output] = outputs_of(execute(cells("import sys\nprint(sys.executable)")))
    assert output.text.strip() == sys.executable
