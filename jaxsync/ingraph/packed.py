"""Packed: a tree kept as few flat arrays, so that a program pays for few operands instead of hundreds.

A launch, an all-reduce and an optimizer's update each have a price for every array, which for small leaves is
far above that of their bytes. A packed tree is flattened once, and stays so from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsync.plan import SyncPlan

Take = Callable[[Any, Sequence[tuple[int, ...]]], Sequence[Any]]


def join(leaves: Sequence[Any]) -> Any:
    """One leaf as it is, or several as one flat array."""
    return leaves[0] if len(leaves) == 1 else jnp.concatenate([leaf.ravel() for leaf in leaves])


def split(array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The leaves of these shapes that `join` made one array of."""
    if len(shapes) == 1:
        return [array]
    leaves, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        is_host = isinstance(array, np.ndarray)
        part = array[offset : offset + size] if is_host else lax.slice(array, (offset,), (offset + size,))
        leaves.append(part.reshape(shape))
        offset += size
    return leaves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which leaves of a plan's tree are kept as one array.

    Attributes:
        plan: The plan; two layouts are equal if their plans and slots are.
        slots: The leaves of each array, as indices into the plan's leaves: every synced leaf once.
        rest: The leaves that are not synced.
    """

    plan: SyncPlan
    slots: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if self is other:  # the usual case, asked at every launch
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.slots == other.slots and self.plan == other.plan

    def __hash__(self) -> int:
        return hash(self.plan)

    @property
    def is_fused(self) -> bool:
        """Whether any array holds more than one leaf."""
        return any(len(slot) > 1 for slot in self.slots)

    @property
    def specs(self) -> Packed:
        """How each array is sharded. Only replicated leaves share one."""
        leaves = self.plan.leaves
        arrays = tuple(leaves[slot[0]].spec for slot in self.slots)
        return Packed(layout=self, arrays=arrays, rest=tuple(leaves[i].spec for i in self.rest))

    def pack(self, tree: Any) -> Packed:
        """The tree of the plan, packed. Leaves that are not synced are kept beside it as they are."""
        leaves = self.plan.treedef.flatten_up_to(tree)
        arrays = tuple(join([leaves[i] for i in slot]) for slot in self.slots)
        return Packed(layout=self, arrays=arrays, rest=tuple(leaves[i] for i in self.rest))


def make_layout(plan: SyncPlan, *, fuse: bool = True) -> Layout:
    """The layout whose arrays are the plan's buckets, or single leaves.

    A leaf that is sharded is an array of its own: flattening it would move its elements between devices.

    Args:
        plan: The plan.
        fuse: Whether any array may hold more than one leaf.

    >>> import jaxsync
    >>> params = {"a": jnp.zeros(2), "b": jnp.zeros((2, 3))}
    >>> layout = make_layout(jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8})))
    >>> packed = layout.pack(params)
    >>> [array.shape for array in packed.arrays], packed.tree()["b"].shape
    ([(8,)], (2, 3))
    """
    slots: list[tuple[int, ...]] = []
    for bucket in plan.buckets:
        alone = not fuse or any(plan.leaves[i].spec_axes for i in bucket.leaves)
        slots += [(i,) for i in bucket.leaves] if alone else [bucket.leaves]
    rest = tuple(i for i, leaf in enumerate(plan.leaves) if not leaf.is_synced)
    return Layout(plan=plan, slots=tuple(sorted(slots)), rest=rest)


@dataclass(frozen=True, slots=True)
class LeafKey:
    """The place of an array in a packed tree: the paths of its leaves, the first of them written out."""

    path: str
    num_leaves: int

    def __str__(self) -> str:
        return self.path if self.num_leaves == 1 else f"{self.path} and {self.num_leaves - 1} more"


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A tree of the plan, as a pytree of the arrays of a layout.

    Attributes:
        layout: What the arrays hold. Static: part of the tree's structure.
        arrays: One array a slot.
        rest: The leaves that are not synced, or None for each.
    """

    layout: Layout
    arrays: tuple[Any, ...]
    rest: tuple[Any, ...]

    def tree(self, take: Take = split) -> Any:
        """The tree of the plan; `take` takes the leaves out of an array."""
        plan = self.layout.plan
        leaves: list[Any] = [None] * len(plan.leaves)
        for slot, array in zip(self.layout.slots, self.arrays, strict=True):
            for i, leaf in zip(slot, take(array, [plan.leaves[i].shape for i in slot]), strict=True):
                leaves[i] = leaf
        for i, leaf in zip(self.layout.rest, self.rest, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(plan.treedef, leaves)

    def with_arrays(self, arrays: Sequence[Any]) -> Packed:
        """The same with other arrays."""
        return Packed(layout=self.layout, arrays=tuple(arrays), rest=self.rest)

    def without_rest(self) -> Packed:
        """The same with None for what is not synced, which optimizers take for absent."""
        return Packed(layout=self.layout, arrays=self.arrays, rest=(None,) * len(self.rest))

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Layout]:
        """For JAX."""
        leaves = self.layout.plan.leaves
        keys = [LeafKey(leaves[slot[0]].path, len(slot)) for slot in self.layout.slots]
        keys += [LeafKey(leaves[i].path, 1) for i in self.layout.rest]
        return tuple(zip(keys, (*self.arrays, *self.rest), strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        """For JAX."""
        return (*self.arrays, *self.rest), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Sequence[Any]) -> Packed:
        """For JAX."""
        num = len(layout.slots)
        return cls(layout=layout, arrays=tuple(children[:num]), rest=tuple(children[num:]))


def is_packed(x: Any) -> TypeGuard[Packed]:
    """Whether it is a packed tree."""
    return isinstance(x, Packed)


def unpack_all(tree: Any, take: Take = split) -> Any:
    """`tree` with the tree of the plan in place of every packed one in it; `take` as in `Packed.tree`."""
    return jax.tree.map(lambda x: x.tree(take) if is_packed(x) else x, tree, is_leaf=is_packed)
