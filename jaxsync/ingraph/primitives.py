"""What the primitives of JAX do to the elements of an array, and to padding behind them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The value of padding; None if that is unknown.
Pad = float | bool | None

# Operations that compute each element of the result from the same element of the operands.
ELEMENTWISE = frozenset(  # a list of words, read as one
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
REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
NEUTRAL = {"add": 0, "and": True, "or": False}
CALLS = frozenset(
    {"jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
)
# Parameters that say which shape results, and not what its elements are.
SHAPE_PARAMS = frozenset({"shape", "broadcast_dimensions", "sharding", "new_sizes", "dimensions", "axes"})


def pad_after(name: str, params: Mapping[str, Any], pads: Sequence[Pad], is_scalar: Sequence[bool]) -> Pad:
    """What an operation makes of padding, if that is known.

    Args:
        name: Of the primitive.
        params: Its parameters.
        pads: The padding of each operand, or its value, if it is a scalar that is known.
        is_scalar: Which operands are scalars that are not known.

    >>> pad_after("sqrt", {}, [4.0], [False])
    2.0
    """
    # A scalar that is not known here (a step size, a bias correction) is taken for finite and not zero.
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
