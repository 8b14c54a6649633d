"""A line chart: one value over steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from jaxsync.report import svg
from jaxsync.report.markup import Markup, element

_WIDTH, _HEIGHT = 760.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 26.0, 34.0
_MAX_PARTS = 500  # of the x axis, with three points each: more are less than a pixel apart
_MAX_DOTS = 40
_LARGEST = sys.float_info.max

Point = tuple[float, float]


def draw_line(points: Sequence[Point], *, title: str, x_label: str = "step") -> str:
    """An SVG picture of a value over x. Where it is not finite, the line is broken and the place is marked.

    Args:
        points: (x, value), x ascending.
        title: What the value is.
        x_label: What x is.

    >>> "not finite at step 2" in draw_line([(1, 0.5), (2, float("nan")), (3, 0.25)], title="loss")
    True
    """
    finite = [point for point in points if math.isfinite(point[1])]
    xs = nice_ticks(points[0][0], points[-1][0], 6) if points else [0.0, 1.0]
    values = [value for _, value in finite] or [0.0]
    ys = nice_ticks(min(values), max(values), 5)
    frame = _Frame(points[0][0] if points else 0.0, points[-1][0] if points else 1.0, ys[0], ys[-1])
    parts = [svg.text(0, 12, title), *frame.draw_axes(xs, ys, x_label)]
    drawn = _thin(points)
    parts += [_draw_run(run, frame) for run in _finite_runs(drawn)]
    parts += [_mark(x, frame, x_label) for x, value in drawn if not math.isfinite(value)]
    dots = finite if len(finite) <= _MAX_DOTS else finite[-1:]
    parts += [_dot(point, frame, title, x_label) for point in dots]
    return svg.picture(f"{title} over {x_label}", _WIDTH, _HEIGHT, *parts)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that hold `low` and `high` between the first and the last.

    >>> nice_ticks(0.13, 0.87, 5), nice_ticks(3, 3, 5)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [2.0, 3.0, 4.0])
    """
    raw = high / count - low / count  # not their difference, which may be infinite
    if not raw > 0:
        margin = 10.0 ** math.floor(math.log10(abs(low))) if low else 1.0
        return [low - margin, float(low), low + margin]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(1 - math.floor(math.log10(step)), 0)  # 3 * 0.1 is 0.30000000000000004
    ticks = [round(index * step, digits) for index in range(first, last + 1)]
    return [max(-_LARGEST, min(tick, _LARGEST)) for tick in ticks]


class _Frame:
    """Where values are in the picture."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x_low, self._x_high = x_low, x_high
        self._y_low, self._y_high = y_low, y_high

    def x(self, value: float) -> float:
        return _LEFT + _share(value, self._x_low, self._x_high) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = _share(value, self._y_low, self._y_high)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def draw_axes(self, xs: Sequence[float], ys: Sequence[float], x_label: str) -> list[Markup]:
        parts = []
        for value in ys:
            parts += [
                svg.line(_LEFT, self.y(value), _WIDTH - _RIGHT, self.y(value)),
                svg.text(_LEFT - 8, self.y(value) + 4, f"{value:.6g}", anchor="end"),
            ]
        low = _HEIGHT - _BOTTOM
        for value in xs:
            if _LEFT - 0.5 <= self.x(value) <= _WIDTH - _RIGHT + 0.5:
                parts.append(svg.text(self.x(value), low + 16, f"{value:g}", anchor="middle"))
        return [*parts, svg.text(_WIDTH - _RIGHT, _HEIGHT - 4, x_label, anchor="end")]


def _share(value: float, low: float, high: float) -> float:
    """How far a value is between two others; halved, since the difference of two floats may be infinite."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.5


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thin(points: Sequence[Point]) -> list[Point]:
    """Of each part its lowest and highest, so that no peak is lost, and the first that is not finite."""
    size = math.ceil(len(points) / _MAX_PARTS)
    if size <= 2:
        return list(points)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [point for point in part if math.isfinite(point[1])]
        chosen = [point for point in part if not math.isfinite(point[1])][:1]
        if finite:
            chosen += {min(finite, key=_value), max(finite, key=_value)}
        kept += sorted(chosen, key=lambda point: point[0])
    return kept


def _value(point: Point) -> float:
    return point[1]


def _draw_run(run: Sequence[Point], frame: _Frame) -> Markup:
    points = " ".join(f"{svg.number(frame.x(x))},{svg.number(frame.y(y))}" for x, y in run)
    return element("polyline", points=points, fill="none", stroke=svg.BLUE, stroke_width=2)


def _mark(x: float, frame: _Frame, x_label: str) -> Markup:
    title = element("title", f"not finite at {x_label} {x:g}")
    return svg.rect(frame.x(x) - 1.5, _TOP, 3, _HEIGHT - _TOP - _BOTTOM, svg.RED, title, opacity=0.6)


def _dot(point: Point, frame: _Frame, title: str, x_label: str) -> Markup:
    x, y = svg.number(frame.x(point[0])), svg.number(frame.y(point[1]))
    about = element("title", f"{x_label} {point[0]:g}: {title} {point[1]:.6g}")
    return element("g", about, element("circle", cx=x, cy=y, r=3, fill=svg.BLUE))
