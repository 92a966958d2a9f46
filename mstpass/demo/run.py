"""Runs the demo: read text, tokenize it, train, and show tables and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

import mstpass
from mstpass import stdlib_text as text
from mstpass.demo import picture
from mstpass.demo.arguments import Arguments
from mstpass.demo.train import Contender, Result, Setup, contenders, train
from mstpass.measure import device_name

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


def run(arguments: Arguments) -> int:
    transformers_logging.set_verbosity_error()
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = _QUICK if arguments.quick else _FULL
    batches = _batches(arguments, setup, console)
    console.print(f"{setup}, on {device_name(device)}")
    results = _train(setup, device, batches, console)
    console.print(table(results))
    path = arguments.out / "demo.png"
    picture.draw(results, f"{setup}; {device_name(device)}", path)
    _write_json(results, setup, device, arguments.out / "demo.json")
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


def _batches(arguments: Arguments, setup: Setup, console: Console) -> list[torch.Tensor]:
    pieces = text.read_sources(_QUICK_TEXT_CHARS if arguments.quick else _TEXT_CHARS)
    with console.status("training a tokenizer on the standard library's sources"):
        tokenizer = text.train_tokenizer(pieces, setup.vocabulary)
        stream_T = text.encode(tokenizer, pieces)
    chars = sum(map(len, pieces))
    console.print(
        f"text: {chars / 2**20:.1f} Mi characters of Python's standard library, "
        f"{len(stream_T):,} tokens of a vocabulary of {tokenizer.get_vocab_size():,}"
    )
    return text.batches(stream_T, arguments.steps, setup.batch, setup.length)


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
