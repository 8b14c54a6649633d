"""The plots of docs/performance.md: SVG that can be read on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dispatch
import forms
import matplotlib as mpl
import matplotlib.ticker
import scale
import step
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Run = Mapping[str, Any]
Runs = Sequence[Run]

# A grey that has a contrast of 4 to white and to near black; the page shows through behind it.
INK = "#7d8590"
STYLE: dict[Any, Any] = {
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxsync",  # the same figures give the same file
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
# Okabe and Ito's colours (2008), which the colour-blind can tell apart, without black and yellow.
COLOURS = {
    forms.FLOOR: INK,
    forms.PEERS[0]: "#cc79a7",
    forms.PEERS[1]: "#e69f00",
    forms.PEERS[2]: "#56b4e9",
    forms.PEERS[3]: "#0072b2",
    forms.OURS: "#d55e00",
    forms.OWN_STEP: "#009e73",
    # The same step with sharded state: its colour, marks of their own.
    forms.ZERO: "#d55e00",
    forms.FSDP: "#d55e00",
}
MARKERS = dict(zip(COLOURS, "|vs<>oD^P", strict=True))
LINES = ("-", "--", ":", "-.")


def draw_all(found: Mapping[str, Runs], folder: Path) -> None:
    """Writes each plot there are results for."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in _figures(found).items():
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


def _figures(found: Mapping[str, Runs]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    if runs := found.get("step"):
        for dtype in step_dtypes(runs):
            figures[f"step-{dtype}"] = _dots(runs, [dtype], "to_floor", "time of a step / without sync")
        figures["compile"] = _dots(
            runs,
            step_dtypes(runs),
            "compile_to_tree",
            "time to trace and compile / pmean(tree)",
            step.P3_LIMIT,
        )
    if runs := found.get("memory"):
        figures["memory"] = _memory(runs[0])  # a program that is compiled again takes the same
    if runs := found.get("scale"):
        figures["scale"] = _scale(runs)
    if runs := found.get("dispatch"):
        figures["dispatch"] = _dispatch(runs)
    return figures


def step_dtypes(runs: Runs) -> list[str]:
    """The dtypes that were measured, in order."""
    return list(dict.fromkeys(row["dtype"] for run in runs for row in run["rows"]))


def _dots(runs: Runs, dtypes: Sequence[str], key: str, label: str, limit: float | None = None) -> Figure:
    """A panel for each number of devices, a line for each model, a dot for each form and run."""
    rows = [(index, row) for index, run in enumerate(runs) for row in run["rows"] if row["dtype"] in dtypes]
    devices = sorted({row["devices"] for _, row in rows})
    names = list(dict.fromkeys(_line_name(row, dtypes) for _, row in rows))
    figure = Figure(figsize=(3.2 * max(3, len(devices)), 1.9 + 0.34 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(devices), sharey=True, sharex=True, squeeze=False)[0]
    for panel, num_devices in zip(panels, devices, strict=True):
        for run, row in rows:
            if row["devices"] == num_devices:
                _draw_row(panel, row["forms"], key, names.index(_line_name(row, dtypes)), run)
        _finish(panel, f"{num_devices} devices", names, limit)
    figure.supxlabel(label, fontsize="medium")
    unique: dict[str, Any] = {}
    for panel in panels:  # a form may be in some panels and runs only
        for handle, text in zip(*panel.get_legend_handles_labels(), strict=True):
            unique.setdefault(text, handle)
    figure.legend(
        unique.values(), unique.keys(), loc="outside upper center", ncols=4, columnspacing=1, fontsize="small"
    )
    return figure


def _line_name(row: Mapping[str, Any], dtypes: Sequence[str]) -> str:
    return f"{row['model']}, {row['dtype']}" if len(dtypes) > 1 else str(row["model"])


def _draw_row(panel: Axes, figures: Mapping[str, Any], key: str, line: int, run: int) -> None:
    for name, values in figures.items():
        colour = COLOURS[name]
        face = colour if run == 0 else "none"  # filled: the first run; hollow: the others
        where = line + 0.18 * run
        panel.plot(
            values[key],
            where,
            MARKERS[name],
            color=colour,
            markerfacecolor=face,
            label=name,
            markersize=6,
        )


def _finish(panel: Axes, title: str, names: Sequence[str], limit: float | None) -> None:
    panel.set_title(title)
    panel.set_xscale("log")
    _plain_ticks(panel)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(axis="x", which="both")
    if limit is not None:
        panel.axvline(limit, color=INK, linestyle="--", linewidth=1)


def _plain_ticks(panel: Axes) -> None:
    ticks = [0.2, 0.5, 1, 2, 5, 10, 20, 50]
    panel.xaxis.set_major_locator(mpl.ticker.FixedLocator(ticks))
    panel.xaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
    panel.xaxis.set_minor_locator(mpl.ticker.NullLocator())


def _memory(run: Run) -> Figure:
    """A bar for each model, number of devices and form, by what takes its bytes."""
    parts = {
        "parameter_bytes": "parameters",
        "optimizer_bytes": "optimizer state",
        "temporary_bytes": "temporary",
    }
    colours = ("#0072b2", "#d55e00", INK)
    bars = [(row, name, figures) for row in run["rows"] for name, figures in row["forms"].items()]
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(bars)), layout="constrained")
    panel, lefts = figure.subplots(), [0.0] * len(bars)
    for (key, label), colour in zip(parts.items(), colours, strict=True):
        widths = [figures[key] / (1 << 20) for _, _, figures in bars]
        panel.barh(range(len(bars)), widths, left=lefts, height=0.7, color=colour, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    names = [f"{row['model']}, {row['devices']} devices: {name}" for row, name, _ in bars]
    panel.set_yticks(range(len(bars)), names)
    panel.invert_yaxis()
    panel.grid(axis="x")
    panel.set_axisbelow(True)
    panel.set_xlabel("MiB on each device")
    figure.legend(loc="outside upper center", ncols=len(parts), fontsize="small")
    return figure


def _scale(runs: Runs) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours = {scale.PLAN: "#009e73", scale.SYNC: "#d55e00", scale.TREE: "#0072b2"}
    for panel, key in zip(panels, ("leaves", "devices"), strict=True):
        for run, result in enumerate(runs):
            for name, colour in colours.items():
                points = result[f"by_{key}"]
                sizes = [point[key] for point in points]
                times = [point["forms"][name]["ms"] for point in points]
                style = LINES[run % len(LINES)]
                panel.loglog(
                    sizes, times, style, marker="o", markersize=4, color=colour, label="" if run else name
                )
        panel.set_xlabel(key)
        panel.grid()
    panels[0].set_ylabel("ms")
    panels[0].plot(
        [scale.P7_LEAVES],
        [scale.P7_LIMIT_S * 1e3],
        "_",
        color=INK,
        markersize=18,
        label="limit for make_plan",
    )
    panels[0].legend(fontsize="small")
    return figure


def _dispatch(runs: Runs) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    for run, result in enumerate(runs):
        for name, colour in ((dispatch.STEP, "#d55e00"), (dispatch.GUARDED, "#009e73")):
            for devices in sorted({row["devices"] for row in result["rows"]}):
                rows = [row for row in result["rows"] if row["devices"] == devices]
                label = "" if run else f"{name}, {devices} device{'s' * (devices != 1)}"
                panel.plot(
                    [row["leaves"] for row in rows],
                    [row["forms"][name]["over_call_us"] for row in rows],
                    LINES[run % len(LINES)],
                    marker="o" if devices == 1 else "s",
                    markersize=4,
                    color=colour,
                    label=label,
                )
    panel.set_xscale("log")
    panel.set_yscale("symlog", linthresh=10)
    panel.axhline(dispatch.P6_LIMIT_US, color=INK, linestyle=":", label="limit for TrainStep")
    panel.set_xlabel("leaves")
    panel.set_ylabel("µs a call over the program")
    panel.grid()
    panel.legend(fontsize="small")
    return figure
