"""Pages as Chromium shows them, light and dark: nothing is loaded, run, cut off, or too faint to read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import SyncTimeoutError
from jaxsync.report.markup import Markup, page

ROOT = Path(__file__).parents[2]
LOOK = (Path(__file__).parent / "look.js").read_text()
EVIL = '<img src="x.png" onerror="document.title=1"><script>document.title=2</script>'


Look = Callable[..., "dict[str, Any]"]


@pytest.fixture(scope="session")
def look(visit) -> Look:
    """What `look.js` finds in a page, which has asked for nothing but itself."""

    def look_at(file: Path, *options: str) -> dict[str, Any]:
        visited = visit(file, "--evaluate", LOOK, *options)
        assert visited["requests"] == [file.as_uri()]
        return visited["value"]

    return look_at


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run of the main job, made by the two commands that a user types."""
    directory = tmp_path_factory.mktemp("run")
    config = str(ROOT / "configs" / "digits.toml")
    few = ["--set", "train.steps=40", "--set", "train.report_every=5"]
    file = directory / "run.html"
    for command in (["train", config, *few, "--run-dir", "run"], ["report", "run", "--html", str(file)]):
        subprocess.run([sys.executable, "-m", "jaxsync", *command], cwd=directory, timeout=120, check=True)
    return file


@pytest.fixture(scope="module")
def forms_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, an audit with a warning, and a hang, with names that try to be markup."""
    mesh = jaxsync.make_mesh({"data": 8})
    leaves = {f"{EVIL}{index}": jax.ShapeDtypeStruct((100, 300 << index), "float32") for index in range(4)}
    plan = jaxsync.make_plan(leaves, mesh)
    twice = jax.shard_map(
        lambda w, x: jax.lax.psum(jax.grad(lambda w: jnp.sum(w * x))(w), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    found = jaxsync.audit(jax.jit(twice), jnp.float32(1), jnp.arange(8.0))
    events = [{"at_s": 0.1 * index, "kind": "sync", "step": 0, "device": index} for index in range(3)]
    hang = SyncTimeoutError(step=0, timeout_s=60.0, owed=(f"device 3: {EVIL}",), record=json.dumps(events))
    file = tmp_path_factory.mktemp("forms") / "forms.html"
    forms = (Markup(thing._repr_html_()) for thing in (plan, found, hang))
    file.write_text(page(EVIL, *forms), encoding="utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
@pytest.mark.parametrize("name", ["run_page", "forms_page"])
def test_a_page_can_be_read(look: Look, name: str, width: int, scheme: str, request) -> None:
    file = request.getfixturevalue(name)
    seen = look(file, f"--width={width}", *(["--dark"] if scheme == "dark" else []))
    assert seen["isDark"] == (scheme == "dark")
    assert seen["faintest"][0] >= 4.5, seen["faintest"]  # WCAG 2.2, 1.4.3, for text of this size
    assert seen["overflow"] == 0
    assert seen["brokenHeads"] == []
    assert len(seen["pictures"]) >= 2
    for picture_width, height, right in seen["pictures"]:
        assert picture_width > 200
        assert height > 20
        assert right <= width


def test_the_page_of_a_run_has_its_parts(look: Look, run_page: Path) -> None:
    seen = look(run_page)
    assert seen["title"] == "jaxsync run: digits"
    assert seen["headings"] == ["Loss", "Steps per second", "Timeline", "Stalls", "Plan", "Config"]
    assert len(seen["pictures"]) == 4
    lines = [" ".join(line.split()) for line in seen["text"].splitlines()]
    assert {"state ended", "devices 8 cpu", "steps 40", "collectives per step 1 all-reduce"} <= set(lines)


def test_names_that_try_to_be_markup_are_text(look: Look, forms_page: Path) -> None:
    seen = look(forms_page)
    assert seen["title"] == EVIL  # and no script has changed it
    assert seen["numScripts"] == 0
    assert seen["text"].count(EVIL) >= 6  # the heading, four buckets, the hang


def test_a_picture_is_dark_where_asked_and_not_empty(look: Look, run_page: Path, tmp_path: Path) -> None:
    pictures = {}
    for scheme in ("light", "dark"):
        look(run_page, f"--png={tmp_path / scheme}.png", *(["--dark"] if scheme == "dark" else []))
        pictures[scheme] = matplotlib.image.imread(tmp_path / f"{scheme}.png")[..., :3]
    assert pictures["light"][0, 0].tolist() == [1, 1, 1]
    np.testing.assert_allclose(pictures["dark"][0, 0] * 255, [0x0D, 0x11, 0x17], atol=0.5)
    assert pictures["light"].shape == pictures["dark"].shape
    assert pictures["light"].shape[0] > 1500  # the whole page, far beyond the window
    for picture in pictures.values():
        bands = np.array_split(picture, 20)
        assert sum(np.ptp(band) > 0.5 for band in bands) >= 18  # something on nearly every part of the page


def test_what_a_page_asks_of_others_would_be_seen(visit, tmp_path: Path) -> None:
    page, style, image = tmp_path / "page.html", "https://cdn.example/x.css", "http://127.0.0.1:9/image.png"
    page.write_text(f"<!DOCTYPE html><link rel=stylesheet href={style}><img src={image}>")
    assert set(visit(page)["requests"]) == {page.as_uri(), style, image}
