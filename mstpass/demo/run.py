"""Runs the demo: read text, tokenize it, train, and show tables and a picture.

Trains one model under several backends, with the same weights and the same batches.

Each contender runs a step before any of them runs the next step, so that noise on the machine
affects all alike. The loss function is compiled, not the module, so that the logits are no output
of the graph. The optimizer is neither compiled nor timed.

Draws the demo's picture: loss curves, and peak memory and time of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import mstpass
from mstpass import stdlib_text
from mstpass.measure import Timing, device_name, peak_bytes, synchronize

BACKENDS = {"eager": None, "Inductor": "inductor", "mst": "mst"}
_WARMUP_STEPS = 5
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setup:
    """Sizes of model and batch."""

    vocabulary: int
    layers: int = 4
    width: int = 256
    mlp_width: int = 1024
    heads: int = 4
    batch: int = 2
    length: int = 1024

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return (
            f"Llama: {self.layers} layers, width {self.width}, MLP {self.mlp_width}, "
            f"vocabulary {self.vocabulary:,}; {self.batch} x {self.length} tokens a step, fp32"
        )


@dataclass(frozen=True)
class Result:
    """The figures of one contender; times and peak are those of forward + backward."""

    name: str
    losses: tuple[float, ...]
    first_step_s: float
    timing: Timing
    peak_bytes: int

    @property
    def peak_mib(self) -> float:
        return self.peak_bytes / 2**20

    @property
    def step_s(self) -> float:
        return self.timing.median_s

    def max_loss_difference(self, other: Result) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


@dataclass
class Contender:
    """One model under one backend: its loss function, optimizer, and figures so far."""

    name: str
    loss_fn: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    device: torch.device
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def forward_backward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        loss = self.loss_fn(ids_BS)
        loss.backward()
        return loss.detach()

    def step(self, ids_BS: torch.Tensor) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.forward_backward(ids_BS)
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def result(self, ids_BS: torch.Tensor) -> Result:
        peak = peak_bytes(lambda: self.forward_backward(ids_BS), self.device)
        self.optimizer.zero_grad(set_to_none=True)
        first, *rest = self.seconds
        timing = Timing(tuple(rest))
        return Result(self.name, tuple(self.losses), first, timing, peak)


def contenders(setup: Setup, device: torch.device) -> list[Contender]:
    return [_contender(name, backend, setup, device) for name, backend in BACKENDS.items()]


def train(
    entries: Sequence[Contender],
    batches: Sequence[torch.Tensor],
    on_step: Callable[[Contender, int], None],
) -> list[Result]:
    """Train on each batch once. `on_step(contender, step)` is called after each step."""
    for step, ids_BS in enumerate(batches):
        for entry in entries:
            entry.step(ids_BS.to(entry.device))
            on_step(entry, step)
    return [entry.result(batches[-1].to(entry.device)) for entry in entries]


def _contender(name: str, backend: str | None, setup: Setup, device: torch.device) -> Contender:
    model = _model(setup).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    loss_fn = lambda ids_BS: model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
    if backend is not None:
        loss_fn = torch.compile(loss_fn, backend=backend)
    return Contender(name, loss_fn, optimizer, schedule, device)


def _model(setup: Setup) -> LlamaForCausalLM:
    torch.manual_seed(0)  # identical weights for every contender
    config = LlamaConfig(
        vocab_size=setup.vocabulary,
        hidden_size=setup.width,
        intermediate_size=setup.mlp_width,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.heads,
        max_position_embeddings=setup.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


# ---- the demo ------------------------------------------------------------------------------------
_FULL = Setup(vocabulary=32_000)
_QUICK = Setup(vocabulary=32_000, layers=2, batch=1, length=1024)
_TEXT_CHARS, _QUICK_TEXT_CHARS = 8 * 2**20, 2**20
_COLUMNS = (
    "peak\nMiB",
    "against\nInductor",
    "time\ns",
    "against\nInductor",
    "first\ncall, s",
    "final\nloss",
    "max diff\nto eager",
)
_SAME_LOSS = 1e-2  # backends round differently in fp32, and training amplifies the differences


def run(num_steps: int, out: Path, quick: bool) -> int:
    transformers_logging.set_verbosity_error()
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = _QUICK if quick else _FULL
    batches = _batches(num_steps, quick, setup, console)
    console.print(f"{setup}, on {device_name(device)}")
    results = _train(setup, device, batches, console)
    console.print(table(results))
    path = out / "demo.png"
    draw(results, f"{setup}; {device_name(device)}", path)
    _write_json(results, setup, device, out / "demo.json")
    _print_plan(console)
    console.print(f"picture: {path.resolve()}", soft_wrap=True)
    return 0 if _agree(results, console) else 1


def table(results: Sequence[Result]) -> Table:
    """Peak and time of a step, relative to Inductor, and losses, compared with eager."""
    by_name = {result.name: result for result in results}
    eager, inductor = by_name["eager"], by_name["Inductor"]
    out = Table(title="One training step, forward + backward: median; first call, with compilation")
    out.add_column("")
    for column in _COLUMNS:
        out.add_column(column, justify="right")
    for result in results:
        out.add_row(
            result.name,
            f"{result.peak_mib:.0f}",
            f"{result.peak_bytes / inductor.peak_bytes:.2f}x",
            f"{result.step_s:.3f}",
            f"{result.timing.ratio_to(inductor.timing):.2f}x",
            f"{result.first_step_s:.1f}",
            f"{result.losses[-1]:.4f}",
            f"{result.max_loss_difference(eager):.1e}",
        )
    return out


def _batches(num_steps: int, quick: bool, setup: Setup, console: Console) -> list[torch.Tensor]:
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


def _train(
    setup: Setup, device: torch.device, batches: list[torch.Tensor], console: Console
) -> list[Result]:
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    torch.compiler.reset()
    entries = contenders(setup, device)
    with Progress(*columns, console=console) as progress:
        tasks = {
            entry.name: progress.add_task(entry.name, total=len(batches), loss="-")
            for entry in entries
        }

        def on_step(entry: Contender, step: int) -> None:
            progress.update(tasks[entry.name], advance=1, loss=f"{entry.losses[-1]:.3f}")
            if not console.is_terminal and entry is entries[-1] and step % 10 == 0:
                losses = ", ".join(f"{e.name} {e.losses[-1]:.4f}" for e in entries)
                console.print(f"step {step + 1} of {len(batches)}: {losses}")

        return train(entries, batches, on_step)


def _print_plan(console: Console) -> None:
    reports = mstpass.reports()
    console.rule("mst's plan")
    plan = str(reports[-1]) if reports else "no report"
    console.print(plan, markup=False, highlight=False, soft_wrap=True)


def _agree(results: Sequence[Result], console: Console) -> bool:
    eager = results[0]
    apart = [r.name for r in results if not r.max_loss_difference(eager) <= _SAME_LOSS]
    if apart:
        console.print(f"[bold red]the losses of {', '.join(apart)} differ from those of eager[/]")
    return not apart


def _write_json(results: Sequence[Result], setup: Setup, device: torch.device, path: Path) -> None:
    record = {
        "setup": asdict(setup),
        "machine": device_name(device),
        "results": [
            {
                "name": r.name,
                "peak_bytes": r.peak_bytes,
                "median_step_s": r.step_s,
                "first_step_s": r.first_step_s,
                "losses": r.losses,
            }
            for r in results
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# ---- picture -------------------------------------------------------------------------------------
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
