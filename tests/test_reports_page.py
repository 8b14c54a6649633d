"""docs/reports.md is a program, and its output and pictures are those shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "reports.md").read_text()


def test_the_program_of_the_page_prints_and_draws_what_is_shown(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
    program = "\nprint('\\f')\n".join(code for code, _ in blocks)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("\f\n")
    assert len(blocks) > 5
    assert [text.strip() for text in printed] == [shown.strip() for _, shown in blocks]
    for name in ("plan.svg", "timeline.svg"):
        assert (tmp_path / name).read_text() == (DOCS / "images" / name).read_text()
