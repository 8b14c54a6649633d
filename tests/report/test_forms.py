"""The short, the text and the notebook forms of plans and errors."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import jax

import jaxsync
from jaxsync.errors import SyncTimeoutError, TreeMismatchError
from jaxsync.report.plan_form import format_plan

EVIL = '<script>"it\'s"</script>'


def read(html: str) -> tuple[set[str], str]:
    """The elements of a page, and its text."""
    tags, text = set(), []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.add(tag)  # type: ignore[method-assign]
    parser.handle_data = text.append  # type: ignore[method-assign]
    parser.feed(html)
    return tags, "".join(text)


def make_plan(num_leaves: int) -> jaxsync.SyncPlan:
    # Larger than the limit for fusing, so that each leaf is a bucket.
    leaf = jax.ShapeDtypeStruct((100, 300), "float32")
    params = {f"{EVIL}{index}": leaf for index in range(num_leaves)}
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": 4, "model": 2}))


def test_the_repr_of_a_plan_fits_a_line() -> None:
    plan = make_plan(1)
    start = "SyncPlan(data=4, model=2; 1 leaf, 1 bucket, 117.2 KiB a step; fingerprint "
    assert repr(plan) == f"{start}{plan.fingerprint[:16]})"
    assert len(repr(make_plan(500))) < 120


def test_a_notebook_shows_the_table_and_the_map_of_a_plan() -> None:
    plan = make_plan(3)
    tags, text = read(plan._repr_html_())
    assert {"table", "svg"} <= tags
    assert "script" not in tags
    assert plan.rows.title in text
    assert plan.rows.summary in text
    assert text.count(plan.leaves[1].path) >= 2  # in the table and in the map
    assert str(plan) == format_plan(plan.rows)


def test_a_long_plan_is_cut_in_a_notebook_and_whole_as_text() -> None:
    plan = make_plan(230)
    assert "and 30 more buckets" in read(plan._repr_html_())[1]
    assert len(str(plan).splitlines()) == 230 + 5


def test_a_plan_without_buckets_has_all_forms() -> None:
    plan = jaxsync.make_plan({}, jaxsync.make_mesh({"data": 8}))
    assert "svg" not in read(plan._repr_html_())[0]
    assert repr(plan).startswith("SyncPlan(data=8; 0 leaves, 0 buckets, 0 B a step;")


def test_an_error_has_a_short_form_and_a_block_with_what_where_and_what_to_do() -> None:
    error = TreeMismatchError(problems=tuple(f"grads['{EVIL}{index}'] is missing" for index in range(11)))
    assert repr(error) == "<TreeMismatchError: 11 leaves do not fit the plan.>"
    tags, text = read(error._repr_html_())
    assert "script" not in tags
    assert f"grads['{EVIL}7'] is missing" in text
    assert f"grads['{EVIL}8'] is missing" not in text
    assert "and 3 more" in text
    assert f"To fix it: {error.fix()}" in text


def test_a_hang_shows_its_events_as_they_are_set() -> None:
    facts = {"step": 3, "timeout_s": 60.0, "owed": (f"TFRT_CPU_1 has not handed over ['{EVIL}']",)}
    tags, text = read(SyncTimeoutError(events="at  event\n1   sync", **facts)._repr_html_())
    assert "pre" in tags
    assert "script" not in tags
    assert EVIL in text
    assert re.search(r"The last events:\s*at  event\n1   sync", text)
    assert "pre" not in read(SyncTimeoutError(**facts)._repr_html_())[0]


def test_a_timeout_draws_what_happened_before_it() -> None:
    events = [
        {"at_s": 0.5, "kind": "sync", "step": 3, "device": 1},
        {"at_s": 1.0, "kind": "launch", "what": "<b>"},
    ]
    record = json.dumps(events)
    error = SyncTimeoutError(step=3, timeout_s=2.0, owed=("cpu:0 has not synced",), record=record)
    tags, text = read(error._repr_html_())
    assert "svg" in tags
    assert "launch <b>" in text
    assert "svg" not in read(SyncTimeoutError(step=3, timeout_s=2.0, owed=())._repr_html_())[0]
