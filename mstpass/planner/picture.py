"""Draws the longest sequence of each way to train against the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mstpass.planner.lengths import UP_TO, length_within
from mstpass.planner.request import CHECKPOINT, EAGER, INDUCTOR, MST, RECIPE, Row, TrainingPlan, gib

_GIB = 2**30
_SAMPLES = 400
_INK, _GRID, _FAINT = "#222222", "#e6e6e6", "#666666"
_COLORS = {  # that colour-blind readers can tell apart (Okabe and Ito)
    EAGER: "#777777",
    CHECKPOINT: "#009e73",
    INDUCTOR: "#0072b2",
    RECIPE: "#cc79a7",
    MST: "#d55e00",
}
_APART = 0.05  # of the height of the axes: between two labels
_LOWEST = 0.35  # the y axis begins at this multiple of the shortest length on the device


def draw(planned: TrainingPlan, path: Path) -> None:
    """Draw the curves of all rows; the suffix of the path decides the format."""
    figure = Figure(figsize=(8, 5), dpi=110, facecolor="white")
    axes = figure.add_axes((0.095, 0.115, 0.715, 0.725))
    rows = [row for row in planned.rows if row.curve]
    _frame(axes, planned, rows)
    for row in rows:
        _plot(axes, row, planned)
    _label_ends(axes, rows)
    _mark_device(axes, planned, rows)
    title, details = _texts(planned)
    figure.text(0.015, 0.945, title, fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.015, 0.895, details, fontsize=9, color=_FAINT)
    figure.savefig(path)


def _texts(planned: TrainingPlan) -> tuple[str, str]:
    request, training = planned.request, planned.request.training
    path = Path(request.model)
    model = path.parent.name if path.name == "config.json" else path.name
    details = f"{training.dtype}, {training.optimizer}, batch {training.batch}"
    if training.ranks > 1:
        details += f", {training.sharding} over {training.ranks} devices"
    if training.shares:
        details += f", {training.sequence_ranks} a sequence"
    return (
        f"How long a sequence can {model} train on?",
        f"Simulated, not measured: {details}",
    )


def _frame(axes: Any, planned: TrainingPlan, rows: Sequence[Row]) -> None:
    """The scales: from where the fixed bytes fit to twice the device, and all lengths."""
    device, least = planned.request.device_bytes, min(row.curve[0].total_bytes for row in rows)
    margin = 0.03 * (UP_TO * device - least)
    axes.set_xlim((least - margin) / _GIB, UP_TO * device / _GIB)
    shortest = min(row.length or row.curve[0].length for row in rows)
    longest = max(row.curve[-1].length for row in rows)
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST * shortest, 1.3 * longest)
    axes.set_xlabel("memory of the device, GiB", color=_INK)
    axes.set_ylabel("longest sequence, tokens", color=_INK)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: _tokens(n)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)


def _plot(axes: Any, row: Row, planned: TrainingPlan) -> None:
    """A curve: straight between its points, which a scale of logarithms bends."""
    first, last = row.curve[0].total_bytes, row.curve[-1].total_bytes
    sizes = [first + (last - first) * i / _SAMPLES for i in range(_SAMPLES + 1)]
    lengths = [length_within(row.curve, size) for size in sizes]
    found = [(size / _GIB, length) for size, length in zip(sizes, lengths, strict=True) if length]
    # all lengths up to that of the first sample fit on the least device
    x, y = zip((found[0][0], row.curve[0].length), *found, strict=True)
    bold = 2.6 if row.name == MST else 1.8
    axes.plot(x, y, color=_COLORS[row.name], linewidth=bold, solid_capstyle="round")


def _label_ends(axes: Any, rows: Sequence[Row]) -> None:
    """The names beside the right ends of the curves, moved apart where they would overlap."""
    right = axes.get_xlim()[1] * _GIB
    to_axes = axes.transAxes.inverted()

    def height(row: Row) -> float:
        length = length_within(row.curve, right) or row.curve[-1].length
        found: float = to_axes.transform(axes.transData.transform((1, length)))[1]
        return found

    lowest = 0.0
    for row in sorted(rows, key=height):
        lowest = max(height(row), lowest)
        weight = "bold" if row.name == MST else "normal"
        style = {"fontsize": 9.5, "color": _COLORS[row.name], "fontweight": weight}
        axes.text(1.015, lowest, row.name, transform=axes.transAxes, va="center", **style)
        lowest += _APART


def _mark_device(axes: Any, planned: TrainingPlan, rows: Sequence[Row]) -> None:
    """The request's device: a line, and on it the length of each row."""
    request = planned.request
    x = request.device_bytes / _GIB
    axes.axvline(x, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    name = f"{request.gpu}, " if request.gpu else "this device, "
    axes.annotate(
        f"{name}{gib(request.device_bytes)}",
        (x, 1.0),
        (0, 4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=_INK,
    )
    fitting = sorted((row for row in rows if row.fits), key=lambda row: row.length)
    for i, row in enumerate(fitting):
        color, length = _COLORS[row.name], row.length
        above = fitting[i + 1].length / length if i + 1 < len(fitting) else math.inf
        below = length / fitting[i - 1].length if i else math.inf
        axes.plot([x], [length], "o", color=color, markersize=5, zorder=4)
        # curves rise to the right: there is room above on the left, and below on the right
        side = {"xytext": (-6, 5), "ha": "right"} if above > below else {"xytext": (7, -11)}
        style = {"fontsize": 8.5, "color": color, "textcoords": "offset points", **side}
        axes.annotate(f"{length:,}", (x, length), **style)


def _tokens(length: float) -> str:
    """1k for 1,000 tokens, 1M for a million."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if length >= size:
            return f"{length / size:g}{unit}"
    return f"{length:g}"
