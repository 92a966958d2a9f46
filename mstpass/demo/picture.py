"""Draws the demo's picture: loss curves, and peak memory and time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mstpass.demo.train import Result

# Colours that colour-blind readers can tell apart; widths, dashes, markers and hatches for print.
_LINES: dict[str, dict[str, Any]] = {
    "eager": {"color": "#b8b8b8", "linewidth": 7.0, "solid_capstyle": "round"},
    "Inductor": {"color": "#0072b2", "linewidth": 2.6, "linestyle": (0, (4, 2.5))},
    "mst": {"color": "#d55e00", "linewidth": 1.2, "marker": "o", "markersize": 5.0},
}
_HATCHES = {"eager": "", "Inductor": "///", "mst": ".."}
_INK = "#222222"


def draw(results: Sequence[Result], caption: str, path: Path) -> None:
    """Draw the results into a PNG file."""
    figure = Figure(figsize=(11, 4.9), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1, 3, width_ratios=(2.3, 1, 1), left=0.065, right=0.985, top=0.80, bottom=0.12, wspace=0.3
    )
    losses, peaks, times = (figure.add_subplot(grid[0, column]) for column in range(3))
    _draw_losses(losses, results)
    inductor = next(result for result in results if result.name == "Inductor")
    _draw_bars(
        peaks,
        "peak memory, MiB",
        {
            r.name: (r.peak_mib, f"{r.peak_mib:.0f}", r.peak_mib / inductor.peak_mib)
            for r in results
        },
    )
    _draw_bars(
        times,
        "forward + backward, s",
        {
            r.name: (r.step_s, f"{r.step_s:#.3g}", r.timing.ratio_to(inductor.timing))
            for r in results
        },
    )
    figure.text(
        0.012, 0.955, _headline(results), fontsize=13, fontweight="bold", color=_INK, va="center"
    )
    figure.text(0.012, 0.895, caption, fontsize=9, color="#555555", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _headline(results: Sequence[Result]) -> str:
    by_name = {result.name: result for result in results}
    mst, eager, inductor = by_name["mst"], by_name["eager"], by_name["Inductor"]
    return (
        f"mst against Inductor: {mst.peak_bytes / inductor.peak_bytes:.2f}x the memory, "
        f"{mst.timing.ratio_to(inductor.timing):.2f}x the time; "
        f"largest loss difference to eager {mst.max_loss_difference(eager):.1e}"
    )


def _draw_losses(axes: Any, results: Sequence[Result]) -> None:
    for result in results:
        steps = range(1, len(result.losses) + 1)
        mark = max(1, len(result.losses) // 10)
        axes.plot(steps, result.losses, label=result.name, markevery=mark, **_LINES[result.name])
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("training loss", fontsize=10, loc="left")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, handlelength=3.2)
    _unframe(axes)


def _draw_bars(axes: Any, title: str, bars: dict[str, tuple[float, str, float]]) -> None:
    """Draw a bar for each name: its height, the height as text, and the ratio to Inductor."""
    heights = [height for height, _, _ in bars.values()]
    patches = axes.bar(list(bars), heights, width=0.68)
    for bar, (name, (height, text, ratio)) in zip(patches, bars.items(), strict=True):
        bar.set(facecolor=_LINES[name]["color"], edgecolor="white", hatch=_HATCHES[name])
        axes.annotate(
            f"{text}\n{ratio:.2f}x",
            (bar.get_x() + bar.get_width() / 2, height),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_INK,
        )
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.set_ylim(0, 1.18 * max(heights))
    axes.grid(True, axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    _unframe(axes)


def _unframe(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
