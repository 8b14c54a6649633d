"""How one array differs from another, in words: by which factor, and which number that is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.inexact[Any]]  # float64 or complex128


def describe_difference(
    got: Values, want: Values, *, rtol: float, atol: float, axes: Mapping[str, int]
) -> str | None:
    """How `got` differs from `want`; None if it does not.

    Args:
        got: The values.
        want: The true values, of the same shape.
        rtol: What may differ, as a part of the largest true value: single elements may be small by
            cancellation, and then differ by more than their own size.
        atol: What may differ in any case.
        axes: The sizes of mesh axes, which a wrong factor is compared with.

    >>> describe_difference(np.array([4.0, 8.0]), np.array([1.0, 2.0]), rtol=1e-4, atol=0.0, axes={"data": 4})
    'ratio 4 = the number of devices (data=4): reduced twice, or a sum where the mean is meant'
    >>> describe_difference(np.array([1.0, 3.0]), np.array([1.0, 2.0]), rtol=1e-4, atol=0.0, axes={})
    '1 of 2 elements differ, ratios from 1 to 1.5'
    """
    got, want = got.ravel(), want.ravel()
    has_value, should_have = np.isfinite(got), np.isfinite(want)
    if (has_value != should_have).any():
        return _describe_nonfinite(got, want)
    got, want = got[has_value], want[has_value]
    scale = float(np.abs(want).max(initial=0.0))
    tolerance = rtol * scale + atol
    differs = np.abs(got - want) > tolerance
    if not differs.any():
        return None
    if scale <= atol:
        return "not zero, where one device computes zero"
    ratio = _common_ratio(got, want)
    if np.abs(got - ratio * want).max() <= tolerance * max(abs(ratio), 1.0):
        return f"ratio {ratio:.4g}{_explain(ratio, axes, rtol)}"
    return f"{int(differs.sum())} of {differs.size} elements differ{_range(got, want, tolerance)}"


def common_ratio(got: Values, want: Values) -> float:
    """The factor that brings `want` closest to `got`; NaN if there is none.

    >>> common_ratio(np.array([4.0, 8.0]), np.array([1.0, 2.0]))
    4.0
    """
    is_usable = np.isfinite(got).all() and np.isfinite(want).all() and want.any()
    return _common_ratio(got.ravel(), want.ravel()) if is_usable else math.nan


def _common_ratio(got: Values, want: Values) -> float:
    return float(np.vdot(want, got).real / np.vdot(want, want).real)


def _range(got: Values, want: Values, tolerance: float) -> str:
    is_large = np.abs(want) > tolerance  # the ratio of two roundings says nothing
    if not is_large.any() or np.iscomplexobj(want):
        return ""
    ratios = got[is_large] / want[is_large]
    return f", ratios from {ratios.min():.4g} to {ratios.max():.4g}"


def _describe_nonfinite(got: Values, want: Values) -> str:
    bad, truly_bad = int((~np.isfinite(got)).sum()), int((~np.isfinite(want)).sum())
    return f"{bad} of {got.size} elements are NaN or infinite; on one device {truly_bad or 'none'}"


def _explain(ratio: float, axes: Mapping[str, int], rtol: float) -> str:
    """What a factor that all elements share says."""
    close = max(rtol, 1e-6)
    if abs(ratio) <= close:
        return ": nothing of it arrives"
    for name, number in _known_numbers(axes):
        if math.isclose(ratio, number, rel_tol=close):
            return f" = {name}: reduced twice, or a sum where the mean is meant"
        if math.isclose(ratio, 1 / number, rel_tol=close):
            return f" = 1 / {name}: averaged twice, or the mean where a sum is meant"
        if math.isclose(ratio, number**2, rel_tol=close):
            return f" = the square of {name}: reduced three times"
    if math.isclose(ratio, -1.0, rel_tol=close):
        return ": the sign is turned"
    return ", in all elements alike: another weight, such as of rows that are masked out, or of microbatches"


def _known_numbers(axes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The numbers of devices along axes, and of all, with what they are."""
    large = {name: size for name, size in axes.items() if size > 1}
    found = []
    for count in range(1, len(large) + 1):
        for names in itertools.combinations(large, count):
            sizes = ", ".join(f"{name}={large[name]}" for name in names)
            along = "devices" if count == len(large) else f"devices along {', '.join(map(repr, names))}"
            found.append((f"the number of {along} ({sizes})", math.prod(large[name] for name in names)))
    return found
