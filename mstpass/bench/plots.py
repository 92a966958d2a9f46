"""Draws peak against time, for `mstpass bench solvers` and `pareto`; loss curves for `training`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Colours that stay apart for colour-blind eyes (Okabe and Ito), markers for print.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#999999")
_MARKERS = "osD^v*PXph<>"
_INK, _GRID = "#222222", "#e6e6e6"

Points = Sequence[tuple[float, float, str]]  # (time as a ratio, peak in MiB, label)
Bounds = Sequence[tuple[float, float]]  # (budget in MiB, least time as a ratio), by budget


def draw_plans(title: str, series: Mapping[str, Points], bounds: Bounds, path: Path) -> None:
    """Draw the simulated plans of each solver for one problem into a PNG file."""
    figure, axes = _with_points(series)
    left, right = axes.get_xlim()
    budgets, times = zip(*((budget, max(left, time)) for budget, time in bounds), strict=True)
    label = "proven: there is no plan here"
    # a bound holds for smaller budgets than its own, not for larger ones
    axes.fill_betweenx(budgets, left, times, step="pre", color=_GRID, zorder=0, label=label)
    axes.set_xlim(left, right)
    _finish(axes, title, "time / save_all's", "simulated peak, MiB", 8)
    _write(figure, path)


def draw_measured(title: str, series: Mapping[str, Points], path: Path) -> None:
    """Draw the measured points of each series into a PNG file."""
    figure, axes = _with_points(series)
    axes.set_ylim(bottom=0)
    _finish(axes, title, "time / Inductor", "measured peak, MiB", 8)
    _write(figure, path)


def draw_training(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw loss curves into a PNG file: a panel for each model, mst's lines over eager's."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(5.5 * columns, 3.6 * rows)
    for number, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for index, (label, losses) in enumerate(curves.items()):
            is_eager = label.startswith("eager")
            axes.plot(
                losses,
                label=label,
                color=_INK if is_eager else _COLORS[index % len(_COLORS)],
                linewidth=4.0 if is_eager else 1.2,
                alpha=0.25 if is_eager else 1.0,
                linestyle="-" if is_eager else ("-", "--", ":")[index % 3],
            )
        _finish(axes, title, "step", "loss", 7)
    _write(figure, path)


def _figure(width: float, height: float) -> Figure:
    size = (width, height)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _with_points(series: Mapping[str, Points]) -> tuple[Figure, Any]:
    """A figure with one line and its markers for each series."""
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(series.items()):
        if not points:
            continue
        times, peaks, texts = zip(*points, strict=True)
        style: dict[str, Any] = {
            "color": _COLORS[number % len(_COLORS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 7,
            "markerfacecolor": "none",
        }
        axes.plot(times, peaks, label=label, linewidth=1.1, alpha=0.9, **style)
        for point in zip(texts, zip(times, peaks, strict=True), strict=True):
            axes.annotate(*point, (6, 4), textcoords="offset points", fontsize=7, color=_INK)
    return figure, axes


def _finish(axes: Any, title: str, x: str, y: str, font_size: int) -> None:
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=font_size)


def _write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
