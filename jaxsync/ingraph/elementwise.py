"""Does an optimizer treat all elements alike? Asked of its trace, not of its name.

An update whose every element depends on the same element of gradient, state and parameter alone (and on
scalars) gives the same numbers whatever shape the elements are kept in: several leaves in one flat array, or
a shard of one. So do sums and maxima over all elements of whole leaves, such as a global norm, but for the
order of summation. A trace is read with abstract values: what a value depends on, and by which expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec
from jax.tree_util import SequenceKey

from jaxsync.ingraph.packed import Layout, make_layout
from jaxsync.plan import SyncPlan

# Operations that compute each element of the result from the same element of the operands.
_ELEMENTWISE = frozenset(  # a list of words, read as one
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
# What an operation makes of known padding.
_ON_PADDING: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "add_any": operator.add,
    "and": operator.and_,
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "conj": lambda x: x,  # padding is real
    "imag": lambda x: 0.0 * x,
    "div": operator.truediv,
    "eq": operator.eq,
    "exp": math.exp,
    "ge": operator.ge,
    "gt": operator.gt,
    "is_finite": math.isfinite,
    "le": operator.le,
    "log": math.log,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "not": operator.not_,
    "or": operator.or_,
    "pow": operator.pow,
    "real": lambda x: x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "select_n": lambda which, *cases: cases[int(which)],
    "sign": lambda x: (x > 0) - (x < 0),
    "sqrt": math.sqrt,
    "square": lambda x: x * x,
    "sub": operator.sub,
    "tanh": math.tanh,
}
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

Pad = float | bool | None
Expr = int  # the number a Reader gave to an expression: equal numbers, equal expressions


@dataclass(frozen=True, slots=True)
class Same:
    """A scalar, or an array all of whose elements are one scalar."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Each:
    """An array whose elements each depend on the same element of these leaves, laid end to end.

    `pad`: what an element is where gradient and parameter are zero from the start; None if that is unknown.
    """

    leaves: tuple[int, ...]
    expr: Expr
    pad: Pad = None


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
    reader = _Reader()
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
    tx: Any, params: Any, groups: Sequence[tuple[int, ...]], reader: _Reader, *, is_padded: bool = False
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


class _Reader:
    """Evaluates jaxprs on abstract values, and numbers expressions."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Expr] = {}
        self._keys: list[tuple[Hashable, ...]] = []
        self._known: dict[Expr, Pad] = {}  # of Same values that were computed from constants
        self.is_padded = False

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
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return Mixed("a random key")
        array = np.asarray(x)
        flat = array.reshape(-1)
        if array.size and flat.tobytes() == flat[:1].tobytes() * array.size:
            value = flat[0].item()
            is_number = value == value  # NaN is not equal to itself, and no key
            return Same(self.number("constant", str(array.dtype), value if is_number else "nan"))
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
        pad = self._pad_after(name, eqn.params, values)
        each = {
            var.aval.shape: value
            for var, value in zip(eqn.invars, values, strict=True)
            if isinstance(value, Each)
        }
        if not each:
            self._known.update(dict.fromkeys(results, pad) if num == 1 else {})
            is_same = name in _ELEMENTWISE or all(var.aval.shape == () for var in eqn.outvars)
            return [Same(expr) if is_same else Mixed(name) for expr in results]
        of_leaves = {value.leaves for value in values if isinstance(value, Each)}
        if name == "concatenate":
            return [_concatenate([value for value in values if isinstance(value, Each)], len(values))]
        if len(of_leaves) > 1:
            return [Mixed(f"{name} of two leaves")] * num
        return [self._of_one_array(eqn, name, expr, each, pad) for expr in results]

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

    def _of_one_array(
        self, eqn: Any, name: str, expr: Expr, each: Mapping[tuple[int, ...], Each], pad: Pad
    ) -> Value:
        """The result of an operation on arrays of the same leaves, by their shapes, and on scalars."""
        [(shape, array), *others] = each.items()
        keeps_shape = not others and eqn.outvars[0].aval.shape == shape
        if keeps_shape and name in _ELEMENTWISE:
            return Each(array.leaves, expr, pad=pad)
        is_in_order = name == "squeeze" or (name == "reshape" and eqn.params.get("dimensions") is None)
        if is_in_order or (keeps_shape and name == "broadcast_in_dim"):
            return array
        if name in _REDUCTIONS and len(eqn.params["axes"]) == len(shape):
            if self.is_padded and not (name == "reduce_sum" and array.pad == 0):
                return Mixed(f"{name} over padding")
            return Total(_REDUCTIONS[name], frozenset((leaf, array.expr) for leaf in array.leaves))
        return Mixed(name)

    def pad_of(self, value: Value) -> Pad:
        """What it is where gradient and parameter are zero from the start, if that is known."""
        if isinstance(value, Each):
            return value.pad
        key = self._keys[value.expr] if isinstance(value, Same) else ()
        if len(key) == 3 and key[0] == "constant":
            return key[2] if isinstance(key[2], int | float) else 0.0 if key[2] == 0 else None
        return self._known.get(value.expr) if isinstance(value, Same) else None

    def _pad_after(self, name: str, params: Mapping[str, Any], values: Sequence[Value]) -> Pad:
        pads = [self.pad_of(value) for value in values]
        # A scalar that is not known here (a step size, a bias correction) is taken for finite and not zero.
        is_scalar = [isinstance(value, Same) and pad is None for value, pad in zip(values, pads, strict=True)]
        if name == "mul" and any(
            pad == 0 and scalar for pad, scalar in zip(pads, reversed(is_scalar), strict=True)
        ):
            return 0.0
        if name == "div" and pads[0] == 0 and is_scalar[1]:
            return 0.0
        if name == "integer_pow" and pads[0] is not None and params["y"] > 0:
            return float(pads[0] ** params["y"])
        if any(pad is None or isinstance(pad, complex) for pad in pads) or name not in _ON_PADDING:
            return None
        try:
            result: Any = _ON_PADDING[name](*pads)
        except ArithmeticError:
            return None
        except (ValueError, TypeError):  # no real number
            return None
        return result if isinstance(result, int | float) and math.isfinite(result) else None


def _concatenate(arrays: Sequence[Each], num_operands: int) -> Value:
    leaves = tuple(leaf for array in arrays for leaf in array.leaves)
    is_alike = len(arrays) == num_operands and len({array.expr for array in arrays}) == 1
    if is_alike and len(set(leaves)) == len(leaves):
        return Each(leaves, arrays[0].expr, pad=_common([array.pad for array in arrays]))
    return Mixed("concatenate")


def _common(pads: Sequence[Pad]) -> Pad:
    return pads[0] if all(pad == pads[0] for pad in pads) else None
