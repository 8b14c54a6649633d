"""Packed: the same tree in fewer arrays, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.ingraph.packed import Packed, is_packed, join, make_layout, split, unpack_all

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=12)
dtypes = st.sampled_from(["float32", "bfloat16", "complex64", "int32", "bool"])


def plan_of(params: Any, specs: Any = None, **config: Any) -> jaxsync.SyncPlan:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    return jaxsync.make_plan(params, mesh, specs, config=jaxsync.SyncConfig(**config))


@settings(deadline=None, max_examples=60)
@given(shapes, st.data())
def test_a_packed_tree_gives_back_the_tree(shapes: list[tuple[int, ...]], data: Any) -> None:
    rng = np.random.default_rng(0)
    tree = {
        f"leaf{i}": (rng.normal(size=shape) * 100).astype(data.draw(dtypes)) for i, shape in enumerate(shapes)
    }
    layout = make_layout(
        plan_of(tree, bucket_max_leaves=data.draw(st.integers(1, 5))), fuse=data.draw(st.booleans())
    )
    packed = layout.pack(tree)
    for got, want in zip(jax.tree.leaves(packed.tree()), jax.tree.leaves(tree), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), want)
    in_slots = [i for slot in layout.slots for i in slot]
    assert sorted([*in_slots, *layout.rest]) == list(range(len(tree)))


def test_what_is_fused_is_one_array_a_bucket() -> None:
    tree = {"a": np.ones(3, np.float32), "b": np.full((2, 2), 2, np.float32), "n": np.int32(7)}
    packed = make_layout(plan_of(tree)).pack(tree)
    np.testing.assert_array_equal(packed.arrays[0], [1, 1, 1, 2, 2, 2, 2])
    assert (len(packed.arrays), packed.rest) == (1, (7,))
    assert packed.without_rest().tree()["n"] is None


def test_sharded_leaves_stay_apart() -> None:
    tree = {name: np.ones((2, 2), np.float32) for name in "abcd"}
    layout = make_layout(plan_of(tree, {"a": P("model"), "b": P(), "c": P("model"), "d": P()}))
    assert layout.slots == ((0,), (1, 3), (2,))
    assert layout.specs.arrays == (P("model"), P(), P("model"))
    assert make_layout(layout.plan, fuse=False).slots == ((0,), (1,), (2,), (3,))


def test_paths_are_those_of_the_users_tree() -> None:
    tree = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32), "n": np.int32(7)}
    packed = make_layout(plan_of(tree)).pack(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(packed)]
    assert paths == ["['a'] and 1 more", "['n']"]


def test_equal_layouts_are_one_structure_and_others_are_not() -> None:
    tree = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    one, again = make_layout(plan_of(tree)).pack(tree), make_layout(plan_of(tree)).pack(tree)
    assert jax.tree.structure(one) == jax.tree.structure(again)
    other = make_layout(plan_of(tree), fuse=False).pack(tree)
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert one.layout != "a layout"


def test_packed_trees_are_found_in_a_larger_tree() -> None:
    tree = {"a": np.ones(3, np.float32), "b": np.ones((2, 1), np.float32)}
    packed = make_layout(plan_of(tree)).pack(tree)
    state = (jnp.int32(3), {"mu": packed})
    assert [is_packed(x) for x in jax.tree.leaves(state, is_leaf=is_packed)] == [False, True]
    shown = unpack_all(state)
    assert jax.tree.structure(shown) == jax.tree.structure((0, {"mu": tree}))
    assert shown[1]["mu"]["b"].shape == (2, 1)


def test_a_packed_tree_is_a_pytree_under_jit_and_grad() -> None:
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
    layout = make_layout(plan_of(tree))
    loss = lambda p: (p.tree()["a"] ** 2).sum() + 3 * p.tree()["b"].sum()  # noqa: E731
    grads: Packed = jax.jit(jax.grad(loss))(layout.pack(tree))
    np.testing.assert_array_equal(grads.arrays[0], [0, 2, 4, 3, 3, 3, 3])


def test_host_arrays_stay_on_the_host() -> None:
    tree = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    host = jax.device_get(make_layout(plan_of(tree)).pack(tree))
    assert all(type(leaf) is np.ndarray for leaf in host.tree().values())


def test_one_leaf_is_joined_and_split_without_a_copy() -> None:
    leaf = np.ones((2, 3))
    assert join([leaf]) is leaf
    assert split(leaf, [(2, 3)])[0] is leaf
