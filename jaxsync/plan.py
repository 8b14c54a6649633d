"""SyncPlan: everything a sync needs to know, as data."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxsync.buckets import Bucket, make_buckets
from jaxsync.config import SyncConfig
from jaxsync.errors import ArgumentError, ConfigError
from jaxsync.mesh import (
    AnyMesh,
    axis_sizes,
    check_axes,
    flatten_mesh,
    format_mesh,
    num_devices,
    unflatten_mesh,
    uses_gloo,
)
from jaxsync.params import Leaf, make_leaves
from jaxsync.prefix import is_spec
from jaxsync.report import format_bytes, format_count
from jaxsync.report.bucket_map import draw_buckets
from jaxsync.report.markup import fragment
from jaxsync.report.plan_form import format_plan, plan_markup
from jaxsync.report.plan_rows import BucketRow, LeafRow, PlanRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SyncPlan:
    """What is synced, over which axes, in which buckets. Immutable, and holds no array.

    Two plans are equal if their fingerprints and meshes are; a plan can be a static argument of `jit`.

    Attributes:
        mesh: The mesh it was made for.
        config: The config it was made with.
        leaves: One `Leaf` for each leaf of the tree, in tree order.
        buckets: What travels together, in launch order.
        treedef: The structure of the registered tree.
        fingerprint: SHA-256 over the table, the axes, the config and the buckets; equal in every process
            that registers the same tree in the same way.
    """

    mesh: AnyMesh
    config: SyncConfig
    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    treedef: jax.tree_util.PyTreeDef
    fingerprint: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SyncPlan):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        # Also states hold a plan, and are pickled; the devices of a mesh are not.
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "mesh"}
        return _rebuild, (flatten_mesh(self.mesh), facts)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that carry the batch."""
        return self.config.axes

    @property
    def num_replicas(self) -> int:
        """How many gradients are summed into one: the product of the data axes."""
        return num_devices(self.mesh, self.data_axes)

    @property
    def specs(self) -> Any:
        """The registered tree with a `PartitionSpec` at each leaf."""
        return jax.tree.unflatten(self.treedef, [leaf.spec for leaf in self.leaves])

    @property
    def batch_spec(self) -> PartitionSpec:
        """How the leading dim of a batch is divided: over all data axes."""
        return PartitionSpec(self.data_axes if len(self.data_axes) > 1 else self.data_axes[0])

    @property
    def num_all_reduces(self) -> int:
        """All-reduces of one sync in a compiled program: one for each dtype and set of axes.

        And one for each bucket of leaves that are sharded over some data axes and replicated over others.

        Buckets of one dtype and one set of axes leave in one call, and XLA compiles them to one collective
        with several operands (on accelerators, to more if they are larger than its combiner's limit).
        """
        whole = {(bucket.reduce_axes, bucket.dtype) for bucket in self.buckets if not bucket.scatter_axes}
        return len(whole) + sum(bool(b.scatter_axes and b.reduce_axes) for b in self.buckets)

    @property
    def num_reduce_scatters(self) -> int:
        """Reduce-scatters of one sync: one for each bucket of leaves that are sharded over a data axis."""
        return sum(bool(bucket.scatter_axes) for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes one device hands to the collectives of one sync."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def rows(self) -> PlanRows:
        """The plan for people: its buckets as rows of plain values."""
        passed = sum(not leaf.is_synced for leaf in self.leaves)
        counts = [
            f"{format_count(len(self.leaves), 'leaf', 'leaves')} ({passed} pass through)",
            format_count(len(self.buckets), "bucket"),
            format_count(self.num_all_reduces, "all-reduce"),
        ]
        if self.num_reduce_scatters:
            counts.append(format_count(self.num_reduce_scatters, "reduce-scatter"))
        mesh = format_mesh(self.mesh)
        return PlanRows(
            title=f"SyncPlan over mesh ({mesh}), {self.config.reduce} over {', '.join(self.data_axes)}",
            summary=f"{', '.join(counts)}, {format_bytes(self.num_bytes)} a step and device",
            fingerprint=self.fingerprint,
            buckets=tuple(self._row(bucket) for bucket in self.buckets),
        )

    def draw(self) -> str:
        """An SVG picture: each bucket and leaf as an area in proportion to its bytes.

        >>> import jax, jaxsync
        >>> plan = make_plan({"w": jax.ShapeDtypeStruct((3,), "float32")}, jaxsync.make_mesh({"data": 8}))
        >>> "bucket 0: 1 leaf, 12 B, float32 over data" in plan.draw()
        True
        """
        return draw_buckets(self.rows.buckets)

    def __repr__(self) -> str:
        leaves = format_count(len(self.leaves), "leaf", "leaves")
        buckets = format_count(len(self.buckets), "bucket")
        figures = f"{leaves}, {buckets}, {format_bytes(self.num_bytes)} a step"
        return f"SyncPlan({format_mesh(self.mesh)}; {figures}; fingerprint {self.fingerprint[:16]})"

    def __str__(self) -> str:
        return format_plan(self.rows)

    def _repr_html_(self) -> str:
        return fragment(plan_markup(self.rows))

    def _row(self, bucket: Bucket) -> BucketRow:
        wire = bucket.dtype if bucket.dtype == bucket.leaf_dtype else f"{bucket.leaf_dtype} as {bucket.dtype}"
        item_bytes = bucket.num_bytes // bucket.num_elements
        return BucketRow(
            leaves=tuple(
                LeafRow(path=leaf.path, num_bytes=math.prod(leaf.whole_shape) * item_bytes)
                for leaf in map(self.leaves.__getitem__, bucket.leaves)
            ),
            axes=",".join((*bucket.reduce_axes, *(f"{axis} (scatter)" for axis in bucket.scatter_axes))),
            wire=wire,
            num_elements=bucket.num_elements,
            num_bytes=bucket.num_bytes,
            kind="scattered" if bucket.scatter_axes else "fused" if bucket.is_fused else "alone",
        )


def _rebuild(mesh: tuple[Any, ...], facts: dict[str, Any]) -> SyncPlan:
    return SyncPlan(mesh=unflatten_mesh(*mesh), **facts)


def make_plan(params: Any, mesh: AnyMesh, specs: Any = None, config: SyncConfig | None = None) -> SyncPlan:
    """The plan that syncs the gradients of `params` over `mesh`.

    Pure: traces nothing, starts nothing, reads no array's values and keeps none alive.

    Args:
        params: A pytree of arrays or `jax.ShapeDtypeStruct`s with global shapes.
        mesh: Any `jax.sharding.Mesh` (Auto or Explicit) or `AbstractMesh`.
        specs: A prefix pytree of `PartitionSpec`. By default arrays that are placed on such a mesh keep
            their spec, and all others are replicated.
        config: Default `SyncConfig()`.

    Raises:
        ArgumentError: `mesh`, `specs` or `config` is something else.
        ConfigError: The reduce dtype has 64 bits, and JAX is not set to compute in them.
        MeshError: The mesh lacks a data axis of the config.
        RegistrationError: A leaf is no array.
        SpecError: A spec does not fit its leaf, the mesh or the tree.

    >>> import jax, jaxsync
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> plan = make_plan({"w": jax.ShapeDtypeStruct((3, 2), "float32")}, mesh)
    >>> plan.num_all_reduces, plan.num_bytes
    (1, 24)
    """
    config = SyncConfig() if config is None else config
    _check_arguments(mesh, specs, config)
    check_axes(mesh, config.axes)
    leaves, treedef = make_leaves(params, mesh, specs, config.axes)
    buckets = make_buckets(leaves, config, is_over_gloo=uses_gloo(mesh))
    return SyncPlan(
        mesh=mesh,
        config=config,
        leaves=leaves,
        buckets=buckets,
        treedef=treedef,
        fingerprint=_fingerprint(mesh, config, leaves, buckets),
    )


def _check_arguments(mesh: Any, specs: Any, config: Any) -> None:
    for argument, value, kind in (("mesh", mesh, (Mesh, AbstractMesh)), ("config", config, SyncConfig)):
        if not isinstance(value, kind):
            wanted = "a jax.sharding.Mesh" if argument == "mesh" else "a SyncConfig"
            got = f"a {type(value).__name__}"
            raise ArgumentError(function="make_plan", argument=argument, got=got, wanted=wanted)
    if not is_spec(specs) and jax.tree_util.all_leaves([specs]):  # else each leaf would be told of it
        wanted = "a prefix tree of PartitionSpecs" + "; pass it as config=" * isinstance(specs, SyncConfig)
        got = repr(specs) if isinstance(specs, str) else f"a {type(specs).__name__}"
        raise ArgumentError(function="make_plan", argument="specs", got=got, wanted=wanted)
    dtype = config.reduce_dtype
    if dtype not in (None, "own") and str(jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        problem = f"reduce_dtype = {dtype!r}: JAX computes in 32 bits unless jax_enable_x64 is set"
        raise ConfigError(source="SyncConfig(...)", problems=(problem,))


def _fingerprint(
    mesh: AnyMesh, config: SyncConfig, leaves: tuple[Leaf, ...], buckets: tuple[Bucket, ...]
) -> str:
    # Canonical text, not hash(): the same in every process whatever its hash seed.
    parts = {
        "mesh": list(axis_sizes(mesh).items()),
        "config": asdict(config),
        "leaves": [(leaf.path, leaf.shape, leaf.dtype, str(leaf.spec)) for leaf in leaves],
        "buckets": [bucket.leaves for bucket in buckets],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
