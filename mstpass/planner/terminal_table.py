"""Prints a plan on the terminal: a table of all rows, and sentences below it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from mstpass.graph.gpu_costs import LINK
from mstpass.planner.request import MST, TrainingPlan, gib
from mstpass.planner.training import AS_MODEL, OPTIMIZERS, Training

_PARTS = ("saved", "logits", "loops", "other", "gradients", "temporaries")
_NAMES = {"temporaries": "optimizer step"}


def show(planned: TrainingPlan, console: Console | None = None) -> None:
    console = console or Console()
    for line in _heading(planned):
        console.print(line, markup=False, highlight=False)
    console.print(_table(planned))
    if planned.splits:
        console.print(_splits(planned))
    if planned.combinations:
        console.print(_combinations(planned))
    for line in _below(planned):
        console.print(line, markup=False, highlight=False)


def _heading(planned: TrainingPlan) -> list[str]:
    request, training = planned.request, planned.request.training
    states = OPTIMIZERS[training.optimizer].text
    device = f"{request.gpu}:" if request.gpu else "device memory"
    lines = [
        f"{request.model}, {planned.sizes.of_model / 1e9:.2f} billion parameters, "
        f"{training.dtype}, {training.optimizer} ({states}), batch {training.batch}",
        f"{device} {gib(request.device_bytes)}, {gib(request.overhead_bytes)} of it overhead",
    ]
    extras = [
        *(["fp32 master weights"] if training.master_weights else []),
        *(["optimizer in backward"] if training.optimizer_in_backward else []),
        *([f"{training.optimizer_step} optimizer"] if training.optimizer_step != "fused" else []),
        *([f"padded documents of {training.document} tokens"] if training.document else []),
        *([f"{training.sharding} over {training.ranks}"] if training.ranks > 1 else []),
        *([f"{training.replicas} replicas"] if training.replicas > 1 else []),
        *([_sequences(training)] if training.shares else []),
        *([_adapters(planned)] if training.lora else []),
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
    ranks = planned.request.training.sequence_ranks
    if ranks > 1:
        table.add_row("of a rank", *(f"{row.length // ranks:,}" for row in planned.rows))
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


def _adapters(planned: TrainingPlan) -> str:
    """What is trained, and how the rest is held."""
    training, millions = planned.request.training, planned.sizes.parameters / 1e6
    held = "" if training.weights == AS_MODEL else f" beside {training.weights} weights"
    return f"LoRA of rank {training.lora}{held}: {millions:.1f} million parameters are trained"


def _sequences(training: Training) -> str:
    """Which ranks have which sequences."""
    apart = f", {training.data_ranks} sequences at a time" if training.data_ranks > 1 else ""
    groups = f" in {training.head_groups} groups of heads" if training.head_groups > 1 else ""
    return f"{training.sequence_ranks} ranks share a sequence{groups}{apart}"


def _splits(planned: TrainingPlan) -> Table:
    """The ways to divide the devices that were compared."""
    given = planned.request.length is not None
    table = Table(title="ways to divide the devices")
    lengths = "tokens per second" if given else "longest sequence, about"
    names = ["data", "shards", "sequence", "groups of heads", lengths, "fits"]
    for name in [*names, "communication"] if given else names:
        table.add_column(name, justify="right")
    for split in planned.splits:
        training, time = split.training, split.time
        speed = time.tokens_per_s(training, split.length) if time else split.length
        divided = training.data_ranks, training.weight_shards, training.sequence_ranks
        table.add_row(
            *map(str, (*divided, training.head_groups)),
            f"{speed:,.0f}",
            "yes" if split.fits else "no",
            *([f"{100 * time.communication:.1f} %"] if time else []),
            style="bold" if training == planned.request.training else "",
        )
    return table


def _combinations(planned: TrainingPlan) -> Table:
    """The best batch and plan of each length."""
    table = Table(title="the most tokens per second, of each length")
    names = ("batch", "length", "memory_budget", "GiB", "tokens per second", "time of a step")
    for name in names:
        table.add_column(name, justify="right")
    for each in planned.combinations:
        chosen = (each.batch, each.length) == (
            planned.request.training.batch,
            planned.request.length,
        )
        table.add_row(
            str(each.batch),
            f"{each.length:,}",
            each.memory_budget,
            _number(each.total_bytes),
            f"{each.tokens_per_s:,.0f}",
            f"{each.time.total_us / 1e6:.2f} s",
            style="bold" if chosen else "",
        )
    return table


def _communication(planned: TrainingPlan) -> Iterator[str]:
    """What devices send to each other, and how long that takes."""
    training, time, links = planned.request.training, planned.time, planned.links
    if time is None or links is None or not (training.shares or planned.splits):
        return
    speed = time.tokens_per_s(training, planned.own.length)
    shares = (100 * us / time.total_us for us in (time.exchange_us, time.sharding_us))
    attention, sharding = (f"{share:.1f} %" for share in shares)
    yield (
        f"{training.gpus} devices: {speed:,.0f} tokens per second; {100 * time.communication:.1f} "
        f"% of the time is communication ({attention} attention's, {sharding} of weights and "
        "gradients), if nothing overlaps (estimated)"
    )
    yield (
        f"links: {links.inside_bytes_per_us / 1e3:.0f} GB/s inside of a node, "
        f"{links.between_bytes_per_us / 1e3:.3g} between nodes, of which {100 * LINK:.0f} % are "
        f"reached ({links.source})"
    )


def _below(planned: TrainingPlan) -> list[str]:
    lines = [f"{row.name}: {row.keeps}" for row in planned.rows]
    lines += _communication(planned)
    own = planned.own
    if own.fits:
        slower = f"{100 * (own.extra_time or 0):.0f} % more time than Inductor's step (estimated)"
        host = planned.request.host_bytes
        by_host = f", 'host_budget': '{host / 2**30:g}GiB'" if own.host_bytes else ""
        budget = _literal(own.memory_budget)
        lines += _shared(planned.request.training)
        lines.append(f"compile with options={{'memory_budget': {budget}{by_host}}}: {slower}")
    else:
        lines.append(f"no plan of mst fits at {own.length:,} tokens: use a shorter sequence")
    return lines + [f"note: {note}" for note in planned.notes]


def _shared(training: Training) -> list[str]:
    """How a script lets ranks share sequences as planned."""
    if not training.shares:
        return []
    mesh = ", mesh['sequence']" if training.data_ranks > 1 else ""
    groups = f", head_groups={training.head_groups}" if training.head_groups > 1 else ""
    return [f"share sequences with mstpass.sequence_parallel(model{mesh}{groups})"]


def _literal(memory_budget: str) -> str:
    return memory_budget if memory_budget == "0.0" else repr(memory_budget)


def _number(size: int) -> str:
    return f"{size / 2**30:.1f}"
