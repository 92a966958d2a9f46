"""Runs the demo: read text, tokenize it, train, and show a table and a picture.

Trains one model under several backends, with the same weights and the same batches.

Each contender runs a step before any of them runs the next step, so that noise on the machine
affects all alike. The loss function is compiled, not the module, so that the logits are no output
of the graph. The optimizer is neither compiled nor timed.

Draws the demo's picture: loss curves, and peak memory and time of a step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from transformers.utils import logging as transformers_logging

import mstpass
from mstpass import stdlib_text
from mstpass.bench import results
from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.harness import advancing
from mstpass.bench.huggingface import Scale, architectures
from mstpass.bench.results import MIB, Result, Target
from mstpass.measure import device_name, peak_bytes, synchronize

EAGER = "eager"
BACKENDS = {EAGER: None, INDUCTOR: "inductor", MST: "mst"}
_WARMUP_STEPS = 5
_LEARNING_RATE = 1e-3


@dataclasses.dataclass
class Row(results.Row):
    """One contender; times and peak are those of forward + backward."""

    losses: list[float] = dataclasses.field(default_factory=list)

    def max_loss_difference(self, other: Row) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


Rows = dict[str, Row]


@dataclasses.dataclass
class Contender:
    """One model under one backend: its loss function, optimizer, and figures so far."""

    row: Row
    loss_fn: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    device: torch.device

    def forward_backward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        loss = self.loss_fn(ids_BS)
        loss.backward()
        return loss.detach()

    def step(self, ids_BS: torch.Tensor) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.forward_backward(ids_BS)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if self.row.first_call_s is None:
            self.row.first_call_s = seconds
        else:
            self.row.seconds.append(seconds)
        self.row.losses.append(loss.item())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)


def train(
    entries: Sequence[Contender],
    batches: Sequence[torch.Tensor],
    on_step: Callable[[str], None] = lambda what: None,
) -> Rows:
    """Train on each batch once. `on_step` is called with a text after each step."""
    for ids_BS in batches:
        for entry in entries:
            entry.step(ids_BS.to(entry.device))
            on_step(f"{entry.row.name}: loss {entry.row.losses[-1]:.3f}")
    for entry in entries:
        last = batches[-1].to(entry.device)
        step = lambda entry=entry, last=last: entry.forward_backward(last)
        entry.row.peak_bytes = peak_bytes(step, entry.device)
        entry.optimizer.zero_grad(set_to_none=True)
    return {entry.row.name: entry.row for entry in entries}


def contender(name: str, setup: Scale, device: torch.device) -> Contender:
    model: Any = architectures(setup)["llama"].build(num_key_value_heads=setup.heads)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    loss_fn = lambda ids_BS: model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
    if (backend := BACKENDS[name]) is not None:
        loss_fn = torch.compile(loss_fn, backend=backend)
    return Contender(Row(name), loss_fn, optimizer, schedule, device)


# ---- the demo ------------------------------------------------------------------------------------
_FULL = Scale(32_000, 256, mlp_width=1024, layers=4, batch=2, length=1024)
_QUICK = dataclasses.replace(_FULL, layers=2, batch=1)
_TEXT_CHARS, _QUICK_TEXT_CHARS = 8 * 2**20, 2**20
_SAME_LOSS = 1e-2  # backends round differently in fp32, and training amplifies the differences


def run(num_steps: int, out: Path, quick: bool) -> int:
    transformers_logging.set_verbosity_error()
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = _QUICK if quick else _FULL
    batches = _batches(num_steps, quick, setup, console)
    torch.compiler.reset()
    entries = [contender(name, setup, device) for name in BACKENDS]
    with advancing("training", len(entries) * len(batches)) as advance:
        rows = train(entries, batches, advance)
    title = f"Llama: {setup}, fp32"
    result = result_of(title, rows)
    results.show(result, device)
    path = out / "demo.png"
    draw(rows, f"{title}; {device_name(device)}", path)
    settings = {"setup": dataclasses.asdict(setup)}
    results.write_json(out / "demo.json", [result], device, settings)
    _print_plan(console)
    console.print(f"picture: {path.resolve()}", soft_wrap=True)
    return 0 if all(target.met for target in result.targets) else 1


def result_of(title: str, rows: Rows) -> Result:
    """Peak and time of a step, relative to Inductor, and losses, compared with eager."""
    base, eager = rows[INDUCTOR], rows[EAGER]
    result = Result("demo", title, records={"rows": results.records(rows)})
    own: dict[str, Callable[[Any], str]] = {
        "first call s": lambda row: results.text_of(row.first_call_s, "{:.1f}".format),
        "final loss": lambda row: f"{row.losses[-1]:.4f}",
        "max diff to eager": lambda row: f"{row.max_loss_difference(eager):.1e}",
    }
    columns = (*results.PEAKS_AND_TIMES[:-1], *own)
    what = "One training step, forward + backward: median; first call, with compilation"
    result.tables.append(results.steps_table(what, rows.values(), base, columns, own))
    for row in rows.values():
        difference = row.max_loss_difference(eager)
        result.targets.append(Target(f"{row.name}: difference to eager", difference, _SAME_LOSS))
    return result


def _batches(num_steps: int, quick: bool, setup: Scale, console: Console) -> list[torch.Tensor]:
    pieces = stdlib_text.read_sources(_QUICK_TEXT_CHARS if quick else _TEXT_CHARS)
    with console.status("training a tokenizer on the standard library's sources"):
        tokenizer = stdlib_text.train_tokenizer(pieces, setup.vocabulary)
        stream_T = stdlib_text.encode(tokenizer, pieces)
    chars = sum(map(len, pieces))
    console.print(
        f"text: {chars / 2**20:.1f} Mi characters of Python's standard library, "
        f"{len(stream_T):,} tokens of a vocabulary of {tokenizer.get_vocab_size():,}"
    )
    return stdlib_text.batches(stream_T, num_steps, setup.batch, setup.length)


def _print_plan(console: Console) -> None:
    reports = mstpass.reports()
    console.rule("mst's plan")
    plan = str(reports[-1]) if reports else "no report"
    console.print(plan, markup=False, highlight=False, soft_wrap=True)


# ---- picture -------------------------------------------------------------------------------------
# Colours that colour-blind readers can tell apart; widths, dashes, markers and hatches for print.
_LINES: dict[str, dict[str, Any]] = {
    "eager": {"color": "#b8b8b8", "linewidth": 7.0, "solid_capstyle": "round"},
    "Inductor": {"color": "#0072b2", "linewidth": 2.6, "linestyle": (0, (4, 2.5))},
    "mst": {"color": "#d55e00", "linewidth": 1.2, "marker": "o", "markersize": 5.0},
}
_HATCHES = {"eager": "", "Inductor": "///", "mst": ".."}
_INK = "#222222"


def draw(rows: Rows, caption: str, path: Path) -> None:
    """Draw the rows into a PNG file."""
    figure = Figure(figsize=(11, 4.9), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1, 3, width_ratios=(2.3, 1, 1), left=0.065, right=0.985, top=0.80, bottom=0.12, wspace=0.3
    )
    losses, peaks, times = (figure.add_subplot(grid[0, column]) for column in range(3))
    _draw_losses(losses, rows)
    mib = {name: (row.peak_bytes or 0) / MIB for name, row in rows.items()}
    seconds = {name: row.median_s or 0.0 for name, row in rows.items()}
    relative = {n: results.time_ratio(row, rows[INDUCTOR]) or 0.0 for n, row in rows.items()}
    of_peaks = {n: (size, f"{size:.0f}", size / mib[INDUCTOR]) for n, size in mib.items()}
    _draw_bars(peaks, "peak memory, MiB", of_peaks)
    of_times = {n: (each, f"{each:#.3g}", relative[n]) for n, each in seconds.items()}
    _draw_bars(times, "forward + backward, s", of_times)
    headline = (
        f"mst against Inductor: {of_peaks[MST][2]:.2f}x the memory, {relative[MST]:.2f}x the time; "
        f"largest loss difference to eager {rows[MST].max_loss_difference(rows[EAGER]):.1e}"
    )
    style: Any = {"fontweight": "bold", "color": _INK, "va": "center"}
    figure.text(0.012, 0.955, headline, fontsize=13, **style)
    figure.text(0.012, 0.895, caption, fontsize=9, color="#555555", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_losses(axes: Any, rows: Rows) -> None:
    for name, row in rows.items():
        steps = range(1, len(row.losses) + 1)
        mark = max(1, len(row.losses) // 10)
        axes.plot(steps, row.losses, label=name, markevery=mark, **_LINES[name])
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
