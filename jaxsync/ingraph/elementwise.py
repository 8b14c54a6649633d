"""Does an optimizer treat all elements alike? Asked of its trace, not of its name.

An update whose every element depends on the same element of gradient, state and parameter alone (and on
scalars) gives the same numbers whatever shape the elements are kept in: several leaves in one flat array, or
a shard of one. So do sums and maxima over all elements of whole leaves, such as a global norm, but for the
order of summation. A trace is read with abstract values: what a value depends on, and by which expression.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxsync.ingraph.packed import Layout

# Operations that compute each element of the result from the same element of the operands.
_ELEMENTWISE = frozenset(  # a list of words, read as one
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
# Reductions, and the operation that joins those of two leaves with its neutral element.
_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
_NEUTRAL = {"add": 0, "and": True, "or": False}
_CALLS = frozenset(
    {"jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
)
# Parameters that say which shape results, and not what its elements are.
_SHAPE_PARAMS = frozenset({"shape", "broadcast_dimensions", "sharding", "new_sizes", "dimensions", "axes"})

Expr = int  # the number a Reader gave to an expression: equal numbers, equal expressions


@dataclass(frozen=True, slots=True)
class Same:
    """A scalar, or an array all of whose elements are one scalar."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Each:
    """An array whose elements each depend on the same element of these leaves, laid end to end."""

    leaves: tuple[int, ...]
    expr: Expr


@dataclass(frozen=True, slots=True)
class Total:
    """A scalar: a reduction over all elements of some leaves, given with the expression of each."""

    operation: str
    terms: frozenset[tuple[int, Expr]]


@dataclass(frozen=True, slots=True)
class Mixed:
    """Anything else; `operation` made it so."""

    operation: str


Value = Same | Each | Total | Mixed


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


def is_alike(tx: Any, layout: Layout) -> bool:
    """Whether `tx` gives the same numbers for a tree and for the tree packed as `layout` says.

    False also if `tx` cannot be traced for both, as when it looks at the structure of the tree; whoever then
    calls it with the tree gets its error, if there is one.
    """
    trained = [i for i, leaf in enumerate(layout.plan.leaves) if leaf.is_synced]
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.is_synced else None
        for leaf in layout.plan.leaves
    ]
    tree = jax.tree.unflatten(layout.plan.treedef, shapes)
    packed = jax.eval_shape(lambda tree: layout.pack(tree).without_rest(), tree)
    reader = _Reader()
    try:
        apart = read_optimizer(tx, tree, [(i,) for i in trained], reader)
        together = read_optimizer(tx, packed, layout.slots, reader)
    except Exception:  # whatever the optimizer raises
        return False
    if apart is None or together is None or apart.of_state != together.of_state:
        return False
    if any(not isinstance(value, Same) for value in apart.of_state.values()):
        return False
    of_leaves = {
        (place, i): Each((i,), value.expr) if isinstance(value, Each) else value
        for (place, slot), value in together.of_leaves.items()
        for i in slot
    }
    one_by_one = {(place, i): value for (place, (i,)), value in apart.of_leaves.items()}
    is_known = all(isinstance(value, Same | Each) for value in of_leaves.values())
    return is_known and of_leaves == one_by_one


def read_optimizer(
    tx: Any, params: Any, groups: Sequence[tuple[int, ...]], reader: _Reader | None = None
) -> Reading | None:
    """What `tx.init` and `tx.update` do, from their traces.

    Args:
        tx: An optimizer of the optax protocol.
        params: A tree of `ShapeDtypeStruct`s.
        groups: Which leaves of the plan each leaf of `params` holds.
        reader: Numbers expressions; one for readings that are compared.

    Returns:
        None if the state or the updates do not keep the structure that `params` and the state have.
    """
    reader = reader or _Reader()
    init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    update, (updates, after) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    if _types(after) != _types(state) or _types(updates) != _types(params):
        return None
    places = _locate(state, params)

    def inputs(name: str) -> list[Value]:
        return [Each(group, reader.number("input", name)) for group in groups]

    held: list[Value] = [
        Same(reader.number("state", place)) if k is None else Each(groups[k], reader.number("state", place))
        for place, k in places
    ]
    first = reader.run(init, inputs("params"))
    results = reader.run(update, [*inputs("grads"), *held, *inputs("params")])
    new_updates, then = results[: len(groups)], results[len(groups) :]
    reading = Reading(
        of_leaves={("updates", g): x for g, x in zip(groups, new_updates, strict=True)}, of_state={}
    )
    for when, values in (("init", first), ("update", then)):
        for (place, k), value in zip(places, values, strict=True):
            if k is None:
                reading.of_state[when + place] = value
            else:
                reading.of_leaves[when + place, groups[k]] = value
    return reading


def _locate(state: Any, params: Any) -> list[tuple[str, int | None]]:
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


def _types(tree: Any) -> list[tuple[Any, ...]]:
    return [(path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


class _Reader:
    """Evaluates jaxprs on abstract values, and numbers expressions."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Expr] = {}
        self._keys: list[tuple[Hashable, ...]] = []

    def number(self, *key: Hashable) -> Expr:
        """The number of an expression."""
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def run(self, closed: core.ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """The values of a jaxpr's results."""
        known: dict[Any, Value] = dict(zip(closed.jaxpr.invars, values, strict=True))
        known |= {
            var: self._constant(x) for var, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        }

        def read(atom: Any) -> Value:
            return self._constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for eqn in closed.jaxpr.eqns:
            results = self._apply(eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [self._settle(read(atom)) for atom in closed.jaxpr.outvars]

    def _constant(self, x: Any) -> Value:
        array = np.asarray(x)
        flat = array.reshape(-1)
        if array.size and (flat == flat[0]).all():
            return Same(self.number("constant", str(array.dtype), flat[0].item()))
        return Mixed("an array of constants")

    def _settle(self, value: Value) -> Value:
        """A total to which nothing more is joined is a scalar like any other."""
        if isinstance(value, Total):
            return Same(self.number("total", value.operation, value.terms))
        return value

    def _apply(self, eqn: Any, values: list[Value]) -> list[Value]:
        name, num = eqn.primitive.name, len(eqn.outvars)
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in _CALLS and isinstance(inner, core.ClosedJaxpr):
            return self.run(inner, values)
        if (joined := self._join(name, values)) is not None:
            return [joined]
        values = [self._settle(value) for value in values]
        if mixed := [value for value in values if isinstance(value, Mixed)]:
            return [mixed[0]] * num
        params = str({key: value for key, value in eqn.params.items() if key not in _SHAPE_PARAMS})
        operands = tuple(value.expr for value in values if isinstance(value, Same | Each))
        if name == "broadcast_in_dim" and isinstance(values[0], Same):
            return values[:1]  # the same elements, more of them
        results = [self.number(name, params, operands, k) for k in range(num)]
        each = {
            var.aval.shape: value
            for var, value in zip(eqn.invars, values, strict=True)
            if isinstance(value, Each)
        }
        if not each:
            is_same = name in _ELEMENTWISE or all(var.aval.shape == () for var in eqn.outvars)
            return [Same(expr) if is_same else Mixed(name) for expr in results]
        of_leaves = {value.leaves for value in values if isinstance(value, Each)}
        if name == "concatenate":
            return [_concatenate([value for value in values if isinstance(value, Each)], len(values))]
        if len(of_leaves) > 1:
            return [Mixed(f"{name} of two leaves")] * num
        return [_of_one_array(eqn, name, expr, each) for expr in results]

    def _join(self, name: str, values: Sequence[Value]) -> Value | None:
        """The total of two totals, or of one and the neutral element."""
        totals = [value for value in values if isinstance(value, Total) and value.operation == name]
        if len(values) != 2 or not totals:
            return None
        if len(totals) == 2:
            a, b = totals
            is_apart = not {leaf for leaf, _ in a.terms} & {leaf for leaf, _ in b.terms}
            return Total(name, a.terms | b.terms) if is_apart else None
        other = next(value for value in values if value is not totals[0])
        key = self._keys[other.expr] if isinstance(other, Same) else ()
        is_neutral = len(key) == 3 and key[0] == "constant" and name in _NEUTRAL and key[2] == _NEUTRAL[name]
        return totals[0] if is_neutral else None


def _concatenate(arrays: Sequence[Each], num_operands: int) -> Value:
    leaves = tuple(leaf for array in arrays for leaf in array.leaves)
    is_alike = len(arrays) == num_operands and len({array.expr for array in arrays}) == 1
    if is_alike and len(set(leaves)) == len(leaves):
        return Each(leaves, arrays[0].expr)
    return Mixed("concatenate")


def _of_one_array(eqn: Any, name: str, expr: Expr, each: Mapping[tuple[int, ...], Each]) -> Value:
    """The result of an operation on arrays of the same leaves, by their shapes, and on scalars."""
    [(shape, array), *others] = each.items()
    keeps_shape = not others and eqn.outvars[0].aval.shape == shape
    if keeps_shape and name in _ELEMENTWISE:
        return Each(array.leaves, expr)
    if name in ("reshape", "squeeze") or (keeps_shape and name == "broadcast_in_dim"):
        return array
    if name in _REDUCTIONS and len(eqn.params["axes"]) == len(shape):
        return Total(_REDUCTIONS[name], frozenset((leaf, array.expr) for leaf in array.leaves))
    return Mixed(name)
