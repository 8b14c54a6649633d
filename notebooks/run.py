"""Runs a notebook in a kernel of its own: `python notebooks/run.py NOTEBOOK.ipynb OUT.ipynb`.

The kernel is that of the running interpreter, whatever kernels are installed. What was run is written even if
a cell fails, which is shown on stderr (exit code 1).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

LIMIT_S = 120.0  # for all cells of a notebook; a kernel that takes longer is killed


class OwnKernel(AsyncKernelManager):
    """The kernel of the running interpreter."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """How it is started."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv += ["--log-level=ERROR"]  # else each says that others on this machine could listen
        return KernelSpec(argv=argv, language="python")


def execute(
    notebook: NotebookNode, limit_s: float = LIMIT_S, progress: Callable[[int], None] = lambda number: None
) -> None:
    """Runs all cells, and puts what they put out into the notebook.

    Args:
        notebook: It is run in the folder of the notebooks, as Jupyter does.
        limit_s: For all cells.
        progress: Told the number of each cell that has been run.

    Raises:
        AssertionError: A cell failed, or was not done in time; its text shows it and what it ended with.
    """
    end_s = time.monotonic() + limit_s
    client = nbclient.NotebookClient(
        notebook,
        timeout_func=lambda _: max(end_s - time.monotonic(), 0.01),
        kernel_manager_class=OwnKernel,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(Path(__file__).parent)}},
        on_cell_executed=lambda cell, cell_index, execute_reply: progress(cell_index),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError) as error:
        raise AssertionError(re.sub(r"\x1b\[[0-9;]*m", "", str(error))) from None


def main(source: str, target: str) -> int:
    """Runs the notebook in one file into another file."""
    notebook = nbformat.read(source, as_version=4)
    num_cells, is_seen = len(notebook.cells), sys.stderr.isatty()

    def show(number: int) -> None:
        if is_seen:
            print(f"\r{source}: cell {number + 1} of {num_cells}", end="", file=sys.stderr, flush=True)

    try:
        execute(notebook, progress=show)
    except AssertionError as error:
        print(f"\n{error}" if is_seen else error, file=sys.stderr)
        return 1
    finally:
        nbformat.write(notebook, target)
    if is_seen:
        print(file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
