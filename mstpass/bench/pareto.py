"""Pictures of `mstpass bench solvers`: each solver's plans of one problem, peak against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from mstpass.bench.solvers import Row

# Colours that stay apart for colour-blind eyes (Okabe and Ito), markers for print.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#999999")
_MARKERS = "osD^v*PXph<>"
_INK, _GRID = "#222222", "#e6e6e6"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write one problem's rows as a PNG."""
    figure = Figure(figsize=(8, 5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    base_us = rows[0].us - rows[0].extra_us
    for number, solver in enumerate(dict.fromkeys(row.solver for row in rows)):
        own = [row for row in rows if row.solver == solver and not row.error]
        points = sorted({(row.us / base_us, row.peak_bytes / 2**20) for row in own})
        axes.plot(
            *zip(*points, strict=True),
            label=solver,
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=7,
            markerfacecolor="none",
            linewidth=1.1,
            alpha=0.9,
        )
    left, right = axes.get_xlim()
    bounds = sorted({(row.budget_bytes / 2**20, max(left, row.bound_us / base_us)) for row in rows})
    budgets, times = zip(*bounds, strict=True)
    label = "proven: no plan here"
    # a bound holds down from its budget, not up to the next one's
    axes.fill_betweenx(budgets, left, times, step="pre", color=_GRID, zorder=0, label=label)
    axes.set_xlim(left, right)
    _dress(axes, rows[0].problem)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _dress(axes: Any, problem: str) -> None:
    axes.set_title(f"{problem}: peak against time of a step", loc="left", color=_INK)
    axes.set_xlabel("time / save_all's", color=_INK)
    axes.set_ylabel("simulated peak, MiB", color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
