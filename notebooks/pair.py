"""Writes the .ipynb of each notebook's source, when run: `python notebooks/pair.py`.

A notebook is written as `NN-name.py` (py:percent). Its pair is what Jupyter opens without further tools. It
has no outputs, and the same bytes whatever the versions of the tools, so that a change of the source is the
only change there is.
"""

from __future__ import annotations

import json
import sys
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


def write_pair(source: Path) -> str:
    """Writes the .ipynb of a source. Returns why not, if that would undo what somebody wrote in Jupyter."""
    target, made = source.with_suffix(".ipynb"), make_notebook(source)
    if target.exists() and _is_edited(target, made) and target.stat().st_mtime > source.stat().st_mtime:
        return (
            f"{target.name} was changed after its source, and stays as it is. To take the changes over: "
            f"jupytext --to py:percent {target}. To drop them: delete it, and run this again."
        )
    target.write_text(made, encoding="utf-8")
    return ""


def _is_edited(target: Path, made: str) -> bool:
    """Whether it has other cells than the source: outputs alone can be made again."""
    try:
        found = json.loads(target.read_text(encoding="utf-8"))
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in found["cells"]]
    except (ValueError, KeyError, TypeError):
        return True
    wanted = json.loads(made)["cells"]
    return cells != [(cell["cell_type"], "".join(cell["source"])) for cell in wanted]


if __name__ == "__main__":
    for source in sources():
        if kept := write_pair(source):
            print(kept, file=sys.stderr)
