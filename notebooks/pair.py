"""Writes the .ipynb of each notebook's source, when run: `python notebooks/pair.py`.

A notebook is written as `NN-name.py` (py:percent). Its pair is what Jupyter opens without further tools. It
has no outputs, and the same bytes whatever the versions of the tools, so that a change of the source is the
only change there is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jupytext

HERE = Path(__file__).parent


def sources() -> list[Path]:
    """The source of each notebook, in reading order."""
    return sorted(HERE.glob("[0-9][0-9]-*.py"))


def make_notebook(source: Path) -> str:
    """The text of the .ipynb for a source.

    Made here and not by jupytext, which numbers cells by chance and writes its own version.
    """
    read = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    cells = [_make_cell(number, cell) for number, cell in enumerate(read.cells)]
    metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _make_cell(number: int, cell: Any) -> dict[str, Any]:
    made = {
        "cell_type": cell.cell_type,
        "id": f"cell-{number}",
        "metadata": {},
        "source": cell.source.splitlines(keepends=True),
    }
    if cell.cell_type == "code":
        made |= {"execution_count": None, "outputs": []}
    return made


if __name__ == "__main__":
    for source in sources():
        source.with_suffix(".ipynb").write_text(make_notebook(source), encoding="utf-8")
