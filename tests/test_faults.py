"""Faults people really hit with gradients of several devices, and the right value of each.

Each stands for its kind and cites the public report it comes from. What a single module owns is tested
there; here are the ones that cross modules.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import AlreadyReducedError, ReplicaMismatchError, TreeMismatchError

WAYS = ["checked", "unchecked", "pmap"]
W = {"w": np.float32(1)}


def synced(way: str, loss_fn: Any, rows: np.ndarray, params: Any = W, **config: Any) -> tuple[Any, Any]:
    """The synced loss and gradients of a local loss over 4 devices."""
    mesh = jaxsync.make_mesh({"data": 4})
    plan = jaxsync.make_plan(params, mesh, config=jaxsync.SyncConfig(**config))
    fn = jaxsync.value_and_grad(loss_fn, plan)
    if way == "pmap":
        mapped = jax.pmap(fn, axis_name="data", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:4])
        return mapped(params, rows.reshape(4, -1, *rows.shape[1:]))
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=way == "checked"
    )
    return jax.jit(mapped)(params, rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("reduce", "truth"), [("sum", 28.0), ("mean", 7.0)])
def test_the_sum_of_gradients_is_not_multiplied_by_the_devices(way: str, reduce: str, truth: float) -> None:
    """jax#36886: `psum(grad(...))` gives 112 under check_vma, silently."""
    _, grads = synced(way, lambda p, x: (p["w"] * x).sum(), np.arange(8, dtype=np.float32), reduce=reduce)
    assert float(grads["w"]) == truth


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_summed_loss_is_not_multiplied_by_the_devices(way: str) -> None:
    """jax#3970: pmap gives [0, 4, 8, 12]."""
    loss_fn = lambda p, x: jax.lax.psum((p["w"] * x).sum(), "data")  # noqa: E731
    assert float(synced(way, loss_fn, np.arange(4, dtype=np.float32))[1]["w"]) == 6.0


@pytest.mark.parametrize("way", WAYS)
def test_a_branch_taken_by_one_device_counts(way: str) -> None:
    """jax#40823: a branch on a device's own predicate, typed as the same on all, gives 8."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        branches = (lambda w: 8 * w, lambda w: 1 * w)
        return jax.lax.cond(jax.lax.axis_index("data") == 0, *branches, params["w"]) + 0 * x.sum()

    assert float(synced(way, loss_fn, np.ones(4, np.float32), reduce="sum")[1]["w"]) == 11.0


def test_replicas_that_differ_are_never_trusted() -> None:
    """flax#877: `is_fully_replicated` is True for unequal pieces."""
    mesh = jaxsync.make_mesh({"data": 4})
    pieces = [jax.device_put(jnp.float32(i), device) for i, device in enumerate(mesh.devices.flat)]
    w = jax.make_array_from_single_device_arrays((), jax.sharding.NamedSharding(mesh, P()), pieces)
    step = jaxsync.make_train_step(
        lambda p, x: p["w"] * x.mean(), optax.sgd(1.0), jaxsync.make_plan({"w": w}, mesh)
    )
    assert w.is_fully_replicated
    with pytest.raises(ReplicaMismatchError):
        step.init({"w": w})


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_compute_is_summed_in_float32(way: str) -> None:
    """jax#27496: gradients 256, 1, 1, 1 of a bfloat16 computation sum to 260."""
    loss_fn = lambda p, x: (p["w"].astype(jnp.bfloat16) * x.astype(jnp.bfloat16)).sum()  # noqa: E731
    _, grads = synced(way, loss_fn, np.array([256, 1, 1, 1], np.float32), reduce="sum")
    assert float(grads["w"]) == 259.0


def test_integer_gradients_of_a_float_leaf_are_refused() -> None:
    """Four int8 gradients of 100 sum to -112."""
    mesh = jaxsync.make_mesh({"data": 4})
    plan = jaxsync.make_plan(W, mesh)
    mapped = jax.shard_map(
        lambda x: jaxsync.sync_gradients({"w": x[0]}, plan), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    with pytest.raises(TreeMismatchError, match="has dtype int8; wanted float32"):
        mapped(jnp.full(4, 100, jnp.int8))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_five_microbatches_are_one_reduction_of_the_right_value(transform: Any) -> None:
    """xla#6750: the reduction stays inside the scan, and its value is 4 times too large."""
    rows = np.arange(120, dtype=np.float32).reshape(40, 3)
    mesh = jaxsync.make_mesh({"data": 4})
    params = {"w": np.zeros(3, np.float32)}
    plan = jaxsync.make_plan(params, mesh)
    step = jaxsync.make_train_step(
        lambda p, x: (x @ p["w"]).mean(), optax.sgd(1.0), plan, accumulate=5, transform=transform
    )
    state, _ = step(step.init(params), rows)
    np.testing.assert_array_equal(-np.asarray(state.params["w"]), [58.5, 59.5, 60.5])
    audit = jaxsync.audit(step, state, rows)
    assert [(c.kind, c.in_loop) for c in audit.collectives] == [("all-reduce", False)]


def test_a_hundred_small_leaves_are_one_collective_of_four_operands() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    params = [np.full((3, 2), i, np.float32) for i in range(100)]
    loss_fn = lambda p, x: sum((w**2 * x.mean()).sum() for w in p)  # noqa: E731
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), jaxsync.make_plan(params, mesh))
    state = step.init(params)
    [collective] = jaxsync.audit(step, state, np.ones(8, np.float32)).collectives
    assert collective.num_operands == 4  # the loss rides in one of them


def test_three_rows_over_four_devices_are_refused_and_not_run_on_three() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    for transform in ("shard_map", "pmap"):
        step = jaxsync.make_train_step(
            lambda p, x: p["w"] * x.mean(), optax.sgd(0.1), jaxsync.make_plan(W, mesh), transform=transform
        )
        with pytest.raises(jaxsync.errors.BatchError, match="3 rows are no multiple of 4"):
            step(step.init(W), np.ones(3, np.float32))


def test_a_sync_in_the_loss_and_another_outside_is_refused() -> None:
    """jax#19175: synced twice is multiplied twice."""
    mesh = jaxsync.make_mesh({"data": 4})
    plan = jaxsync.make_plan(W, mesh)

    def step(params: Any, x: jax.Array) -> Any:
        _, grads = jaxsync.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan)(params, x)
        return jaxsync.sync_gradients(grads, plan)

    with pytest.raises(AlreadyReducedError):
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(W, np.ones(4, np.float32))
