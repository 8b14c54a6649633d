"""Where a tree of specs is no prefix of the tree of parameters, in words: the lines of an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
from jax.sharding import PartitionSpec

Misplaced = tuple[str, str, str, str]  # path, shape, spec, reason: as `SpecError` has them


def is_spec(node: Any) -> TypeGuard[PartitionSpec | None]:
    """Whether it says how all below it is sharded: a spec, or None for `PartitionSpec()`."""
    return node is None or isinstance(node, PartitionSpec)


def misplaced_specs(specs: Any, params: Any) -> tuple[Misplaced, ...]:
    """The first node on each path at which `specs` is no prefix of `params`.

    >>> for path, *_, reason in misplaced_specs({"w": [PartitionSpec()]}, {"w": (1.0,), "b": 2.0}):
    ...     print(path, reason)
    ['b'] specs has nothing for it
    ['w'] specs has a list where the parameters have a tuple
    """
    return tuple(_walk(specs, params, ()))


def _walk(specs: Any, params: Any, path: tuple[Any, ...]) -> Iterator[Misplaced]:
    if is_spec(specs) or jax.tree_util.all_leaves([specs]):  # stands for all below
        return
    if reason := _node_problem(specs, params):
        yield jax.tree_util.keystr(path), "", "", reason
        return
    mine, theirs = _children(specs), _children(params)
    for key, child in theirs.items():
        place = (*path, key)
        if key in mine:
            yield from _walk(mine[key], child, place)
        else:
            yield jax.tree_util.keystr(place), _shape(child), "no spec", "specs has nothing for it"
    for key, spec in mine.items():
        if key not in theirs:
            reason = "specs has it, and the parameters have nothing there"
            yield jax.tree_util.keystr((*path, key)), "", repr(spec) if is_spec(spec) else "", reason


def _node_problem(specs: Any, params: Any) -> str:
    """How two nodes differ in themselves, whatever they hold."""
    if type(specs) is not type(params):
        mine, theirs = _name(specs), _name(params)
        if mine == theirs:
            mine, theirs = (
                f"{name} of {type(x).__module__}" for name, x in ((mine, specs), (theirs, params))
            )
        return f"specs has {mine} where the parameters have {theirs}"
    has_same_keys = _children(specs).keys() == _children(params).keys()
    if has_same_keys and _structure(specs) != _structure(params):
        return f"specs has {_name(specs)} whose static parts, or their order, are not those of the parameters"
    return ""


def _children(node: Any) -> dict[Any, Any]:
    """Key -> what a node holds; of None and {} too, which hold nothing."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {key: child for (key,), child in found}


def _structure(node: Any) -> jax.tree_util.PyTreeDef:
    return jax.tree.structure(node, is_leaf=lambda x: x is not node)


def _shape(node: Any) -> str:
    return str(tuple(node.shape)) if hasattr(node, "shape") and hasattr(node, "dtype") else ""


def _name(node: Any) -> str:
    if node is None:
        return "None"
    if jax.tree_util.all_leaves([node]):
        return "a leaf"
    name = type(node).__name__
    # An abbreviation is read letter by letter: an NT, a UNet.
    is_abbreviation = name[:1].isupper() and not name[1:2].islower()
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_abbreviation else 'AEIOaeiou') else 'a'} {name}"
