from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import jax
import pytest

import jaxsync
from jaxsync.report.run_view import RunView, StepRecord, step_spans

EVIL = '<script>"it\'s"</script>'


def make_steps(*losses: float) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(
            step=10 * index,
            loss=loss,
            steps_per_s=None if index == 1 else 10.0 * index,
            finite=math.isfinite(loss),
            at_s=float(index),
        )
        for index, loss in enumerate(losses, start=1)
    )


def make_view(**facts) -> RunView:
    params = {EVIL: jax.ShapeDtypeStruct((3, 2), "float32"), "b": jax.ShapeDtypeStruct((2,), "float32")}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    steps = make_steps(2.5, 1.25, 0.75)
    given = {
        "workload": "digits",
        "started": "2030-01-02T03:04:05+00:00",
        "num_devices": 8,
        "platform": "cpu",
        "bytes_per_step": plan.num_bytes,
        "plan": plan.rows,
        "config": {"train": {"steps": 30}, "note": EVIL},
        "versions": {"jax": "0.10.2"},
        "audit": {"all-reduce": 1},
        "steps": steps,
        "spans": step_spans(steps),
        "summary": {"test_accuracy": 0.9375},
    }
    return RunView(**(given | facts))


class Cells(HTMLParser):
    """The text of each cell, and which elements there are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self.cells:
            self.cells[-1] += data


def test_the_page_has_the_figures_of_the_run_and_of_its_plan() -> None:
    view = make_view()
    read = Cells(view.to_page())
    for label, value in {
        "steps": "30",
        "final training loss": "0.7500",
        "steps/s": "30.0",
        "bytes synced per step": "32 (32 B) a device, 960 B in all",
        "collectives per step": "1 all-reduce",
        "test accuracy": "0.9375",
        "train.steps": "30",
    }.items():
        assert read.cells[read.cells.index(label) + 1].partition("Loss")[0] == value
    assert "step 20: loss 1.25" in read.text
    assert "step 30: steps/s 30" in read.text
    assert "steps 11 to 20, 1000.0 ms from 1.000 s" in read.text
    assert f"fingerprint {view.plan.fingerprint[:16]}" in read.text  # type: ignore[union-attr]


def test_a_summary_adds_only_what_is_not_shown_yet() -> None:
    same = {
        "workload": "digits",
        "num_devices": 8,
        "steps": 30,
        "final_loss": 0.75,
        "steps_per_s": 30.0,
        "bytes_synced_per_step": 32,
        "collectives_per_step": 1,
    }
    before = make_view(summary={}).figures()
    assert make_view(summary={**same, "test_accuracy": 0.5}).figures() == [*before, ("test accuracy", "0.5")]
    assert make_view(summary={**same, "steps": 29}).figures() == [*before, ("steps", "29")]
    view = make_view(steps=make_steps(2.5, math.nan), summary={"final_loss": None})
    assert [label for label, _ in view.figures()].count("final loss") == 0


def test_the_figures_are_called_as_where_they_were_trained() -> None:
    summary = {
        "metrics": {"test_accuracy": 0.9861, "bits": 2.0, "note": "a"},
        "num_skipped": 3,
        "gradient_error": 1.34e-8,
        "collectives_per_step": 1,
        "collectives_in_loop": 2,
    }
    view = make_view(steps=make_steps(2.5, math.nan), audit={"all-reduce": 3}, summary=summary)
    figures = dict(view.figures())
    assert figures["steps skipped as not finite"] == "3"
    assert figures["collectives per step"] == "3 all-reduce, of which 2 in loops, which run more than once"
    added = dict(view.figures()[len(make_view(summary={}).figures()) :])
    assert added == {
        "test accuracy": "98.61 %",
        "bits": "2.000",
        "note": "a",
        "largest gradient difference": "1.3e-08 of the norm, to one device",
    }
    assert dict(make_view(summary={"gradient_error": None}).figures())["largest gradient difference"] == "-"


def test_a_run_that_did_not_end_knows_only_where_steps_were_skipped() -> None:
    figures = dict(make_view(steps=make_steps(2.5, math.nan, 1.0), summary=None).figures())
    assert figures["last training loss"] == "1.0000"
    assert figures["steps skipped as not finite"] == "some, before 1 of 3 looks"
    assert dict(make_view(summary=None).figures())["steps skipped as not finite"] == "0"


def test_what_a_config_leaves_open_is_a_dash() -> None:
    read = Cells(make_view(config={"a": None, "train": {"checkpoint_dir": "", "resume": 0}}).to_page())
    shown = {key: read.cells[read.cells.index(key) + 1] for key in ("a", "train.checkpoint_dir")}
    assert shown == {"a": "-", "train.checkpoint_dir": "-"}
    assert "train.resume0" in "".join(read.cells)


def test_a_path_or_config_of_the_users_is_text_in_the_page() -> None:
    view = make_view(stalls=(f"step 2: {EVIL}",))
    for html in (view.to_page(), view._repr_html_()):
        read = Cells(html)
        assert "script" not in read.tags
        assert f"step 2: {EVIL}" in read.text
        assert EVIL in read.text.replace("\\'", "'")


def test_a_run_that_did_not_end_says_so() -> None:
    view = make_view(summary=None)
    assert "This run did not end." in view.to_page()
    assert "This run did not end." not in make_view().to_page()
    assert repr(view) == "RunView(digits: 30 steps, loss 0.7500; did not end)"
    assert repr(make_view()) == "RunView(digits: 30 steps, loss 0.7500; ended)"


def test_a_run_without_steps_plan_or_spans_has_a_page_too() -> None:
    view = make_view(steps=(), spans=(), plan=None, config={}, audit={}, versions={}, summary=None)
    assert "none" in Cells(view.to_page()).text
    assert str(view).splitlines()[3].split() == ["steps", "0"]
    assert view.to_json()["last_loss"] is None


def test_many_stalls_are_cut() -> None:
    text = Cells(make_view(stalls=tuple(f"stall {index}" for index in range(60))).to_page()).text
    assert "stall 49" in text
    assert "stall 50" not in text
    assert "and 10 more" in text


def test_json_has_the_figures_and_no_number_that_json_lacks() -> None:
    view = make_view(steps=make_steps(1.0, math.nan))
    table = json.loads(json.dumps(view.to_json(), allow_nan=False))
    assert (table["steps"], table["last_loss"], table["num_not_finite"]) == (20, None, 1)
    assert (table["bytes_per_step"], table["bytes_synced"]) == (32, 640)
    assert table["fingerprint"] == view.plan.fingerprint  # type: ignore[union-attr]


def test_the_trace_has_the_steps_of_training() -> None:
    events = make_view().to_trace()["traceEvents"]
    found = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert found == [
        ("steps 1 to 10", 0.0, 1e6),
        ("steps 11 to 20", 1e6, 1e6),
        ("steps 21 to 30", 2e6, 1e6),
    ]


@pytest.mark.parametrize("stalls", [(), ("step 2 has waited",)])
def test_the_text_is_one_aligned_line_a_figure(stalls: tuple[str, ...]) -> None:
    lines = str(make_view(stalls=stalls)).splitlines()
    columns = {
        len(line) - len(line.partition("  ")[2].lstrip()) for line in lines if not line.startswith("stall:")
    }
    assert len(columns) == 1
    assert lines[len(lines) - len(stalls) :] == [f"stall: {stall}" for stall in stalls]


def test_a_page_of_many_steps_is_no_larger_than_one_of_a_few_thousand() -> None:
    """Every second step is not finite: as many marks, and breaks of the line, as there are steps."""
    losses = [math.nan if index % 2 else 1 / (index + 1) for index in range(20_000)]
    sizes = []
    for number in (4000, 20_000):
        steps = make_steps(*losses[:number])
        sizes.append(len(make_view(steps=steps, spans=step_spans(steps)).to_page()))
    assert sizes[1] < 1.2 * sizes[0]


def test_spans_of_very_many_steps_are_joined() -> None:
    steps = tuple(
        StepRecord(step=number, loss=1.0, steps_per_s=None, finite=number != 4, at_s=float(number))
        for number in range(1, 100_003)
    )
    spans = step_spans(steps)
    assert len(spans) == 50_001
    assert [(span.name, span.kind, span.took_s) for span in spans[:3]] == [
        ("steps 1 to 2", "step", 2.0),
        ("steps 3 to 4", "trouble", 2.0),
        ("steps 5 to 6", "step", 2.0),
    ]
