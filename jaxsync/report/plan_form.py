"""The forms of a plan: text, and HTML with a picture."""

from __future__ import annotations

from jaxsync.report.bucket_map import draw_buckets
from jaxsync.report.markup import Markup, element, join, table
from jaxsync.report.plan_rows import BucketRow, PlanRows
from jaxsync.report.text import format_bytes, format_count, format_table

_HEADER = ("bucket", "leaves", "axes", "wire", "elements", "bytes", "first leaf")
_MAX_ROWS = 200  # of a page: a plan of 10,000 leaves must not stop a browser


def format_plan(plan: PlanRows) -> str:
    """A plan as text: a title, a table of its buckets, its figures."""
    rows = [_cells(index, bucket) for index, bucket in enumerate(plan.buckets)]
    parts = [plan.title, format_table(_HEADER, rows), plan.summary, f"fingerprint {plan.fingerprint[:16]}"]
    return "\n".join(parts)


def plan_markup(plan: PlanRows) -> Markup:
    """A plan as HTML: its title and figures, its bucket map, and a table of its buckets."""
    shown = plan.buckets[:_MAX_ROWS]
    rows = [_cells(index, bucket) for index, bucket in enumerate(shown)]
    parts = [
        element("p", plan.title),
        element("p", f"{plan.summary}, fingerprint {plan.fingerprint[:16]}"),
        Markup(draw_buckets(plan.buckets) if plan.buckets else ""),
        table(_HEADER, rows),
    ]
    if len(plan.buckets) > _MAX_ROWS:
        parts.append(element("p", f"and {format_count(len(plan.buckets) - _MAX_ROWS, 'more bucket')}"))
    return join(parts)


def _cells(index: int, bucket: BucketRow) -> list[str]:
    return [
        str(index),
        str(len(bucket.leaves)),
        bucket.axes,
        bucket.wire,
        str(bucket.num_elements),
        format_bytes(bucket.num_bytes),
        bucket.leaves[0].path,
    ]
