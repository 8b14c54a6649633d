"""Which leaves travel together.

A collective costs a fixed price an operand, which dwarfs the transfer of a small leaf; flattening costs a
copy, which dwarfs that price for a large one. So small leaves are fused, within bounds on their number
(compile time grows with it) and bytes, and large leaves travel alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxsync.config import SyncConfig
from jaxsync.params import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Leaves that are reduced as one flat array, or one leaf that is reduced as it is.

    Attributes:
        leaves: Indices into the plan's leaves, ascending.
        reduce_axes: The axes of the collective.
        dtype: The dtype on the wire, in which the sum is made.
        leaf_dtype: The dtype of every leaf in it, to which the result is cast back.
        num_elements: Elements on one device.
        num_bytes: Bytes one device hands to the collective.
    """

    leaves: tuple[int, ...]
    reduce_axes: tuple[str, ...]
    dtype: str
    leaf_dtype: str
    num_elements: int
    num_bytes: int

    @property
    def is_fused(self) -> bool:
        """Whether leaves are flattened into one array."""
        return len(self.leaves) > 1


def reduce_dtype(dtype: str, config: SyncConfig) -> str:
    """The dtype in which gradients of `dtype` are summed.

    >>> reduce_dtype("bfloat16", SyncConfig()), reduce_dtype("float64", SyncConfig())
    ('float32', 'float64')
    """
    if config.reduce_dtype == "own" or not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return dtype
    if config.reduce_dtype is not None:
        return config.reduce_dtype
    return "float32" if jnp.finfo(jnp.dtype(dtype)).bits < 32 else dtype


def make_buckets(leaves: Sequence[Leaf], config: SyncConfig) -> tuple[Bucket, ...]:
    """The buckets of a table, ordered by their first leaf; each synced leaf is in exactly one."""
    done: list[Bucket] = []
    open_: dict[Hashable, list[int]] = {}
    wire = {dtype: reduce_dtype(dtype, config) for dtype in {leaf.dtype for leaf in leaves if leaf.is_synced}}

    def num_bytes(index: int) -> int:
        leaf = leaves[index]
        return math.prod(leaf.local_shape) * jnp.dtype(wire[leaf.dtype]).itemsize

    def close(indices: list[int]) -> None:
        first = leaves[indices[0]]
        bucket = Bucket(
            leaves=tuple(indices),
            reduce_axes=first.reduce_axes,
            dtype=wire[first.dtype],
            leaf_dtype=first.dtype,
            num_elements=sum(math.prod(leaves[i].local_shape) for i in indices),
            num_bytes=sum(num_bytes(i) for i in indices),
        )
        done.append(bucket)

    for index, leaf in enumerate(leaves):
        if not leaf.is_synced:
            continue
        if num_bytes(index) > config.fuse_max_bytes:
            close([index])
            continue
        # Leaves sharded over different model axes stay apart: one flat array would vary over all of them.
        key = (leaf.reduce_axes, leaf.dtype, frozenset(leaf.spec_axes))
        group = open_.get(key, [])
        held = sum(num_bytes(i) for i in group)
        if group and (
            len(group) >= config.bucket_max_leaves or held + num_bytes(index) > config.bucket_max_bytes
        ):
            close(open_.pop(key))
        open_.setdefault(key, []).append(index)
    for group in open_.values():
        close(group)
    return tuple(sorted(done, key=lambda bucket: bucket.leaves[0]))
