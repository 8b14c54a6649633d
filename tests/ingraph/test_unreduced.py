"""Gradients that JAX leaves unreduced on Explicit meshes: summed over microbatches, then over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import TreeMismatchError

RNG = np.random.default_rng(0)
PARAMS = {
    "w1": RNG.normal(size=(8, 6)).astype(np.float32),
    "w2": RNG.normal(size=(6, 3)).astype(np.float32),
    "b": RNG.normal(size=(3,)).astype(np.float32),
    "count": np.int32(3),
}
X = RNG.normal(size=(4, 16, 8)).astype(np.float32)  # four microbatches


def make_mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ params["w1"] @ params["w2"]) ** 2) + jnp.sum(params["b"] ** 2)


def truth() -> dict[str, np.ndarray]:
    """The gradient of the mean over microbatches, in float64 by hand."""
    w1, w2, b = (PARAMS[key].astype(np.float64) for key in ("w1", "w2", "b"))
    x = X.reshape(-1, 8).astype(np.float64)
    out = 2 * (x @ w1 @ w2) / (x.shape[0] * 3)
    return {"w1": x.T @ out @ w2.T, "w2": (x @ w1).T @ out, "b": 2 * b}


def gradients(plan: jaxsync.SyncPlan) -> Any:
    """A step under plain jit: unreduced gradients are the carry of a scan over microbatches."""
    unreduced = {"w1", "w2"}

    def run(params: Any, x: Any) -> Any:
        def use(key: str, p: Any) -> Any:
            return jax.reshard(p, P(reduced={"data"})) if key in unreduced else p

        local = {key: use(key, p) for key, p in params.items()}

        def one(x: Any) -> Any:
            grads = jax.grad(loss_fn, allow_int=True)(local, x)
            return {key: grads[key] for key in ("w1", "w2", "b")}

        def body(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, one(x)), None

        total, _ = jax.lax.scan(body, one(x[0]), x[1:])
        assert jax.typeof(total["w1"]).sharding.spec.unreduced == {"data"}
        total |= {"count": np.zeros((), jax.dtypes.float0)}
        synced = jaxsync.sync_unreduced(total, plan)
        return {key: synced[key] / jnp.float32(4) for key in ("w1", "w2", "b")}

    return run


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("specs", [P(), {"w1": P("data"), "w2": P(), "b": P(), "count": P()}], ids=str)
def test_microbatches_are_added_up_without_a_collective_and_summed_once(specs: Any, reduce: Any) -> None:
    mesh = make_mesh(data=8)
    config = jaxsync.SyncConfig(reduce=reduce)
    plan = jaxsync.make_plan(PARAMS, mesh, specs, config)
    params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), PARAMS, plan.specs)
    x = jax.device_put(X, NamedSharding(mesh, P(None, "data")))
    with jax.set_mesh(mesh):
        run = jax.jit(gradients(plan))
        grads = run(params, x)
        audit = jaxsync.audit(run, params, x)
    for key, want in truth().items():
        np.testing.assert_allclose(grads[key], want, rtol=1e-5, atol=1e-6)
        assert grads[key].sharding.is_equivalent_to(NamedSharding(mesh, plan.specs[key]), grads[key].ndim)
    assert audit.in_loop == ()
    assert audit.count("reduce-scatter") == plan.num_reduce_scatters
    assert audit.count("all-reduce") == 1


def test_complete_gradients_pass_through_untouched() -> None:
    mesh = make_mesh(data=8)
    plan = jaxsync.make_plan(PARAMS, mesh)
    grads = {key: jnp.asarray(p) for key, p in PARAMS.items()}
    assert jaxsync.sync_unreduced(grads, plan) is grads


def test_a_tree_that_is_not_the_plans_is_refused() -> None:
    plan = jaxsync.make_plan(PARAMS, make_mesh(data=8))
    with pytest.raises(TreeMismatchError, match=r"grads\['w1'\] is missing"):
        jaxsync.sync_unreduced({"w2": PARAMS["w2"], "b": PARAMS["b"], "count": None}, plan)
