"""Parameters for use: whole along the data axes, gathered from the parts that the devices hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxsync.ingraph.axes import make_varying
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.shards import all_gather, spec_cuts
from jaxsync.plan import SyncPlan


def gather_params(params: Any, plan: SyncPlan) -> Any:
    """Parameters as `local_gradients` takes them: whole along the data axes, from what each device holds.

    With `reshard_after_forward` they are returned as they are: they are gathered where they are used.

    Collectives: those of `gather_leaves`, or none.
    """
    if plan.config.reshard_after_forward or not spec_cuts(plan):
        return params
    leaves, rebuild = match_tree(params, plan, "params")
    return rebuild(gather_leaves(leaves, plan))


def gather_leaves(held: Sequence[Any], plan: SyncPlan) -> list[Any]:
    """The leaves in plan order, whole along the data axes.

    Collectives: one all-gather for each bucket of leaves that are sharded over a data axis.
    """
    cut_of = {cut.slot[0]: cut for cut in spec_cuts(plan)}
    leaves = list(held)
    for bucket in plan.buckets:
        own = [i for i in bucket.leaves if i in cut_of]
        if own:
            whole = all_gather([leaves[i] for i in own], [cut_of[i] for i in own])
            for i, leaf in zip(own, whole, strict=True):
                leaves[i] = leaf
    return leaves


def regather(
    backward: Any, whole: Sequence[Any], held: Sequence[Any], plan: SyncPlan, after: jax.Array
) -> Any:
    """A function of `jax.vjp` that gathers the parameters anew instead of keeping them.

    Such a function is a pytree of what the forward pass saved. A parameter that was saved as it is (by a
    product, a layer under `jax.checkpoint`, a scan) is replaced by one that is gathered once `after` is
    there, so that nothing holds the first one in between. What was computed from a parameter and saved, such
    as a cast, is kept.

    Args:
        backward: The function.
        whole: The leaves as the forward pass used them.
        held: The leaves as this device holds them.
        plan: The plan.
        after: A result of the forward pass.

    Collectives: those of `gather_leaves`, for the leaves that the backward pass needs.
    """
    cuts = spec_cuts(plan)
    again = list(held)
    parts = [held[cut.slot[0]] for cut in cuts]
    # Without the barrier XLA would find that both gathers are one, and keep its result. On CPU it drops
    # barriers early and does just that: the numbers are the same, the memory is not saved (0.10.2, 0.12.0).
    parts, _ = lax.optimization_barrier((parts, after))
    for cut, part in zip(cuts, parts, strict=True):
        again[cut.slot[0]] = part
    again = make_varying(gather_leaves(again, plan), plan.data_axes)
    fresh = {id(whole[cut.slot[0]]): again[cut.slot[0]] for cut in cuts}
    saved, treedef = jax.tree.flatten(backward)
    return jax.tree.unflatten(treedef, [fresh.get(id(value), value) for value in saved])
