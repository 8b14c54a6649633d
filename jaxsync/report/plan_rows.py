"""What a plan looks like: its buckets as rows of plain values, which JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["fused", "alone", "scattered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRow:
    """One leaf of a bucket: its path, and its bytes on the wire, on one device."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRow:
    """One bucket.

    Attributes:
        leaves: Its leaves, in tree order.
        axes: The axes it is reduced over, for people.
        wire: The dtype it is summed in, for people: `"float32"`, or `"bfloat16 as float32"`.
        num_elements: Elements on one device.
        num_bytes: Bytes one device hands to the collective.
        kind: `"fused"`: leaves flattened into one array. `"alone"`: one leaf as it is. `"scattered"`: reduced
            by reduce-scatter.
    """

    leaves: tuple[LeafRow, ...]
    axes: str
    wire: str
    num_elements: int
    num_bytes: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRows:
    """A plan for people.

    Attributes:
        title: What it is over which mesh.
        summary: Its figures in one line.
        fingerprint: Of the plan.
        buckets: In launch order.
    """

    title: str
    summary: str
    fingerprint: str
    buckets: tuple[BucketRow, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes one device hands to the collectives of one sync."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def read_plan_rows(table: Mapping[str, Any]) -> PlanRows:
    """The rows in what `dataclasses.asdict` made of them, read back from JSON.

    Raises:
        KeyError, TypeError, ValueError: It is something else.

    >>> import dataclasses, json
    >>> rows = PlanRows(title="SyncPlan", summary="0 leaves", fingerprint="ab", buckets=())
    >>> read_plan_rows(json.loads(json.dumps(dataclasses.asdict(rows)))) == rows
    True
    """
    return PlanRows(
        title=str(table["title"]),
        summary=str(table["summary"]),
        fingerprint=str(table["fingerprint"]),
        buckets=tuple(_read_bucket(bucket) for bucket in table["buckets"]),
    )


def _read_bucket(table: Mapping[str, Any]) -> BucketRow:
    if table["kind"] not in ("fused", "alone", "scattered"):
        raise ValueError(f"a bucket of kind {table['kind']!r}")
    leaves = tuple(
        LeafRow(path=str(leaf["path"]), num_bytes=int(leaf["num_bytes"])) for leaf in table["leaves"]
    )
    return BucketRow(
        leaves=leaves,
        axes=str(table["axes"]),
        wire=str(table["wire"]),
        num_elements=int(table["num_elements"]),
        num_bytes=int(table["num_bytes"]),
        kind=table["kind"],
    )
