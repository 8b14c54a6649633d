"""Rules of bucketing, held against random tables."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxsync import SyncConfig, make_mesh, make_plan
from jaxsync.buckets import make_buckets

leaf = st.tuples(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "float16", "complex64", "int32", "bool"]),
)
configs = st.builds(
    SyncConfig,
    fuse_max_bytes=st.integers(0, 4000),
    bucket_max_leaves=st.integers(1, 8),
    bucket_max_bytes=st.integers(0, 6000),
    reduce_dtype=st.sampled_from([None, "own", "bfloat16"]),
)


@given(shapes=st.lists(leaf, max_size=40), config=configs)
def test_each_synced_leaf_is_in_one_bucket_and_every_bound_holds(shapes, config: SyncConfig) -> None:
    tree = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    plan = make_plan(tree, make_mesh({"data": 8}), config=config)
    carried = [i for bucket in plan.buckets for i in bucket.leaves]
    assert sorted(carried) == [i for i, x in enumerate(plan.leaves) if x.is_synced]
    assert [b.leaves[0] for b in plan.buckets] == sorted(b.leaves[0] for b in plan.buckets)
    for bucket in plan.buckets:
        members = [plan.leaves[i] for i in bucket.leaves]
        assert list(bucket.leaves) == sorted(bucket.leaves)
        assert {x.dtype for x in members} == {bucket.leaf_dtype}
        assert bucket.num_elements == sum(math.prod(x.shape) for x in members)
        assert bucket.num_bytes == bucket.num_elements * jnp.dtype(bucket.dtype).itemsize
        if bucket.is_fused:
            assert len(members) <= config.bucket_max_leaves
            assert bucket.num_bytes <= config.bucket_max_bytes
            item = jnp.dtype(bucket.dtype).itemsize
            assert all(math.prod(x.shape) * item <= config.fuse_max_bytes for x in members)


@pytest.mark.parametrize(
    ("dtype", "setting", "wire"),
    [
        ("bfloat16", None, "float32"),
        ("float16", None, "float32"),
        ("float8_e4m3fn", None, "float32"),
        ("float32", None, "float32"),
        ("complex64", None, "complex64"),
        ("bfloat16", "own", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("complex64", "bfloat16", "complex64"),
    ],
)
def test_the_wire_dtype_follows_the_config(dtype: str, setting: str | None, wire: str) -> None:
    tree = [jax.ShapeDtypeStruct((3,), dtype)]
    plan = make_plan(tree, make_mesh({"data": 8}), config=SyncConfig(reduce_dtype=setting))
    assert plan.buckets[0].dtype == wire


def test_small_leaves_fuse_and_large_ones_travel_alone() -> None:
    tree = [jnp.ones(10), jnp.ones((200, 200)), jnp.ones(10), jnp.ones(10, jnp.bfloat16)]
    plan = make_plan(tree, make_mesh({"data": 8}))
    assert [bucket.leaves for bucket in plan.buckets] == [(0, 2), (1,), (3,)]


def test_bytes_are_those_of_one_shard_and_model_shards_stay_apart() -> None:
    mesh = make_mesh({"data": 4, "model": 2})
    plan = make_plan([jnp.ones((4, 2)), jnp.ones(4)], mesh, [P("model"), P()])
    assert [(b.leaves, b.num_elements) for b in plan.buckets] == [((0,), 4), ((1,), 4)]


def test_between_cpu_processes_a_bucket_holds_more_leaves() -> None:
    leaves = make_plan([np.zeros(3, np.float32)] * 600, make_mesh({"data": 2})).leaves
    config = SyncConfig(bucket_max_leaves=32)
    sizes = [len(bucket.leaves) for bucket in make_buckets(leaves, config, is_over_gloo=True)]
    assert sizes == [256, 256, 88]
    assert max(len(bucket.leaves) for bucket in make_buckets(leaves, config)) == 32
