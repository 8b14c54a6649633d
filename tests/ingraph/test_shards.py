"""Shards: any shape is cut and put together again, and sums arrive in parts."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.ingraph.shards import Cut, Shard, all_gather, is_shard, own_part, reduce_scatter, split_parts

SHAPES = [(7, 3), (), (0, 3), (1,), (1, 1), (16,), (3, 2, 5), (200, 201)]
TWO_AXES = jaxsync.SyncConfig(axis=("data", "replica"))


def cuts_of(
    shapes: list[tuple[int, ...]], sizes: dict[str, int], specs: Any = None, config: Any = None
) -> list[Cut]:
    tree = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    plan = jaxsync.make_plan(tree, jaxsync.make_mesh(sizes), specs, config=config)
    return [Cut(plan=plan, slot=(i,)) for i in range(len(shapes))]


def cut_and_gather(arrays: list[Any], cuts: list[Cut]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays of parts, and what they are put together to."""
    plan = cuts[0].plan
    whole = [leaf.spec for leaf in plan.leaves]
    cut_all = jax.shard_map(
        lambda arrays: [own_part(array, cut) for array, cut in zip(arrays, cuts, strict=True)],
        mesh=plan.mesh,
        in_specs=(whole,),
        out_specs=[cut.spec for cut in cuts],
        check_vma=False,
    )
    gather_all = jax.shard_map(
        lambda parts: all_gather(parts, cuts),
        mesh=plan.mesh,
        in_specs=([cut.spec for cut in cuts],),
        out_specs=whole,
        check_vma=False,
    )
    parts = jax.jit(cut_all)(arrays)
    return parts, jax.jit(gather_all)(parts)


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 3}, {"data": 8}, {"data": 4, "model": 2}])
def test_an_array_of_any_shape_is_cut_and_put_together_bit_for_bit(
    sizes: dict[str, int], rng: np.random.Generator
) -> None:
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    cuts = cuts_of(SHAPES, sizes)
    parts, gathered = cut_and_gather(arrays, cuts)
    n = sizes["data"]
    for array, cut, part, whole in zip(arrays, cuts, parts, gathered, strict=True):
        assert part.shape == cut.shape
        assert part.sharding.shard_shape(part.shape) == cut.part_shape
        padded = np.pad(array.ravel(), (0, n * cut.part_size - array.size))
        np.testing.assert_array_equal(np.asarray(part).ravel(), padded)
        np.testing.assert_array_equal(whole, array)
        assert whole.shape == array.shape


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    num_devices=st.integers(1, 8),
)
def test_parts_hold_every_element_and_less_than_a_part_of_padding(
    shapes: list[tuple[int, ...]], num_devices: int
) -> None:
    for shape, cut in zip(shapes, cuts_of(shapes, {"data": num_devices}), strict=True):
        size = math.prod(shape)
        assert size <= num_devices * cut.part_size < size + num_devices
        assert math.prod(cut.shape) == num_devices * cut.part_size
        assert len(cut.shape) == len(cut.part_shape) == max(len(shape), 1)


MESHES = [
    {"replica": 2, "model": 2, "data": 2},
    {"data": 2, "model": 2, "replica": 2},
    {"model": 2, "replica": 2, "data": 2},
]


@pytest.mark.parametrize("sizes", MESHES)
def test_model_shards_are_cut_over_two_data_axes_in_any_order_of_the_mesh(
    sizes: dict[str, int], rng: np.random.Generator
) -> None:
    shapes = [(6, 4), (4, 5), (3, 3)]
    specs = [P(None, "model"), P("model"), P()]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    cuts = cuts_of(shapes, sizes, specs, TWO_AXES)
    parts, gathered = cut_and_gather(arrays, cuts)
    for array, whole, part, cut in zip(arrays, gathered, parts, cuts, strict=True):
        np.testing.assert_array_equal(whole, array)
        assert part.sharding.shard_shape(part.shape) == cut.part_shape
        held = sorted(x for x in np.asarray(part).ravel() if x)
        assert held == sorted(array.ravel())  # each element once, and padding


@pytest.mark.parametrize(
    ("sizes", "config"),
    [({"data": 1}, None), ({"data": 8}, None), ({"replica": 2, "data": 4}, TWO_AXES)],
)
def test_the_parts_of_a_sum_are_those_of_the_arrays(
    sizes: dict[str, int], config: Any, rng: np.random.Generator
) -> None:
    shapes = [(7, 3), (), (1,), (3, 2, 5), (40,)]
    cuts = cuts_of(shapes, sizes, config=config)
    plan = cuts[0].plan
    rows = rng.normal(size=(plan.num_replicas, sum(int(np.prod(shape)) for shape in shapes)))
    run = jax.jit(
        jax.shard_map(
            lambda row: split_parts(reduce_scatter(row[0], cuts), cuts),
            mesh=plan.mesh,
            in_specs=plan.batch_spec,
            out_specs=[cut.spec for cut in cuts],
        )
    )
    found = run(rows.astype(np.float32))
    truth = np.split(rows.sum(axis=0), np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
    for part, total, cut in zip(found, truth, cuts, strict=True):
        assert part.shape == cut.shape
        flat = np.asarray(part).ravel()
        np.testing.assert_allclose(flat[: total.size], total, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(flat[total.size :], 0)
    audit = jaxsync.audit(run, rows.astype(np.float32))
    assert audit.count("reduce-scatter") + audit.count("all-reduce") == len(audit.collectives) == 1


def test_cuts_of_equal_plans_are_equal_and_a_shard_is_a_tree_of_one_array() -> None:
    [a, other], [b, _] = cuts_of([(3,), (3,)], {"data": 8}), cuts_of([(3,), (3,)], {"data": 8})
    assert a == b
    assert hash(a) == hash(b)
    assert a != other
    assert a != "a cut"
    assert a != cuts_of([(3,), (3,)], {"data": 4})[0]
    shard = Shard(array=np.ones(8), cut=a)
    assert is_shard(shard)
    assert not is_shard(shard.array)
    [(path, array)] = jax.tree_util.tree_leaves_with_path({"w": shard})
    assert jax.tree_util.keystr(path) == "['w'].shard"
    assert array is shard.array
    again = jax.tree.map(lambda x: x, shard)
    assert (again.array is array, again.cut is a) == (True, True)
    assert jax.tree.structure(shard) == jax.tree.structure(Shard(array=0, cut=b))


def test_a_cut_of_several_leaves_is_flat() -> None:
    [first, _] = cuts_of([(7, 3), (5,)], {"data": 8})
    cut = Cut(plan=first.plan, slot=(0, 1))
    assert (cut.local_shape, cut.part_size, cut.part_shape, cut.shape) == ((26,), 4, (4,), (32,))
    assert (first.local_shape, first.part_size, first.part_shape, first.shape) == ((7, 3), 3, (3, 1), (24, 1))
