"""Does an optimizer treat all elements alike? Asked of its trace, not of its name.

An update whose every element depends on the same element of gradient, state and parameter alone (and on
scalars) gives the same numbers whatever shape the elements are kept in: several leaves in one flat array, or
a shard of one. So do sums and maxima over all elements of whole leaves, such as a global norm, but for the
order of summation. A trace is read with abstract values: what a value depends on, and by which expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import SequenceKey

from jaxsync.ingraph.packed import Layout, make_layout
from jaxsync.ingraph.reader import Each, Mixed, Reader, Same, Value
from jaxsync.plan import SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an optimizer's trace says.

    Attributes:
        of_leaves: (place, group) -> value, for results that are shaped like a parameter: `place` is
            `"updates"` or where in the state, `group` the leaves that the parameter holds.
        of_state: Place -> value, for everything else in the state.
    """

    of_leaves: dict[tuple[str, tuple[int, ...]], Value]
    of_state: dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an optimizer does not do the same for a tree and for another form of it.

    Attributes:
        place: `"updates"`, or where in the state.
        leaf: Index of the leaf in the plan; None if it belongs to no leaf.
        reason: Why: an operation, or a sentence.
    """

    place: str
    leaf: int | None
    reason: str


def is_alike(tx: Any, layout: Layout) -> bool:
    """Whether `tx` gives the same numbers for a tree and for the tree packed as `layout` says.

    False also if `tx` cannot be traced for both, as when it looks at the structure of the tree; whoever then
    calls it with the tree gets its error, if there is one.
    """
    tree = trained_shapes(layout.plan)
    packed = jax.eval_shape(lambda tree: layout.pack(tree).without_rest(), tree)
    try:
        return not find_differences(tx, layout.plan, tree, packed, layout.slots)
    except Exception:  # whatever the optimizer raises
        return False


def choose_layout(tx: Any, plan: SyncPlan) -> Layout:
    """How a step with this optimizer keeps parameters: fused, if that gives the same numbers."""
    fused = make_layout(plan)
    return fused if fused.is_fused and is_alike(tx, fused) else make_layout(plan, fuse=False)


def trained_shapes(plan: SyncPlan) -> Any:
    """The tree of the plan as shapes, with None for what is not trained."""
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.is_synced else None for leaf in plan.leaves
    ]
    return jax.tree.unflatten(plan.treedef, shapes)


def find_differences(
    tx: Any,
    plan: SyncPlan,
    tree: Any,
    other: Any,
    slots: Sequence[tuple[int, ...]],
    *,
    is_padded: bool = False,
) -> list[Difference]:
    """Where `tx` does not give the same numbers for `tree` and for `other`, by their traces.

    Args:
        tx: An optimizer of the optax protocol.
        plan: The plan.
        tree: Shapes of the trained leaves, as `trained_shapes` has them.
        other: Shapes of the same parameters in another form.
        slots: Which leaves each leaf of `other` holds.
        is_padded: Whether arrays of `other` may end in zeros that belong to no leaf.

    Raises:
        Exception: What `tx` raises.
    """
    reader = Reader()
    singles = [(i,) for i, leaf in enumerate(plan.leaves) if leaf.is_synced]
    apart = read_optimizer(tx, tree, singles, reader)
    together = read_optimizer(tx, other, slots, reader, is_padded=is_padded)
    if apart is None or together is None:
        return [
            Difference(place="updates", leaf=None, reason="the state or the updates change their structure")
        ]
    found = _compare_leaves(apart, together)
    for place in sorted(apart.of_state.keys() | together.of_state.keys()):
        value, then = apart.of_state.get(place), together.of_state.get(place)
        if value != then or not isinstance(value, Same):
            found.append(Difference(place=place, leaf=None, reason=_reason(value, then)))
    return found


def _compare_leaves(apart: Reading, together: Reading) -> list[Difference]:
    others = {(place, i): (slot, x) for (place, slot), x in together.of_leaves.items() for i in slot}
    found = []
    for (place, (i,)), value in apart.of_leaves.items():
        slot, other = others.pop((place, i), ((), None))
        match value, other:
            case Same(expr), Same(same):
                is_equal = expr == same
            case Each((leaf,), expr), Each(leaves, same):  # of its own leaf, and not of another's
                is_equal = expr == same and leaf == i and leaves == slot
            case _:
                is_equal = False
        if not is_equal:
            found.append(Difference(place=place, leaf=i, reason=_reason(value, other)))
    return found + [Difference(place=place, leaf=i, reason=_reason(None, None)) for place, i in others]


def _reason(value: Value | None, other: Value | None) -> str:
    for candidate in (value, other):
        if isinstance(candidate, Mixed):
            return candidate.operation
    return "depends on the shape or the name of the array"


def read_optimizer(
    tx: Any, params: Any, groups: Sequence[tuple[int, ...]], reader: Reader, *, is_padded: bool = False
) -> Reading | None:
    """What `tx.init` and `tx.update` do, from their traces.

    Args:
        tx: An optimizer of the optax protocol.
        params: A tree of `ShapeDtypeStruct`s.
        groups: Which leaves of the plan each leaf of `params` holds.
        reader: Numbers expressions; one for readings that are compared.
        is_padded: Whether an array may end in zeros that no reduction must see.

    Returns:
        None if the state or the updates do not keep the structure that `params` and the state have.
    """
    init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    update, (updates, after) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    if _types(after) != _types(state) or _types(updates) != _types(params):
        return None
    places = _locate_marked(tx, params, state)
    reader.is_padded = is_padded

    def inputs(name: str) -> list[Value]:
        return [Each(group, reader.number("input", name), pad=0.0) for group in groups]

    first = reader.run(init, inputs("params"))
    pads = [reader.pad_of(value) for value in first]
    while True:
        held: list[Value] = [
            Same(reader.number("state", place))
            if k is None
            else Each(groups[k], reader.number("state", place), pad=pad)
            for (place, k), pad in zip(places, pads, strict=True)
        ]
        results = reader.run(update, [*inputs("grads"), *held, *inputs("params")])
        then = [reader.pad_of(value) for value in results[len(groups) :]]
        if all(pad is None or pad == new for pad, new in zip(pads, then, strict=True)):
            break
        # What does not stay as it was is unknown.
        pads = [pad if pad == new else None for pad, new in zip(pads, then, strict=True)]
    return _make_reading(groups, places, first, results)


def _make_reading(
    groups: Sequence[tuple[int, ...]],
    places: Sequence[tuple[str, int | None]],
    first: Sequence[Value],
    results: Sequence[Value],
) -> Reading:
    updates, then = results[: len(groups)], results[len(groups) :]
    reading = Reading(
        of_leaves={("updates", group): x for group, x in zip(groups, updates, strict=True)}, of_state={}
    )
    for when, values in (("init", first), ("update", then)):
        for (place, k), value in zip(places, values, strict=True):
            if k is None:
                reading.of_state[when + place] = value
            else:
                reading.of_leaves[when + place, groups[k]] = value
    return reading


def locate(state: Any, params: Any) -> list[tuple[str, int | None]]:
    """For each leaf of the state: its place, and which parameter it belongs to, if it is shaped like one.

    Optimizers keep trees like the parameters, so that the path of such a leaf ends in its parameter's.
    """
    known = {path: (k, x.shape) for k, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    places: list[tuple[str, int | None]] = []
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        ends = ((start, known[path[start:]]) for start in range(len(path) + 1) if path[start:] in known)
        start, (k, shape) = next(ends, (0, (None, None)))
        is_like = k is not None and shape == x.shape
        places.append((jax.tree_util.keystr(path[:start] if is_like else path), k if is_like else None))
    return places


def state_specs(state: Any, params: Any, specs: Sequence[PartitionSpec]) -> Any:
    """How the leaves of a state are sharded: like the parameter they belong to, or not at all.

    Args:
        state: The state of an optimizer, as shapes.
        params: What the optimizer was given, as shapes.
        specs: The spec of each leaf of `params`.
    """
    own = [PartitionSpec() if k is None else specs[k] for _, k in locate(state, params)]
    return jax.tree.unflatten(jax.tree.structure(state), own)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """A leaf with its number, which no other part of a state has."""

    leaf: Any
    number: int

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], int]:
        return ((SequenceKey(-1 - self.number), self.leaf),), self.number

    def tree_flatten(self) -> tuple[tuple[Any, ...], int]:
        return (self.leaf,), self.number

    @classmethod
    def tree_unflatten(cls, number: int, children: Sequence[Any]) -> _Marked:
        return cls(children[0], number)


def _locate_marked(tx: Any, params: Any, state: Any) -> list[tuple[str, int | None]]:
    """As `locate`; but a scalar is not taken for a parameter that is called the same."""
    with_path = jax.tree_util.tree_leaves_with_path(params)
    marked = jax.tree.unflatten(
        jax.tree.structure(params), [_Marked(leaf, k) for k, (_, leaf) in enumerate(with_path)]
    )
    try:
        found = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, marked))
    except Exception:  # whatever it makes of a tree with other nodes
        return locate(state, params)
    if [x.shape for _, x in found] != [x.shape for x in jax.tree.leaves(state)]:
        return locate(state, params)
    places: list[tuple[str, int | None]] = []
    for path, x in found:
        marks = [(at, -1 - key.idx) for at, key in enumerate(path) if getattr(key, "idx", 0) < 0]
        at, k = marks[0] if marks else (len(path), None)
        own, leaf = with_path[k] if k is not None else ((), None)
        is_like = leaf is not None and leaf.shape == x.shape and path[at - len(own) : at] == own
        places.append(
            (jax.tree_util.keystr(path[: at - len(own)] if is_like else path), k if is_like else None)
        )
    return places


def _types(tree: Any) -> list[tuple[Any, ...]]:
    return [(path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
