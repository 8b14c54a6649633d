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
        reduce_axes: The axes of the all-reduce.
        scatter_axes: The axes of the reduce-scatter before it: those its leaves are sharded over.
        dtype: The dtype on the wire, in which the sum is made.
        leaf_dtype: The dtype of every leaf in it, to which the result is cast back.
        num_elements: Elements on one device.
        num_bytes: Bytes one device hands to the collective.
    """

    leaves: tuple[int, ...]
    reduce_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
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
    return wide_dtype(dtype) if config.reduce_dtype is None else config.reduce_dtype


def wide_dtype(dtype: str) -> str:
    """The dtype in which many values of `dtype` can be summed: at least 32 bits for real floats.

    >>> wide_dtype("float16"), wide_dtype("float64"), wide_dtype("complex64")
    ('float32', 'float64', 'complex64')
    """
    is_real = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    return "float32" if is_real and jnp.finfo(jnp.dtype(dtype)).bits < 32 else dtype


# Over gloo a collective costs about a millisecond, whatever it carries: 100 leaves of 4 processes take 7 ms
# in one bucket and 20 ms in four (benchmarks/multiprocess.py), more than a larger bucket takes to compile.
_GLOO_FACTOR = 8


def make_buckets(
    leaves: Sequence[Leaf], config: SyncConfig, *, is_over_gloo: bool = False
) -> tuple[Bucket, ...]:
    """The buckets of a table, ordered by their first leaf; each synced leaf is in exactly one."""
    max_leaves = config.bucket_max_leaves * (_GLOO_FACTOR if is_over_gloo else 1)
    wire = {dtype: reduce_dtype(dtype, config) for dtype in {leaf.dtype for leaf in leaves if leaf.is_synced}}
    items = {dtype: jnp.dtype(name).itemsize for dtype, name in wire.items()}
    elements = [math.prod(leaf.whole_shape) for leaf in leaves]
    done: list[Bucket] = []
    open_: dict[Hashable, list[int]] = {}
    held_bytes: dict[Hashable, int] = {}

    def close(indices: list[int]) -> None:
        first = leaves[indices[0]]
        total = sum(elements[i] for i in indices)
        bucket = Bucket(
            leaves=tuple(indices),
            reduce_axes=first.reduce_axes,
            scatter_axes=first.scatter_axes,
            dtype=wire[first.dtype],
            leaf_dtype=first.dtype,
            num_elements=total,
            num_bytes=total * items[first.dtype],
        )
        done.append(bucket)

    for index, leaf in enumerate(leaves):
        if not leaf.is_synced:
            continue
        num_bytes = elements[index] * items[leaf.dtype]
        if num_bytes > config.fuse_max_bytes:
            close([index])
            continue
        # Leaves sharded over different model axes stay apart: one flat array would vary over all of them.
        key = (leaf.reduce_axes, leaf.scatter_axes, leaf.dtype, frozenset(leaf.spec_axes))
        is_full = len(open_.get(key, ())) >= max_leaves
        if key in open_ and (is_full or held_bytes[key] + num_bytes > config.bucket_max_bytes):
            close(open_.pop(key))
            held_bytes[key] = 0
        open_.setdefault(key, []).append(index)
        held_bytes[key] = held_bytes.get(key, 0) + num_bytes
    for group in open_.values():
        close(group)
    return tuple(sorted(done, key=lambda bucket: bucket.leaves[0]))
