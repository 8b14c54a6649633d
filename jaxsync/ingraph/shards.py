"""Shards: an array in equal parts, one a device along the data axes, and the collectives that move them.

The parts are cut from the flat array, padded with zeros to a multiple of the number of devices; so any shape
can be cut. Parts of several arrays travel together as the columns of one matrix with a row a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from jaxsync.ingraph.transport import pad_to_rows, scatter_rows
from jaxsync.mesh import num_devices
from jaxsync.params import spec_axes
from jaxsync.plan import SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """How one array of a layout is cut.

    Attributes:
        plan: The plan.
        slot: The leaves that the array holds.
        dims: For a leaf that its spec shards over data axes: the dims it is cut along, each with its axes.
            Empty for an array that is flattened, padded and cut over all data axes.
    """

    plan: SyncPlan
    slot: tuple[int, ...]
    dims: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Cut) and (self.slot, self.dims, self.plan) == (
            other.slot,
            other.dims,
            other.plan,
        )

    def __hash__(self) -> int:
        return hash((self.plan, self.slot))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes it is cut over, the slowest first."""
        return tuple(axis for _, axes in self.dims for axis in axes) or self.plan.data_axes

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return num_devices(self.plan.mesh, self.axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the uncut array on one device."""
        leaves = [self.plan.leaves[i] for i in self.slot]
        if len(leaves) == 1:
            return leaves[0].whole_shape
        return (sum(math.prod(leaf.whole_shape) for leaf in leaves),)

    @property
    def part_size(self) -> int:
        """Elements of one part, padding included."""
        return -(-math.prod(self.local_shape) // self.num_parts)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one part; if flat, with as many dims as the array has, for masks look at those."""
        if self.dims:
            return self.plan.leaves[self.slot[0]].local_shape
        return (self.part_size, *[1] * (len(self.local_shape) - 1))

    @property
    def spec(self) -> PartitionSpec:
        """How the array of all parts is sharded: over the data axes, then over those of the uncut array."""
        leaf = self.plan.leaves[self.slot[0]]
        return leaf.spec if self.dims else PartitionSpec((*self.plan.data_axes, *leaf.spec_axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of all parts."""
        leaf = self.plan.leaves[self.slot[0]]
        if self.dims:
            return leaf.shape
        return (num_devices(self.plan.mesh, spec_axes(self.spec)) * self.part_size, *self.part_shape[1:])

    def to_rows(self, array: jax.Array) -> jax.Array:
        """The parts of an array that one device holds whole, flat, as the rows of a matrix."""
        if not self.dims:
            return pad_to_rows(array.ravel(), self.num_parts)
        split_shape: list[int] = []
        fronts, rest = [], []
        numbers = {dim: num_devices(self.plan.mesh, axes) for dim, axes in self.dims}
        for dim, size in enumerate(self.local_shape):
            if dim in numbers:
                fronts.append(len(split_shape))
                split_shape.append(numbers[dim])
            rest.append(len(split_shape))
            split_shape.append(size // numbers.get(dim, 1))
        return array.reshape(split_shape).transpose(*fronts, *rest).reshape(self.num_parts, self.part_size)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """The array whose parts these are."""
        if not self.dims:
            return lax.slice(rows.ravel(), (0,), (math.prod(self.local_shape),)).reshape(self.local_shape)
        numbers = [num_devices(self.plan.mesh, axes) for _, axes in self.dims]
        order: list[int] = []
        place_of = {dim: k for k, (dim, _) in enumerate(self.dims)}
        for dim in range(len(self.local_shape)):
            order += [place_of[dim]] if dim in place_of else []
            order.append(len(numbers) + dim)
        return rows.reshape(*numbers, *self.part_shape).transpose(order).reshape(self.local_shape)


def spec_cuts(plan: SyncPlan) -> tuple[Cut, ...]:
    """The cuts of the leaves that their specs shard over data axes."""
    return tuple(
        Cut(plan=plan, slot=(i,), dims=leaf.scatter_dims)
        for i, leaf in enumerate(plan.leaves)
        if leaf.is_synced and leaf.scatter_dims
    )


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A pytree of one array that is cut.

    Attributes:
        array: Inside `shard_map` this device's part; outside the array of all parts.
        cut: How it is cut. Static.
    """

    array: Any
    cut: Cut

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Cut]:
        """For JAX."""
        return ((GetAttrKey("shard"), self.array),), self.cut

    def tree_flatten(self) -> tuple[tuple[Any, ...], Cut]:
        """For JAX."""
        return (self.array,), self.cut

    @classmethod
    def tree_unflatten(cls, cut: Cut, children: Sequence[Any]) -> Shard:
        """For JAX."""
        return cls(array=children[0], cut=cut)


def is_shard(x: Any) -> TypeGuard[Shard]:
    """Whether it is an array that is cut."""
    return isinstance(x, Shard)


def holds_array(shard: Shard) -> bool:
    """Whether it holds an array, and not what an optimizer has put in place of one (a mask)."""
    return bool(jax.tree_util.all_leaves([shard.array]))


def own_part(array: jax.Array, cut: Cut) -> jax.Array:
    """This device's part of an array that it holds whole. Inside `shard_map`."""
    part: jax.Array = lax.dynamic_index_in_dim(cut.to_rows(array), lax.axis_index(cut.axes), keepdims=False)
    return part.reshape(cut.part_shape)


def reduce_scatter(packed: jax.Array, cuts: Sequence[Cut]) -> jax.Array:
    """This device's part of the sum over devices of each of several arrays.

    Args:
        packed: The arrays, flat and end to end; or one as it is.
        cuts: How each is cut.

    Returns:
        The parts, end to end; `split_parts` takes them apart.

    Collectives: one reduce-scatter, or what `transport.scatter_rows` has for it.
    """
    flat, rows, offset = packed.ravel(), [], 0
    for cut in cuts:
        size = math.prod(cut.local_shape)
        rows.append(cut.to_rows(lax.slice(flat, (offset,), (offset + size,)).reshape(cut.local_shape)))
        offset += size
    matrix = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
    return scatter_rows(matrix, cuts[0].axes, cuts[0].plan)


def split_parts(parts: jax.Array, cuts: Sequence[Cut]) -> list[jax.Array]:
    """The part of each array, from parts that are end to end."""
    found, offset = [], 0
    for cut in cuts:
        part = lax.slice(parts, (offset,), (offset + cut.part_size,))
        found.append(part.reshape(cut.part_shape))
        offset += cut.part_size
    return found


def all_gather(parts: Sequence[jax.Array], cuts: Sequence[Cut]) -> list[jax.Array]:
    """The whole of each array, from this device's parts of them. Of one dtype, inside `shard_map`.

    Collectives: one all-gather.
    """
    flat = [part.ravel() for part in parts]
    rows = lax.all_gather(flat[0] if len(flat) == 1 else jnp.concatenate(flat), cuts[0].axes)
    found, offset = [], 0
    for cut in cuts:
        found.append(cut.from_rows(lax.slice_in_dim(rows, offset, offset + cut.part_size, axis=1)))
        offset += cut.part_size
    return found
