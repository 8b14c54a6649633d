"""The pictures: well-formed, escaped, and with the numbers of what they show."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.report.bucket_map import Box, divide, draw_buckets
from jaxsync.report.chart import draw_line, nice_ticks
from jaxsync.report.timeline import draw_timeline, make_spans, make_trace

SVG = "{http://www.w3.org/2000/svg}"
EVIL = '</svg><script>"it\'s"\x01'


def parse(picture: str) -> ET.Element:
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert all(element.tag != f"{SVG}script" for element in root.iter())
    numbers = {"x", "y", "width", "height", "x1", "x2", "y1", "y2", "cx", "cy"}
    assert all(
        math.isfinite(float(value))
        for element in root.iter()
        for name, value in element.items()
        if name in numbers
    )
    return root


def titles(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60))
def test_areas_are_in_proportion_and_fill_the_box(sizes: list[int]) -> None:
    boxes = divide(Box(x=10.0, y=20.0, width=300.0, height=200.0), sizes)
    total = sum(sizes)
    for size, box in zip(sizes, boxes, strict=True):
        wanted = 300 * 200 * size / total if total else 0
        assert box.width * box.height == pytest.approx(wanted, abs=1e-3)
        assert box.x >= 10 - 1e-3
        assert box.y >= 20 - 1e-3
        if size:
            assert box.x + box.width <= 310 + 1e-3
            assert box.y + box.height <= 220 + 1e-3


def test_equal_parts_are_squares() -> None:
    boxes = divide(Box(x=0.0, y=0.0, width=4.0, height=4.0), [1, 1, 1, 1])
    assert {(round(box.x, 9), round(box.y, 9)) for box in boxes} == {(0, 0), (0, 2), (2, 0), (2, 2)}
    assert all((box.width, box.height) == pytest.approx((2, 2)) for box in boxes)


def make_plan(specs=None) -> jaxsync.SyncPlan:
    params = {
        EVIL: jax.ShapeDtypeStruct((3,), "float32"),
        "large": jax.ShapeDtypeStruct((256, 256), "float32"),
        "count": jax.ShapeDtypeStruct((), "int32"),
        "half": jax.ShapeDtypeStruct((16,), "bfloat16"),
        "b": jax.ShapeDtypeStruct((5,), "float32"),
        "split": jax.ShapeDtypeStruct((8, 2), "float32"),
    }
    spec = {**dict.fromkeys(params, P()), "split": P("data")}
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}), spec)


def test_a_bucket_map_has_every_bucket_and_leaf_with_its_bytes() -> None:
    plan = make_plan()
    found = titles(parse(plan.draw()))
    for index, row in enumerate(plan.rows.buckets):
        leaves = "1 leaf" if len(row.leaves) == 1 else f"{len(row.leaves)} leaves"
        assert any(title.startswith(f"bucket {index}: {leaves}, ") for title in found)
    assert sum(title.count("\n") for title in found) == 2  # the leaves of the fused bucket
    [evil] = [leaf.path for leaf in plan.leaves if "script" in leaf.path]
    [title] = [title for title in found if "script" in title]
    assert title.startswith(f"{evil}, 12 B\nbucket 0: 2 leaves, 32 B, float32 over data")
    assert any("float32 over data (scatter)" in title for title in found)


def test_areas_of_the_map_are_the_bytes_of_the_plan() -> None:
    plan = make_plan()
    root = parse(plan.draw())
    areas = {}
    for group in root.iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and box is not None and (title.text or "").startswith("bucket "):
            index = int((title.text or "").split()[1].rstrip(":"))
            # The gap around a bucket, of 1.5 pixels at most, is part of its area.
            areas[index] = (float(box.get("width", 0)) + 3) * (float(box.get("height", 0)) + 3)
    largest = max(range(len(plan.buckets)), key=lambda index: plan.buckets[index].num_bytes)
    share = plan.buckets[largest].num_bytes / plan.num_bytes
    assert areas[largest] / (760 * 320) == pytest.approx(share, rel=0.02)


def test_a_leaf_of_a_shared_bucket_has_its_path_where_there_is_room_for_all_of_it() -> None:
    sizes = {"a": 6000, "b": 5000, "c": 4000, "a_very_long_name_" * 9: 3000, "tiny": 1}
    params = {name: jax.ShapeDtypeStruct((size,), "float32") for name, size in sizes.items()}
    root = parse(jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8})).draw())
    texts = [text for text in root.iter(f"{SVG}text") if "leaves fused" not in (text.text or "")]
    assert sorted(text.text or "" for text in texts) == ["0: 5 leaves", "['a']", "['b']", "['c']"]
    # As far as can be known without a browser, none lies on another.
    boxes = [(float(text.get("x", 0)), float(text.get("y", 0)), 6.6 * len(text.text or "")) for text in texts]
    for (x, y, width), (other_x, other_y, other_width) in itertools.combinations(boxes, 2):
        assert abs(y - other_y) >= 12 or x + width <= other_x or other_x + other_width <= x


def test_the_leaves_of_a_bucket_add_up_to_its_bytes() -> None:
    plan = make_plan()
    assert [sum(leaf.num_bytes for leaf in row.leaves) for row in plan.rows.buckets] == [
        bucket.num_bytes for bucket in plan.buckets
    ]
    assert plan.rows.num_bytes == plan.num_bytes


def test_ten_thousand_leaves_make_a_picture_of_bounded_size() -> None:
    leaves = {str(index): jax.ShapeDtypeStruct((4,), "float32") for index in range(10_000)}
    plan = jaxsync.make_plan(leaves, jaxsync.make_mesh({"data": 8}))
    picture = plan.draw()
    parse(picture)
    assert len(picture) < 200_000
    assert len(plan._repr_html_()) < 400_000


def test_no_bucket_makes_an_empty_picture() -> None:
    assert titles(parse(draw_buckets([]))) == ["0 buckets, 0 B"]


def test_a_line_goes_through_its_points() -> None:
    root = parse(draw_line([(1, 4.0), (2, 0.0), (3, 2.0)], title=EVIL))
    [line] = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 < y3 < y2  # y points down
    assert (y2 - y3) / (y2 - y1) == pytest.approx(0.5)


def test_what_is_not_finite_breaks_the_line_and_is_marked() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.inf), (4, math.nan), (5, 1.0), (6, 3.0)]
    root = parse(draw_line(points, title="loss"))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    assert [t for t in titles(root) if t.startswith("not finite")] == [
        "not finite at step 3",
        "not finite at step 4",
    ]


@pytest.mark.parametrize(
    "points", [[], [(7, 2.5)], [(1, math.nan)], [(1, 0.0), (2, 0.0)], [(1, 1e308), (2, -1e308)]]
)
def test_a_chart_of_little_or_extreme_is_a_picture_too(points) -> None:
    parse(draw_line(points, title="loss"))


def test_a_long_line_keeps_its_peaks() -> None:
    points = [(step, 100.0 if step == 54_321 else math.sin(step)) for step in range(100_000)]
    root = parse(draw_line(points, title="loss"))
    [line] = root.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.get("points", "").split()]
    assert len(heights) <= 1002
    assert min(heights) < sorted(heights)[1] - 50


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.floats(-1e12, 1e12, allow_subnormal=False),
    st.floats(-1e12, 1e12, allow_subnormal=False),
    st.integers(2, 9),
)
def test_ticks_are_few_and_hold_the_values(one: float, other: float, count: int) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high, count)
    slack = 1e-9 * max(abs(low), abs(high), 1e-12)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= count + 3


EVENTS = [
    {"at_s": 0.0, "kind": "announce", "step": 0, "device": 0},
    {"at_s": 0.5, "kind": "sync", "step": 0, "device": 0},
    {"at_s": 0.6, "kind": "sync", "step": 1, "device": 0},
    {"at_s": 1.5, "kind": "launch", "step": 0, "what": "bucket 0", "num_bytes": 24, "took_s": 0.25},
    {"at_s": 2.0, "kind": "finish", "step": 0, "what": "bucket 0", "took_s": 0.5},
    {"at_s": 2.0, "kind": "finish", "step": 0, "what": "bucket 1", "took_s": 0.4},
    {"at_s": 2.25, "kind": "answer", "step": 0, "device": 0},
    {"at_s": 2.5, "kind": "stall", "step": 1, "what": EVIL},
    {"at_s": 3.0, "kind": "callback", "what": "log", "took_s": 0.125, "unheard of": 3},
]


def test_a_wait_lasts_from_the_sync_to_the_answer_and_others_end_when_they_are_told() -> None:
    spans = make_spans(EVENTS)
    found = {span.name: (span.track, span.kind, span.start_s, span.took_s) for span in spans}
    assert found == {
        "announce": ("device 0", "moment", 0.0, None),
        "wait for step 0": ("device 0", "wait", 0.5, 1.75),
        "sync": ("device 0", "moment", 0.6, None),  # never answered
        "launch bucket 0": ("loop", "launch", 1.25, 0.25),
        "finish bucket 0": ("programs", "flight", 1.5, 0.5),
        "finish bucket 1": ("programs", "flight", 1.6, 0.4),
        f"stall {EVIL}": ("loop", "trouble", 2.5, None),
        "callback log": ("loop", "callback", 2.875, 0.125),
    }
    assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)


def test_a_trace_has_what_perfetto_asks_for() -> None:
    trace = make_trace(make_spans(EVENTS, process=3))
    events = trace["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid"} <= set(event) for event in events)
    assert {event["pid"] for event in events} == {3}
    spans = [event for event in events if event["ph"] == "X"]
    [wait] = [event for event in spans if event["name"] == "wait for step 0"]
    assert (wait["ts"], wait["dur"]) == (500_000.0, 1_750_000.0)
    assert {event["s"] for event in events if event["ph"] == "i"} == {"t"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[wait["tid"]] == "device 0"
    [launch] = [event for event in spans if event["name"] == "launch bucket 0"]
    assert launch["args"] == {"step": 0, "num_bytes": 24}


def test_spans_of_one_thread_of_a_trace_never_overlap() -> None:
    spans = [event for event in make_trace(make_spans(EVENTS))["traceEvents"] if event["ph"] == "X"]
    flights = [event for event in spans if event["cat"] == "flight"]
    assert flights[0]["tid"] != flights[1]["tid"]
    for thread in {event["tid"] for event in spans}:
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == thread)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))


def test_a_timeline_shows_every_span_in_the_row_of_its_track() -> None:
    spans = make_spans(EVENTS)
    root = parse(draw_timeline(spans))
    found = titles(root)
    assert "launch bucket 0, 250.0 ms from 1.250 s\nnum_bytes 24 B" in found
    assert "announce at 0.000 s" in found
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert [label for label in labels if label in ("device 0", "loop", "programs")] == [
        "device 0",
        "loop",
        "programs",
    ]


def test_tracks_are_in_natural_order_and_processes_apart() -> None:
    events = [{"at_s": 0.1, "kind": "announce", "step": 0, "device": device} for device in (10, 2)]
    root = parse(draw_timeline([*make_spans(events, 0), *make_spans(events, 1)]))
    labels = [text.text for text in root.iter(f"{SVG}text") if "device" in (text.text or "")]
    assert labels == ["0: device 2", "0: device 10", "1: device 2", "1: device 10"]


def test_nothing_makes_an_empty_timeline() -> None:
    parse(draw_timeline(()))
    assert make_trace(())["traceEvents"] == []
