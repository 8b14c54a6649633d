"""The documentation's programs run and print what they show; its pages, pictures and names are complete."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jaxsync
import jaxsync.testing

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "quick-start.md",
    *(
        page
        for folder in ("concepts", "how-to", "coming-from")
        for page in sorted(DOCS.glob(f"{folder}/*.md"))
    ),
]

# A Python block, and the text block right after it, if there is one, which is what it prints. A block with a
# title is a file of the reader's own.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)

# Each page is one program in a namespace of its own. All pages share a process: to start JAX takes longer
# than most of them. As in a notebook, `await` may stand outside a function.
RUN_PAGES = """
import ast, asyncio, contextlib, doctest, inspect, io, json, sys, traceback
from pathlib import Path

def run_block(name, source, namespace):
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    return out.getvalue()

def run_page(page, blocks):
    namespace = {"__name__": page}
    for line, source, shown in blocks:
        name = f"{page}:{line}"
        try:
            printed = run_block(name, source, namespace)
        except BaseException:
            return f"{name} failed\\n{traceback.format_exc()}"
        if not doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
            return f"{name} shows\\n{shown}\\nand prints\\n{printed}"

pages = json.loads(Path(sys.argv[1]).read_text())
json.dump({page: run_page(page, blocks) for page, blocks in pages.items()}, sys.stdout)
"""


def blocks_of(page: Path) -> list[tuple[int, str, str]]:
    """Line, source and shown output of each block."""
    text = page.read_text()
    return [
        (text[: found.start()].count("\n") + 2, found[1], found[2] or "") for found in BLOCK.finditer(text)
    ]


def test_every_block_of_the_guides_runs_and_prints_what_is_shown(run_python, tmp_path) -> None:
    pages = {str(page.relative_to(DOCS)): blocks_of(page) for page in PAGES}
    file = tmp_path / "pages.json"
    file.write_text(json.dumps({page: blocks for page, blocks in pages.items() if blocks}))
    done = run_python(RUN_PAGES, str(file), timeout_s=280)
    assert done.returncode == 0, done.stderr
    failures = [failure for failure in json.loads(done.stdout).values() if failure]
    assert not failures, "\n".join(failures)


def test_the_script_for_clusters_runs_as_two_processes(tmp_path) -> None:
    [script] = re.findall(
        r'^```python title="train.py"\n(.*?)^```', (DOCS / "how-to/clusters.md").read_text(), re.S | re.M
    )
    (tmp_path / "train.py").write_text(script)
    launch = [sys.executable, "-m", "jaxsync", "launch", "-n", "2", "--devices-per-process", "2", "--"]
    done = subprocess.run(
        [*launch, sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[0\] 2 processes, 4 devices, loss 0.00\d\d\n\Z", done.stdout, re.M), done.stdout


def test_every_public_name_has_its_place_in_the_reference() -> None:
    places = [
        place.rpartition(".")
        for page in DOCS.glob("api/*.md")
        for place in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]
    shown = [getattr(importlib.import_module(module), name) for module, _, name in places]
    public = [getattr(package, name) for package in (jaxsync, jaxsync.testing) for name in package.__all__]
    assert [thing for thing in public if not any(thing is each for each in shown)] == []
    assert len(shown) == len({id(each) for each in shown})


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = re.findall(r": (\S+\.md)$", nav, re.M)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def anchors_of(page: Path) -> set[str]:
    """What can be linked to in a page: its headings, as the site names them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for file, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", prose):
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert broken == []


def test_the_pictures_are_what_their_program_draws() -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "concepts/pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = {f"{name}.svg": draw() + "\n" for name, draw in pictures.PICTURES.items()}
    assert drawn == {file.name: file.read_text() for file in (DOCS / "concepts/images").iterdir()}


def test_the_site_builds_without_a_warning_and_its_pages_need_nothing_from_elsewhere(tmp_path, visit) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for page, title in [("index", "jaxsync"), ("quick-start/index", "Quick start - jaxsync")]:
        visited = visit(site / f"{page}.html", "--width=360", "--evaluate", f"[document.title, {wide}]")
        assert visited["value"] == [title, 0]
        assert len(visited["requests"]) > 3  # the page, its style and its script
        assert [url for url in visited["requests"] if not url.startswith(site.as_uri())] == []
