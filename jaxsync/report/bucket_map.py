"""The bucket map: every bucket and leaf of a plan as an area in proportion to its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxsync.report import svg
from jaxsync.report.markup import Markup, element
from jaxsync.report.plan_rows import BucketRow
from jaxsync.report.text import format_bytes, format_count

_WIDTH, _HEIGHT, _LEGEND = 760.0, 320.0, 26.0
_MAX_LEAVES = 2000  # drawn one by one; more would be thinner than a pixel, and a page of many megabytes
_MAX_BUCKETS = 2000  # likewise; the smallest are then left out
_MIN_LABEL_HEIGHT = 15.0
_COLOURS = {"fused": svg.BLUE, "alone": svg.ORANGE, "scattered": svg.GREEN}
_MEANINGS = {
    "fused": "leaves fused into one array",
    "alone": "one leaf alone",
    "scattered": "reduce-scattered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of the plane, in pixels."""

    x: float
    y: float
    width: float
    height: float


def divide(box: Box, sizes: Sequence[float]) -> list[Box]:
    """A box divided in proportion to `sizes`, in parts that are as square as can be, in the order of sizes.

    Bruls, Huizing and van Wijk 2000, "Squarified Treemaps", section 3. A size of 0 gets a box of no area.

    >>> [(b.x, b.width, b.height) for b in divide(Box(x=0, y=0, width=8, height=4), [1, 1])]
    [(0, 4.0, 4.0), (4.0, 4.0, 4.0)]
    """
    total = sum(sizes)
    if total <= 0:
        return [Box(x=box.x, y=box.y, width=0.0, height=0.0) for _ in sizes]
    scale = box.width * box.height / total
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    placed: dict[int, Box] = {}
    start = 0
    while start < len(order):
        end = _row_end(order, sizes, start, scale, min(box.width, box.height))
        row = order[start:end]
        box = _place_row(row, [sizes[index] * scale for index in row], box, placed)
        start = end
    return [placed[index] for index in range(len(sizes))]


def _row_end(order: Sequence[int], sizes: Sequence[float], start: int, scale: float, side: float) -> int:
    """Where the row that begins at `start` ends: as long as its worst box gets more square."""
    area, worst, largest = 0.0, math.inf, sizes[order[start]] * scale
    for end in range(start, len(order)):
        smallest = sizes[order[end]] * scale
        area += smallest
        if smallest <= 0 or side <= 0:
            return len(order)
        ratio = max(side**2 * largest / area**2, area**2 / (side**2 * smallest))
        if ratio > worst:
            return end
        worst = ratio
    return len(order)


def _place_row(row: Sequence[int], areas: Sequence[float], box: Box, placed: dict[int, Box]) -> Box:
    """Puts a row along the shorter side; returns what is left of the box."""
    is_tall = box.width >= box.height  # the row is then a column at the left
    side = box.height if is_tall else box.width
    depth = sum(areas) / side if side else 0.0
    along = 0.0
    for index, area in zip(row, areas, strict=True):
        length = area / depth if depth else 0.0
        if is_tall:
            placed[index] = Box(x=box.x, y=box.y + along, width=depth, height=length)
        else:
            placed[index] = Box(x=box.x + along, y=box.y, width=length, height=depth)
        along += length
    if is_tall:
        return Box(x=box.x + depth, y=box.y, width=max(box.width - depth, 0.0), height=box.height)
    return Box(x=box.x, y=box.y + depth, width=box.width, height=max(box.height - depth, 0.0))


def draw_buckets(rows: Sequence[BucketRow]) -> str:
    """An SVG picture of buckets; a bucket is an area, divided into its leaves, with their names as titles.

    Args:
        rows: The buckets, of which those with the most bytes get the largest areas.

    >>> from jaxsync.report.plan_rows import BucketRow, LeafRow
    >>> leaf = LeafRow(path="['w']", num_bytes=24)
    >>> about = {"axes": "data", "wire": "float32", "num_elements": 6, "num_bytes": 24, "kind": "alone"}
    >>> "bucket 0: 1 leaf, 24 B, float32 over data" in draw_buckets([BucketRow(leaves=(leaf,), **about)])
    True
    """
    total = sum(row.num_bytes for row in rows)
    title = f"{format_count(len(rows), 'bucket')}, {format_bytes(total)}"
    area = Box(x=0.0, y=0.0, width=_WIDTH, height=_HEIGHT)
    is_detailed = sum(len(row.leaves) for row in rows) <= _MAX_LEAVES
    boxes = divide(area, [row.num_bytes for row in rows])
    largest = sorted(range(len(rows)), key=lambda index: -rows[index].num_bytes)[:_MAX_BUCKETS]
    parts = [_draw_bucket(index, rows[index], boxes[index], is_detailed) for index in sorted(largest)]
    kinds = {row.kind for row in rows}
    meaning = {_MEANINGS[kind]: colour for kind, colour in _COLOURS.items() if kind in kinds}
    key = svg.legend(0, _HEIGHT + 20, meaning)
    return svg.picture(title, _WIDTH, _HEIGHT + _LEGEND, *parts, key)


def _draw_bucket(index: int, row: BucketRow, box: Box, is_detailed: bool) -> Markup:
    colour = _COLOURS[row.kind]
    leaves = format_count(len(row.leaves), "leaf", "leaves")
    about = f"bucket {index}: {leaves}, {format_bytes(row.num_bytes)}, {row.wire} over {row.axes}"
    gap = min(1.5, box.width / 4, box.height / 4)  # tells buckets apart; leaves touch
    inner = Box(x=box.x + gap, y=box.y + gap, width=box.width - 2 * gap, height=box.height - 2 * gap)
    label = f"{index}: {row.leaves[0].path}" if len(row.leaves) == 1 else f"{index}: {leaves}"
    shown = svg.shorten(label, inner.width - 8) if inner.height >= _MIN_LABEL_HEIGHT else ""
    parts: list[str] = [
        svg.rect(inner.x, inner.y, inner.width, inner.height, colour, element("title", about))
    ]
    if is_detailed and len(row.leaves) > 1:
        taken = Box(x=inner.x, y=inner.y, width=svg.text_width(shown) + 8, height=_MIN_LABEL_HEIGHT)
        parts += _draw_leaves(row, inner, taken, about)
    if shown:
        parts.append(svg.text(inner.x + 4, inner.y + 12, shown, fill=svg.INK))
    return element("g", *parts)


def _draw_leaves(row: BucketRow, inner: Box, taken: Box, about: str) -> list[str]:
    """The leaves of a bucket; where all of its path fits, a leaf has it in its corner, clear of `taken`."""
    cells = divide(inner, [leaf.num_bytes for leaf in row.leaves])
    order = sorted(range(len(cells)), key=lambda number: -row.leaves[number].num_bytes)  # as they lie
    parts: list[str] = []
    for number, (leaf, cell) in enumerate((row.leaves[place], cells[place]) for place in order):
        name = element("title", f"{leaf.path}, {format_bytes(leaf.num_bytes)}\n{about}")
        # In turn in three shades, so that neighbours are told apart without a line around each.
        shade = (0.3, 0.0, 0.15)[number % 3]
        parts.append(svg.rect(cell.x, cell.y, cell.width, cell.height, "#fff", name, opacity=shade))
        parts += _draw_path(leaf.path, cell, taken)
    return parts


def _draw_path(path: str, cell: Box, taken: Box) -> list[Markup]:
    is_beside = cell.x >= taken.x + taken.width
    top = cell.y if is_beside else max(cell.y, taken.y + taken.height)
    has_room = cell.y + cell.height - top >= _MIN_LABEL_HEIGHT
    if not has_room or svg.text_width(path) > cell.width - 8:
        return []
    return [svg.text(cell.x + 4, top + 12, path, fill=svg.INK)]
