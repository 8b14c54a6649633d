"""Arrays of single devices on their way through one program of the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsync
from jaxsync.crossing import assemble, sync_program, take_out

# Buckets of two leaves: (a, b), (c, d), and e alone.
PARAMS = {
    "a": np.zeros((2, 3), np.float32),
    "b": np.zeros((), np.float32),
    "c": np.zeros((2, 3), np.float32),
    "d": np.zeros((), np.float32),
    "e": np.zeros(5, np.float32),
}
LEAVES = ((0, 1), (2, 3), (4,))


@pytest.fixture
def plan() -> jaxsync.SyncPlan:
    plan = jaxsync.make_plan(
        PARAMS, jaxsync.make_mesh({"data": 4}), config=jaxsync.SyncConfig(bucket_max_leaves=2)
    )
    assert tuple(bucket.leaves for bucket in plan.buckets) == LEAVES
    return plan


def devices_of(plan: jaxsync.SyncPlan) -> list[jax.Device]:
    return list(plan.mesh.devices.flat)


def drawn(plan: jaxsync.SyncPlan, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(size=leaf.shape).astype(np.float32) for leaf in plan.leaves] for _ in devices_of(plan)
    ]


def by_bucket(leaves: list[Any]) -> list[list[Any]]:
    return [[leaves[index] for index in own] for own in LEAVES]


def placed(plan: jaxsync.SyncPlan, values: list[list[np.ndarray]]) -> list[list[list[jax.Array]]]:
    return [by_bucket(jax.device_put(own, d)) for own, d in zip(values, devices_of(plan), strict=True)]


def check_means(plan: jaxsync.SyncPlan, blocks: list[list[jax.Array]], values: list[list[Any]]) -> None:
    means = [np.mean(leaf, axis=0, dtype=np.float64) for leaf in zip(*values, strict=True)]
    for device, own in zip(devices_of(plan), blocks, strict=True):
        for block, mean in zip(own, means, strict=True):
            assert block.devices() == {device}
            assert (block.shape, block.dtype) == (mean.shape, np.float32)
            np.testing.assert_allclose(block, mean, rtol=1e-5, atol=1e-6)


def test_each_device_gets_the_mean_of_every_leaf(plan) -> None:
    values = drawn(plan)
    arrays = assemble(plan, placed(plan, values))
    assert [array.shape for array in arrays] == [(4 * 7,), (4 * 7,), (4 * 5,)]
    check_means(plan, take_out(sync_program(plan, (0, 1, 2), LEAVES)(arrays)), values)


def test_a_leaf_alone_crosses_without_a_copy(plan) -> None:
    gradients = placed(plan, drawn(plan))
    [_, _, array] = assemble(plan, gradients)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    assert pointers == [own[2][0].unsafe_buffer_pointer() for own in gradients]


def test_all_buckets_in_one_program_leave_in_one_all_reduce(plan) -> None:
    arrays = assemble(plan, placed(plan, drawn(plan)))
    text = sync_program(plan, (0, 1, 2), LEAVES).lower(arrays).compile().as_text()  # type: ignore[attr-defined]
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1


def test_buckets_of_equal_shapes_share_a_program(plan) -> None:
    assert sync_program(plan, (0,), [LEAVES[0]]) is sync_program(plan, (1,), [LEAVES[1]])
    assert sync_program(plan, (0,), [LEAVES[0]]) is not sync_program(plan, (2,), [LEAVES[2]])
    other = jaxsync.make_plan(PARAMS, plan.mesh, config=dataclasses.replace(plan.config, reduce="sum"))
    assert sync_program(plan, (0,), [LEAVES[0]]) is not sync_program(other, (0,), [LEAVES[0]])


def test_gradients_that_are_committed_to_no_device_are_packed_where_they_are(plan) -> None:
    values = drawn(plan)
    gradients = []
    for device, own in zip(devices_of(plan), values, strict=True):
        with jax.default_device(device):
            gradients.append(by_bucket([jnp.asarray(leaf) for leaf in own]))
    assert not gradients[3][0][0].committed
    arrays = assemble(plan, gradients)
    check_means(plan, take_out(sync_program(plan, (0, 1, 2), LEAVES)(arrays)), values)


def test_weak_types_compile_nothing_new(plan, compiles) -> None:
    def filled(value: float) -> list[list[list[jax.Array]]]:
        weak = [[jnp.full(leaf.shape, value) for leaf in plan.leaves] for _ in devices_of(plan)]
        return [by_bucket(jax.device_put(own, d)) for own, d in zip(weak, devices_of(plan), strict=True)]

    strong, weak = placed(plan, drawn(plan)), filled(2.0)
    assert weak[0][0][0].weak_type
    assemble(plan, strong)
    compiles.clear()
    for array in assemble(plan, weak):
        assert not array.weak_type
        np.testing.assert_array_equal(array, np.full(array.shape, 2, np.float32))
    assert compiles == []
