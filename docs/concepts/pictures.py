"""Draws the pictures of the concept pages.

python docs/concepts/pictures.py     writes docs/concepts/images/*.svg
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

import jaxsync
from jaxsync.report import svg
from jaxsync.report.markup import Markup, element

FOLDER = Path(__file__).parent / "images"
NUM_DEVICES = 4


def box(x: float, y: float, width: float, height: float, colour: str, *lines: str) -> Markup:
    """A coloured box with lines of text in its middle."""
    first = y + height / 2 + 4 - 7.5 * (len(lines) - 1)
    words = [
        svg.text(x + width / 2, first + 15 * i, line, anchor="middle", fill=svg.INK)
        for i, line in enumerate(lines)
    ]
    return element("g", svg.rect(x, y, width, height, colour), *words)


def frame(x: float, y: float, width: float, height: float) -> Markup:
    """An empty box: what is not held, or not in use."""
    return svg.rect(x, y, width, height, "currentColor", opacity=0.1)


def arrow(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A line to the right, or to the left, with a head at its end."""
    back = 6 if x2 >= x1 else -6
    head = (
        f"M{svg.number(x2 - back)} {svg.number(y2 - 4)}L{svg.number(x2)} {svg.number(y2)}"
        f"L{svg.number(x2 - back)} {svg.number(y2 + 4)}z"
    )
    return element("g", svg.line(x1, y1, x2, y2, opacity=0.7), element("path", d=head, fill="currentColor"))


def column(x: float, width: float, colour: str, entries: Sequence[tuple[str, ...]]) -> Markup:
    """Boxes below each other."""
    boxes = [box(x, 10 + 55 * i, width, 44, colour, *lines) for i, lines in enumerate(entries)]
    return element("g", *boxes)


def draw_plan() -> str:
    """What goes into a plan, and who reads it."""
    given = [("parameter tree:", "shapes and dtypes"), ("mesh",), ("specs",), ("SyncConfig",)]
    readers = [
        ("traced code:", "which collectives"),
        ("host loop:", "in which order"),
        ("other processes:", "the same fingerprint?"),
        ("reports, tests",),
    ]
    middles = [32 + 55 * i for i in range(4)]
    return svg.picture(
        "A tree of shapes, a mesh, specs and a config become a plan, which all other parts read",
        700,
        230,
        column(10, 170, svg.BLUE, given),
        *[arrow(180, y, 266, 60 + 33 * i) for i, y in enumerate(middles)],
        box(
            270,
            40,
            150,
            140,
            svg.ORANGE,
            "SyncPlan",
            "",
            "leaves, buckets,",
            "axes, fingerprint;",
            "no array",
        ),
        *[arrow(420, 60 + 33 * i, 506, y) for i, y in enumerate(middles)],
        column(510, 180, svg.GREEN, readers),
    )


def devices(x: float, y: float, held: Callable[[int], tuple[float, float]]) -> Markup:
    """One leaf on each device; `held` says from where to where a device holds it, from 0 to 1."""
    parts = []
    for device in range(NUM_DEVICES):
        start, end = held(device)
        left = x + 46 * device
        parts += [frame(left, y, 40, 40), svg.rect(left, y + 40 * start, 40, 40 * (end - start), svg.BLUE)]
    return element("g", *parts)


def draw_specs() -> str:
    """What becomes of a gradient, by the spec of its parameter."""

    def quarter(device: int) -> tuple[float, float]:
        return device / 4, (device + 1) / 4

    def half(device: int) -> tuple[float, float]:
        return device % 2 / 2, device % 2 / 2 + 1 / 2

    def whole(device: int) -> tuple[float, float]:
        return 0, 1

    rows = [
        ("P()", "data=4", "all-reduce over data", whole, whole),
        ('P("data")', "data=4", "reduce-scatter over data", whole, quarter),
        ('P("model")', "data=2, model=2", "all-reduce over data", half, half),
    ]
    parts = [
        svg.text(x, 20, title)
        for x, title in ((10, "spec of the parameter"), (170, "local gradients"), (530, "synced gradients"))
    ]
    for i, (spec, mesh, collective, before, after) in enumerate(rows):
        y = 35 + 65 * i
        parts += [svg.text(10, y + 18, spec), svg.text(10, y + 34, mesh), devices(170, y, before)]
        parts += [svg.text(437, y + 12, collective, anchor="middle"), arrow(360, y + 22, 516, y + 22)]
        parts += [devices(530, y, after)]
    return svg.picture("The spec of a parameter decides how its gradient is reduced", 730, 230, *parts)


def draw_types() -> str:
    """The three things a type can say of a value over an axis."""
    rows = [
        ("varying", "each device's own", ("0", "1", "2", "3"), svg.BLUE, "reduced: the mean is 1.5"),
        ("unreduced", "terms of one sum", ("0 +", "1 +", "2 +", "3"), svg.GREEN, "reduced"),
        ("invarying", "the same on all", ("6", "6", "6", "6"), svg.ORANGE, "refused: it was summed before"),
    ]
    parts = [
        svg.text(150, 20, "value on each of 4 devices"),
        svg.text(400, 20, "as a gradient that is to be synced"),
    ]
    for i, (state, meaning, values, colour, verdict) in enumerate(rows):
        y = 35 + 60 * i
        parts += [svg.text(10, y + 18, state), svg.text(10, y + 34, meaning)]
        parts += [box(150 + 50 * k, y, 44, 40, colour, value) for k, value in enumerate(values)]
        parts += [arrow(352, y + 20, 392, y + 20), svg.text(400, y + 24, verdict)]
    return svg.picture(
        "Varying, unreduced and invarying values, and what a sync does with each", 640, 210, *parts
    )


def draw_buckets() -> str:
    """The buckets of a small transformer: the picture that every plan draws of itself."""
    shape = jax.ShapeDtypeStruct
    width = 128
    block = {
        "norm": {"bias": shape((width,), "float32"), "scale": shape((width,), "float32")},
        "qkv": {"bias": shape((3 * width,), "float32"), "kernel": shape((width, 3 * width), "float32")},
        "proj": {"bias": shape((width,), "float32"), "kernel": shape((width, width), "float32")},
    }
    params = {f"block{i}": block for i in range(6)} | {"embed": shape((256, width), "float32")}
    return jaxsync.make_plan(params, AbstractMesh((8,), ("data",))).draw()


def draw_host_loop() -> str:
    """The way of a step through the client."""
    threads = [box(10, 15 + 48 * i, 120, 36, svg.BLUE, f"device {i}'s thread") for i in range(NUM_DEVICES)]
    to_state = [arrow(130, 33 + 48 * i, 206, 70 + 20 * i) for i in range(NUM_DEVICES)]
    return svg.picture(
        "Calls of the devices' threads change one state; one loop launches what is owed",
        760,
        270,
        *threads,
        *to_state,
        box(
            210,
            45,
            160,
            110,
            svg.ORANGE,
            "step(state, message)",
            "",
            "a pure function, run by",
            "the caller under a lock",
        ),
        arrow(370, 100, 416, 100),
        box(420, 60, 130, 80, svg.GREEN, "the loop:", "one thread does", "what is owed"),
        arrow(550, 100, 606, 100),
        box(610, 60, 140, 80, svg.PINK, "the launcher:", "plan order, a", "bounded window"),
        svg.line(485, 140, 485, 235, opacity=0.7),
        svg.line(485, 235, 70, 235, opacity=0.7),
        svg.line(70, 235, 70, 205, opacity=0.7),
        element("path", d="M66 209L70 203L74 209z", fill="currentColor"),
        svg.text(
            375,
            254,
            "each ticket is answered once: with this device's synced gradients, or with an error",
            anchor="middle",
        ),
    )


def draw_launching() -> str:
    """A pool of eight threads, and shares of programs that park them."""
    colours = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PINK)
    parked = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    running = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    parts = []
    for x, title, shares, notes in (
        (
            10,
            "nothing awaited: 4 programs in flight",
            parked,
            ("all threads wait for devices 2 and 3,", "whose shares have no thread to run on"),
        ),
        (
            390,
            "a window: 2 programs in flight",
            running,
            ("every share has a thread:", "each program meets and ends"),
        ),
    ):
        parts.append(svg.text(x, 20, title))
        for i, (program, device) in enumerate(shares):
            place = (x + 82 * (i % 4), 32 + 52 * (i // 4))
            parts.append(box(*place, 76, 44, colours[program], f"program {program}", f"device {device}"))
        parts += [svg.text(x, 158 + 16 * i, note) for i, note in enumerate(notes)]
    return svg.picture(
        "Why a loop that awaits nothing ends the process on simulated devices", 730, 190, *parts
    )


def draw_sharded_state() -> str:
    """What one of four devices holds between two steps with Adam, in units of the parameters."""
    rows = [
        ("replicated", 1.0, 2.0),
        ("shard_optimizer(tx, plan)", 1.0, 0.5),
        ('specs=P("data")', 0.25, 0.5),
    ]
    unit, left = 150, 190
    parts = [svg.legend(left, 20, {"parameters": svg.BLUE, "optimizer state": svg.ORANGE})]
    for i, (name, params, state) in enumerate(rows):
        y = 35 + 45 * i
        parts += [svg.text(10, y + 20, name), frame(left, y, 3 * unit, 32)]
        parts += [svg.rect(left, y, unit * params, 32, svg.BLUE)]
        parts += [svg.rect(left + unit * params, y, unit * state, 32, svg.ORANGE)]
        parts += [svg.text(left + 3 * unit + 10, y + 20, f"{params + state:g}")]
    return svg.picture("Memory of one of four devices between two steps with Adam", 690, 175, *parts)


PICTURES = {
    "plan": draw_plan,
    "specs": draw_specs,
    "types": draw_types,
    "buckets": draw_buckets,
    "host-loop": draw_host_loop,
    "launching": draw_launching,
    "sharded-state": draw_sharded_state,
}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
