"""Gradients whose type says unreduced, as autodiff gives them under `jit` on Explicit meshes."""

from __future__ import annotations

from typing import Any

import jax

from jaxsync.ingraph.grads import reduce_leaves
from jaxsync.ingraph.match import match_tree
from jaxsync.plan import SyncPlan


def sync_unreduced(grads: Any, plan: SyncPlan) -> Any:
    """Gradients that JAX left unreduced over the data axes -> reduced, by bucket.

    For a step under plain `jit` on an Explicit mesh: parameters resharded to `P(reduced={"data"})` make
    autodiff leave the sum over devices out, so that gradients of microbatches are added up without a
    collective, and summed over devices here, once. The loss of such a step is that of the global batch, so
    the sum is its gradient and is never divided, whatever `config.reduce` says. Leaves whose type is not
    unreduced over a data axis are complete and pass through. JAX does not have unreduced types for every
    operation; its error names the one. In `shard_map` use `sync_gradients`.

    Args:
        grads: The tree the plan was made for, with global shapes.
        plan: From `make_plan`, with the Explicit mesh.

    Returns:
        The same structure, shapes and dtypes; what was reduced is sharded as its parameter's spec says.

    Collectives: one all-reduce, or reduce-scatter for parameters sharded over a data axis, a bucket; XLA
    makes one all-reduce of several.

    Raises:
        TreeMismatchError: The tree, a shape or a dtype is not the plan's.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    >>> params = jax.device_put({"w": jnp.ones((2, 1))}, NamedSharding(mesh, P()))
    >>> plan = jaxsync.make_plan(params, mesh)
    >>> @jax.jit
    ... def gradients(params, x):
    ...     local = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), params)
    ...     grads = jax.grad(lambda p: jnp.mean(x @ p["w"]))(local)
    ...     return jaxsync.sync_unreduced(grads, plan)
    >>> with jax.set_mesh(mesh):
    ...     gradients(params, jax.device_put(jnp.ones((16, 2)), P("data")))["w"].tolist()
    [[1.0], [1.0]]
    """
    leaves, rebuild = match_tree(grads, plan, "grads", is_whole=True)
    chosen = {
        i: value
        for i, (leaf, value) in enumerate(zip(plan.leaves, leaves, strict=True))
        if leaf.is_synced and jax.typeof(value).sharding.spec.unreduced
    }
    if not chosen:
        return grads

    def run(values: dict[int, Any]) -> dict[int, Any]:
        synced = reduce_leaves(plan, [values.get(i) for i in range(len(plan.leaves))], divisor=1)
        return {i: synced[i] for i in values}

    reduced = jax.shard_map(
        run,
        mesh=plan.mesh,
        in_specs=({i: jax.typeof(value).sharding.spec for i, value in chosen.items()},),
        out_specs={i: plan.leaves[i].spec for i in chosen},
    )(chosen)
    return rebuild([reduced.get(i, value) for i, value in enumerate(leaves)])
