"""Prints a plan on the terminal: a table of all rows, and sentences below it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mstpass.planner.notes import gib
from mstpass.planner.request import CACHING
from mstpass.planner.result import MST, TrainingPlan
from mstpass.planner.training import OPTIMIZERS

_PARTS = ("saved", "logits", "loops", "other", "gradients", "temporaries", "gaps")
_NAMES = {"temporaries": "optimizer step"}


def show(planned: TrainingPlan, console: Console | None = None) -> None:
    console = console or Console()
    for line in _heading(planned):
        console.print(line, markup=False, highlight=False)
    console.print(_table(planned))
    for line in _below(planned):
        console.print(line, markup=False, highlight=False)


def _heading(planned: TrainingPlan) -> list[str]:
    request, training = planned.request, planned.request.training
    states = OPTIMIZERS[training.optimizer].text
    device = f"{request.gpu}:" if request.gpu else "device memory"
    lines = [
        f"{request.model}, {planned.sizes.parameters / 1e9:.2f} billion parameters, "
        f"{training.dtype}, {training.optimizer} ({states}), batch {training.batch}",
        f"{device} {gib(request.device_bytes)}, {gib(request.overhead_bytes)} of it overhead",
    ]
    extras = [
        *(["fp32 master weights"] if training.master_weights else []),
        *(["optimizer in backward"] if training.optimizer_in_backward else []),
        *([f"{training.optimizer_step} optimizer"] if training.optimizer_step != "fused" else []),
        *(["gaps of the caching allocator"] if request.allocator == CACHING else []),
        *([f"padded documents of {training.document} tokens"] if training.document else []),
        *([f"{training.sharding} over {training.ranks}"] if training.ranks > 1 else []),
    ]
    return [*lines, *([", ".join(extras)] if extras else [])]


def _table(planned: TrainingPlan) -> Table:
    """One column for each way to train; one line for each part of its memory."""
    given = planned.request.length is not None
    table = Table(title=f"GiB at the peak of a step, {'at' if given else 'each at its'} "
                  f"{'this length' if given else 'longest length'}")  # fmt: skip
    table.add_column("")
    for row in planned.rows:
        name = row.name.replace(" ", "\n", 1)
        table.add_column(name, justify="right", style="bold" if row.name == MST else "")
    table.add_row("tokens", *(f"{row.length:,}" for row in planned.rows))
    for name, sizes in _lines(planned):
        if any(sizes):
            last = name == "overhead"
            table.add_row(name, *map(_number, sizes), end_section=last)
    table.add_row("total", *(_number(row.total_bytes) for row in planned.rows))
    if planned.request.host_bytes:
        table.add_row("on the host", *(_number(row.host_bytes) for row in planned.rows))
    table.add_row("fits", *("yes" if row.fits else "no" for row in planned.rows))
    return table


def _lines(planned: TrainingPlan) -> list[tuple[str, list[int]]]:
    """The lines of the table: a part of the memory, and its bytes for each way to train."""
    rows, fixed = planned.rows, planned.fixed
    everywhere = (
        ("weights", fixed.weights),
        ("optimizer states", fixed.optimizer_states),
        ("gathered", fixed.gathered),
        ("overhead", planned.request.overhead_bytes),
    )
    return [
        *((_NAMES.get(part, part), [getattr(r.parts, part) for r in rows]) for part in _PARTS),
        *((name, [size] * len(rows)) for name, size in everywhere),
    ]


def _below(planned: TrainingPlan) -> list[str]:
    lines = [f"{row.name}: {row.keeps}" for row in planned.rows]
    own = planned.own
    if own.fits:
        slower = f"{100 * (own.extra_time or 0):.0f} % more time than Inductor's step (estimated)"
        host = planned.request.host_bytes
        by_host = f", 'host_budget': '{host / 2**30:g}GiB'" if own.host_bytes else ""
        budget = _literal(own.memory_budget)
        lines.append(f"compile with options={{'memory_budget': {budget}{by_host}}}: {slower}")
    else:
        lines.append(f"no plan of mst fits at {own.length:,} tokens: use a shorter sequence")
    return lines + [f"note: {note}" for note in planned.notes]


def _literal(memory_budget: str) -> str:
    return memory_budget if memory_budget == "0.0" else repr(memory_budget)


def _number(size: int) -> str:
    return f"{size / 2**30:.1f}"
