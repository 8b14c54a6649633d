"""Reads a trace with abstract values: what each value depends on, and by which expression."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxsync.ingraph.primitives import (
    CALLS,
    ELEMENTWISE,
    NEUTRAL,
    REDUCTIONS,
    SHAPE_PARAMS,
    Pad,
    pad_after,
)

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


class Reader:
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
        name = eqn.primitive.name
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in CALLS and isinstance(inner, core.ClosedJaxpr):
            return self.run(inner, values)
        if (joined := self._join(name, values)) is not None:
            return [joined]
        values = [self._settle(value) for value in values]
        if mixed := [value for value in values if isinstance(value, Mixed)]:
            return [mixed[0]] * len(eqn.outvars)
        return self._compute(eqn, name, values)

    def _compute(self, eqn: Any, name: str, values: list[Value]) -> list[Value]:
        """The results of one operation on values that are each a scalar's or one array's."""
        num = len(eqn.outvars)
        params = str({key: value for key, value in eqn.params.items() if key not in SHAPE_PARAMS})
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
            is_same = name in ELEMENTWISE or all(var.aval.shape == () for var in eqn.outvars)
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
        is_neutral = len(key) == 3 and key[0] == "constant" and name in NEUTRAL and key[2] == NEUTRAL[name]
        return totals[0] if is_neutral else None

    def _of_one_array(
        self, eqn: Any, name: str, expr: Expr, each: Mapping[tuple[int, ...], Each], pad: Pad
    ) -> Value:
        """The result of an operation on arrays of the same leaves, by their shapes, and on scalars."""
        [(shape, array), *others] = each.items()
        keeps_shape = not others and eqn.outvars[0].aval.shape == shape
        if keeps_shape and name in ELEMENTWISE:
            return Each(array.leaves, expr, pad=pad)
        is_in_order = name == "squeeze" or (name == "reshape" and eqn.params.get("dimensions") is None)
        if is_in_order or (keeps_shape and name == "broadcast_in_dim"):
            return array
        if name in REDUCTIONS and len(eqn.params["axes"]) == len(shape):
            if self.is_padded and not (name == "reduce_sum" and array.pad == 0):
                return Mixed(f"{name} over padding")
            return Total(REDUCTIONS[name], frozenset((leaf, array.expr) for leaf in array.leaves))
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
        is_scalar = [isinstance(value, Same) and pad is None for value, pad in zip(values, pads, strict=True)]
        return pad_after(name, params, pads, is_scalar)


def _concatenate(arrays: Sequence[Each], num_operands: int) -> Value:
    leaves = tuple(leaf for array in arrays for leaf in array.leaves)
    is_alike = len(arrays) == num_operands and len({array.expr for array in arrays}) == 1
    if is_alike and len(set(leaves)) == len(leaves):
        return Each(leaves, arrays[0].expr, pad=_common([array.pad for array in arrays]))
    return Mixed("concatenate")


def _common(pads: Sequence[Pad]) -> Pad:
    return pads[0] if all(pad == pads[0] for pad in pads) else None
