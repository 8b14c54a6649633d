"""Lining a tree up with the plan it should fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsync.errors import TreeMismatchError
from jaxsync.ingraph.axes import is_bound
from jaxsync.mesh import axis_sizes
from jaxsync.mismatch import leaf_problems, path_problems
from jaxsync.params import Leaf, local_shape
from jaxsync.plan import SyncPlan

Rebuild = Callable[[Sequence[Any]], Any]


def match_tree(tree: Any, plan: SyncPlan, name: str, *, is_whole: bool = False) -> tuple[list[Any], Rebuild]:
    """The leaves of `tree` in plan order, and the way back to its own structure.

    A leaf that passes through may be missing (None) in the tree, or be of any dtype (float0). With `is_whole`
    leaves are whole along the data axes, as local gradients are.

    Raises:
        TreeMismatchError: A synced leaf is missing, unknown, or has another shape or dtype.
    """
    flat, treedef = jax.tree.flatten(tree)
    if treedef == plan.treedef:
        order = list(range(len(flat)))
    else:
        order, flat = _order_by_path(tree, plan, name)
    leaves: list[Any] = [None] * len(plan.leaves)
    for index, value in zip(order, flat, strict=True):
        leaves[index] = value
    _check_leaves(leaves, plan, name, is_whole)
    synced = [
        jnp.asarray(value) if leaf.is_synced else value
        for leaf, value in zip(plan.leaves, leaves, strict=True)
    ]

    def rebuild(values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, [values[index] for index in order])

    return synced, rebuild


def _order_by_path(tree: Any, plan: SyncPlan, name: str) -> tuple[list[int], list[Any]]:
    index_of = {leaf.path: index for index, leaf in enumerate(plan.leaves)}
    with_path = jax.tree_util.tree_leaves_with_path(tree)
    values = {jax.tree_util.keystr(path): value for path, value in with_path}
    synced = [leaf.path for leaf in plan.leaves if leaf.is_synced]
    wrong = path_problems(values, synced, owner="the plan", optional=index_of)
    problems = [f"{name}{path} {problem}" for path, problem in wrong.items()]
    if not problems and len(values) != len(with_path):
        problems.append(f"{name} has two leaves of one path")
    if problems:
        raise TreeMismatchError(problems=tuple(problems))
    return [index_of[path] for path in values], list(values.values())


def _check_leaves(leaves: Sequence[Any], plan: SyncPlan, name: str, is_whole: bool) -> None:
    problems = [
        f"{name}{leaf.path} {problem}"
        for leaf, value in zip(plan.leaves, leaves, strict=True)
        if leaf.is_synced
        for problem in _problems(leaf, value, plan, is_whole)
    ]
    if problems:
        raise TreeMismatchError(problems=tuple(problems))


def _problems(leaf: Leaf, value: Any, plan: SyncPlan, is_whole: bool) -> list[str]:
    shapes = _shapes_here(leaf, plan, is_whole)
    shape = shapes[-1] if getattr(value, "shape", None) == shapes[-1] else shapes[0]
    return leaf_problems(value, shape, leaf.dtype, is_converted=True)


def _shapes_here(leaf: Leaf, plan: SyncPlan, is_whole: bool) -> list[tuple[int, ...]]:
    """The shard over the axes that are manual here; or over all, as when pmap runs one model column."""
    if not leaf.spec_axes:
        return [leaf.shape]
    whole = leaf.scatter_axes if is_whole else ()
    bound = [axis for axis in leaf.spec_axes if is_bound(axis) and axis not in whole]
    here = local_shape(leaf.shape, leaf.spec, axis_sizes(plan.mesh), bound)
    return list(dict.fromkeys([here, leaf.whole_shape if is_whole else leaf.local_shape]))
