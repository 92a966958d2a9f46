"""Draws peak against time, for `mstpass bench solvers` and `pareto`; loss curves for `training`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mstpass.bench.solver_rows import Row
from mstpass.bench.tables import MIB

# Colours that stay apart for colour-blind eyes (Okabe and Ito), markers for print.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#999999")
_MARKERS = "osD^v*PXph<>"
_INK, _GRID = "#222222", "#e6e6e6"

Points = Sequence[tuple[float, float, str]]  # (time as a ratio, peak in MiB, label)


def draw_plans(rows: Sequence[Row], path: Path) -> None:
    """Draw the simulated plans of each solver for one problem into a PNG file."""
    figure, axes = _axes()
    base_us = rows[0].us - rows[0].extra_us
    for number, solver in enumerate(dict.fromkeys(row.solver for row in rows)):
        own = [row for row in rows if row.solver == solver and not row.error]
        points = sorted({(row.us / base_us, row.peak_bytes / MIB, "") for row in own})
        _plot(axes, number, solver, points)
    left, right = axes.get_xlim()
    bounds = sorted({(row.budget_bytes / MIB, max(left, row.bound_us / base_us)) for row in rows})
    budgets, times = zip(*bounds, strict=True)
    label = "proven: there is no plan here"
    # a bound holds for smaller budgets than its own, not for larger ones
    axes.fill_betweenx(budgets, left, times, step="pre", color=_GRID, zorder=0, label=label)
    axes.set_xlim(left, right)
    title = f"{rows[0].problem}: peak against time of a step"
    _write(figure, axes, title, "time / save_all's", "simulated peak, MiB", path)


def draw_measured(title: str, series: Mapping[str, Points], path: Path) -> None:
    """Draw the measured points of each series into a PNG file."""
    figure, axes = _axes()
    for number, (label, points) in enumerate(series.items()):
        if points:
            _plot(axes, number, label, points)
    axes.set_ylim(bottom=0)
    _write(figure, axes, title, "time / Inductor", "measured peak, MiB", path)


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plot(axes: Any, number: int, label: str, points: Points) -> None:
    times, peaks, texts = zip(*points, strict=True)
    axes.plot(
        times,
        peaks,
        label=label,
        color=_COLORS[number % len(_COLORS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=7,
        markerfacecolor="none",
        linewidth=1.1,
        alpha=0.9,
    )
    for point in zip(texts, zip(times, peaks, strict=True), strict=True):
        axes.annotate(*point, (6, 4), textcoords="offset points", fontsize=7, color=_INK)


def _write(figure: Figure, axes: Any, title: str, time: str, peak: str, path: Path) -> None:
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel(time, color=_INK)
    axes.set_ylabel(peak, color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_training(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw loss curves into a PNG file: a panel for each model, mst's lines over eager's."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (5.5 * columns, 3.6 * rows)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
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
        axes.set_title(title, loc="left", color=_INK)
        axes.set_xlabel("step", color=_INK)
        axes.set_ylabel("loss", color=_INK)
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
