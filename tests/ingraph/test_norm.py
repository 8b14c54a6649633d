"""The global norm and clipping, in every place gradients can be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import NotReducedError, UnboundAxisError

SPECS = {"w": P(None, "model"), "v": P("model"), "b": P(), "n": P(), "x": P(("model", "tensor"))}
TREE = {
    "w": np.arange(24.0, dtype=np.float32).reshape(4, 6),
    "v": np.arange(4.0, dtype=np.float32),
    "b": np.arange(5.0, dtype=np.float32),
    "n": np.int32(7),
    "x": np.arange(8.0, dtype=np.float32),
}
TRUTH = float(np.sqrt(sum((TREE[k].astype(np.float64) ** 2).sum() for k in "wvbx")))


@pytest.fixture(scope="module")
def plan() -> jaxsync.SyncPlan:
    return jaxsync.make_plan(TREE, jaxsync.make_mesh({"data": 2, "model": 2, "tensor": 2}), SPECS)


def inside(plan: jaxsync.SyncPlan, fn: Any, check_vma: bool, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(fn, mesh=plan.mesh, in_specs=(SPECS,), out_specs=out_specs, check_vma=check_vma)
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_any_mix_count_once(plan, check_vma: bool) -> None:
    norm = inside(plan, lambda g: jaxsync.global_norm(g, plan), check_vma, P())
    assert float(norm(TREE)) == pytest.approx(TRUTH, rel=1e-6)
    collectives = jaxsync.audit(norm, TREE).collectives
    assert sorted(c.axes for c in collectives) == [("model",), ("model", "tensor")]
    assert {c.num_bytes for c in collectives} == {4}


def test_global_arrays_count_once(plan) -> None:
    placed = {k: jax.device_put(v, NamedSharding(plan.mesh, SPECS[k])) for k, v in TREE.items()}
    assert float(jaxsync.global_norm(TREE, plan)) == pytest.approx(TRUTH, rel=1e-6)
    assert float(jax.jit(lambda g: jaxsync.global_norm(g, plan))(placed)) == pytest.approx(TRUTH, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_squares_are_summed_in_float32(dtype: str) -> None:
    grads = {"w": jnp.full(4, 300, dtype)}  # 300 ** 2 is more than a float16 holds
    plan = jaxsync.make_plan(
        grads, jaxsync.make_mesh({"data": 8}), config=jaxsync.SyncConfig(reduce_dtype="own")
    )
    norm = jaxsync.global_norm(grads, plan)
    assert norm.dtype == jnp.float32
    assert float(norm) == 600.0


def test_complex_leaves_count_with_their_modulus() -> None:
    grads = {"w": jnp.array([3 + 4j], jnp.complex64)}
    plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    assert float(jaxsync.global_norm(grads, plan)) == 5.0
    clipped, _ = jaxsync.clip_by_global_norm(2.5, plan).update(grads, None)
    np.testing.assert_allclose(clipped["w"], [1.5 + 2j], rtol=1e-6)


def test_a_tree_without_floats_has_norm_zero() -> None:
    grads = {"n": jnp.int32(3)}
    plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    assert float(jaxsync.global_norm(grads, plan)) == 0.0


def test_gradients_that_were_not_synced_are_refused_by_name() -> None:
    mesh = jaxsync.make_mesh({"data": 8})
    plan = jaxsync.make_plan({"w": jnp.float32(0)}, mesh)
    mapped = jax.shard_map(
        lambda x: jaxsync.global_norm({"w": x[0]}, plan)[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(NotReducedError) as caught:
        mapped(jnp.arange(8.0))
    assert (caught.value.leaves, caught.value.axes) == (("['w']",), ("data",))


def test_a_shard_whose_axis_is_not_bound_is_refused() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan({"w": jnp.ones(6)}, mesh, P("model"))
    with pytest.raises(UnboundAxisError) as caught:
        jax.pmap(lambda g: jaxsync.global_norm({"w": g}, plan), axis_name="data")(jnp.ones((4, 3)))
    assert caught.value.axes == ("model",)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
@pytest.mark.parametrize("check_vma", [True, False])
def test_clipping_scales_all_leaves_by_one_factor(plan, check_vma: bool, max_norm: float) -> None:
    tx = jaxsync.clip_by_global_norm(max_norm, plan)
    clip = inside(plan, lambda g: tx.update(g, tx.init(g))[0], check_vma, SPECS)
    got = clip(TREE)
    factor = min(1.0, max_norm / TRUTH)
    for name in "wvbx":
        np.testing.assert_allclose(got[name], factor * TREE[name], rtol=1e-6)
    assert int(got["n"]) == 7


def test_clipping_keeps_nan_visible() -> None:
    grads = {"w": jnp.array([1.0, jnp.nan])}
    plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    clipped, _ = jaxsync.clip_by_global_norm(1.0, plan).update(grads, None)
    assert bool(jnp.isnan(clipped["w"][1]))


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(plan, max_norm: float) -> None:
    with pytest.raises(ValueError, match="needs max_norm > 0"):
        jaxsync.clip_by_global_norm(max_norm, plan)


def test_a_tree_of_32_and_64_bits_is_summed_in_64() -> None:
    with jax.enable_x64(True):
        grads = {"w": jnp.float32(3), "v": jnp.float64(4), "c": jnp.zeros(2, jnp.complex128)}
        plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
        norm = jaxsync.global_norm(grads, plan)
        assert (norm.dtype, float(norm)) == (jnp.float64, 5.0)
        clipped, _ = jaxsync.clip_by_global_norm(2.5, plan).update(grads, None)
    assert [clipped[k].dtype for k in ("w", "v", "c")] == [jnp.float32, jnp.float64, jnp.complex128]
    assert (float(clipped["w"]), float(clipped["v"])) == (1.5, 2.0)


def test_a_tiny_factor_does_not_flush_float16_to_zero() -> None:
    grads = {"w": jnp.full(1000, 6e4, jnp.float16)}
    plan = jaxsync.make_plan(grads, jaxsync.make_mesh({"data": 8}))
    clipped, _ = jaxsync.clip_by_global_norm(1e-2, plan).update(grads, None)
    assert float(clipped["w"][0]) == pytest.approx(1e-2 / np.sqrt(1000), rel=1e-3)
