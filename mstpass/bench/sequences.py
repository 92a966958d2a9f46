"""`mstpass bench sequences`: one sequence on 1, 2 and 4 ranks, with the same tokens on each.

Each rank is a process of one thread; they speak gloo. Every way has the same attention, that of
``mstpass.sequence_parallel``, so that Inductor's steps have the same exchanges.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mstpass
from mstpass.bench import comparison, figures, processes
from mstpass.bench.comparison import INDUCTOR, MST, Outcome, own_code
from mstpass.bench.figures import Row
from mstpass.bench.fsdp import add_rounds, slowest_and_highest
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import LlamaSize
from mstpass.bench.results import (
    Result,
    Table,
    Target,
    mib_cell,
    quotient,
    ratio_cell,
    seconds_cell,
    times_cell,
)
from mstpass.errors import UserError
from mstpass.measure import peak_bytes

RANKS = (1, 2, 4)
GROUPS = 2
LEAST = f"{MST}, memory_budget=0.0"
IN_GROUPS = f"{LEAST}, {GROUPS} groups of heads"
ONE_PROCESS = "one process, eager"
TOLERANCES = 1e-5, 1e-5  # relative errors of the loss and of a gradient, against one process
GROWTH_LIMIT, PLAN_LIMIT, PEAK_LIMIT, TIME_LIMIT = 1.05, 1.05, 0.35, 1.05
MEASUREMENTS = 5  # of each peak: gloo's threads free what they have sent sooner or later
SIZE = LlamaSize(width=256, layers=2, heads=8, mlp_width=1024, vocabulary=8192, length=2048)
LARGE = dataclasses.replace(SIZE, layers=4)
QUICK = LlamaSize(64, 1, 4, 128, 2048, 128)
_DESCRIPTION = """\
Measure the peak memory of a rank and the time of a step of transformers'
Llama whose sequences 1, 2 and 4 ranks share, with 2,048 tokens on each, on
processes of one thread: Inductor and mst with the same attention. Gradients
are compared with one process on the whole sequence. Two layers, with --large
four; with --quick on 1 and 2 ranks. Ten to twenty minutes on two cores."""
EXAMPLES = """  mstpass bench sequences
  mstpass bench sequences --repeats 9 --markdown docs/results/sequences.md
"""


LossOf = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a rank's step is compiled.

    Attributes:
        how: arguments of ``torch.compile``.
    """

    how: Mapping[str, Any]
    head_groups: int = 1


def _mst(**options: Any) -> dict[str, Any]:
    return {"backend": "mst", "options": {"strict": True, **options}}


WAYS = {
    INDUCTOR: Way({}),
    MST: Way(_mst()),
    LEAST: Way(_mst(memory_budget=0.0)),
    IN_GROUPS: Way(_mst(memory_budget=0.0), GROUPS),
}


def run(arguments: Arguments) -> Result:
    if arguments.device.type != "cpu":
        raise UserError("mstpass bench sequences measures on the CPU: add --device cpu")
    size = QUICK if arguments.quick else LARGE if arguments.large else SIZE
    several = [ranks for ranks in RANKS if ranks <= 2 or not arguments.quick]
    result = Result("sequences", f"One sequence on {', '.join(map(str, several))} ranks: {size}")
    by_ranks = {
        ranks: {row.name: row for row in slowest_and_highest(of_ranks(size, ranks, arguments))}
        for ranks in several
    }
    for ranks, rows in by_ranks.items():
        result.tables.append(_table(rows, f"Ranks: {ranks}, with {size.length} tokens on each"))
        result.records[f"{ranks} ranks"] = figures.records(rows)
    result.targets += _targets(by_ranks)
    result.notes += [
        f"Each rank has one thread. Peak: the lowest of {MEASUREMENTS} steps, of the rank with the "
        "highest one; gloo's threads free what they have sent sooner or later. Time: of the rank "
        "that takes longest; median ratio over interleaved rounds (least-greatest). Gradient "
        f"error: the largest, relative to {ONE_PROCESS} on the whole sequence, float32."
    ]
    return result


def _targets(by_ranks: dict[int, dict[str, Row]]) -> list[Target]:
    def worst(ratio: Callable[[dict[str, Row]], float | None]) -> float | None:
        return max((r for rows in by_ranks.values() if (r := ratio(rows))), default=None)

    peaks = [rows[LEAST].peak_bytes or 0 for rows in by_ranks.values()]
    two = by_ranks[2]
    return [
        Target(f"{LEAST}: highest / lowest peak of a rank", max(peaks) / min(peaks), GROWTH_LIMIT),
        Target(
            f"{LEAST}: measured / simulated peak, the worst",
            worst(lambda rows: quotient(rows[LEAST].peak_bytes, rows[LEAST].simulated_bytes)),
            PLAN_LIMIT,
        ),
        Target(
            f"{LEAST}: peak / {INDUCTOR}, the worst",
            worst(lambda rows: figures.peak_ratio(rows[LEAST], rows[INDUCTOR])),
            PEAK_LIMIT,
        ),
        Target(
            f"{MST}: time / {INDUCTOR}, 2 ranks",
            figures.time_ratio(two[MST], two[INDUCTOR]),
            TIME_LIMIT,
        ),
    ]


def _table(rows: dict[str, Row], title: str) -> Table:
    base = rows[INDUCTOR]
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: row.name,
        "peak MiB of a rank": lambda row: mib_cell(row.peak_bytes),
        "simulated MiB": lambda row: mib_cell(row.simulated_bytes),
        "peak / Inductor": lambda row: times_cell(figures.peak_ratio(row, base)),
        "time s": lambda row: seconds_cell(row.median_s),
        "time / Inductor": lambda row: ratio_cell(figures.ratios(row, base)),
        "gradient error": lambda row: f"{row.gradient_error:.1e}",
    }
    return Table.of(title, rows.values(), columns)


def of_ranks(size: LlamaSize, ranks: int, arguments: Arguments) -> list[list[Row]]:
    """The rows of each rank."""
    given = {"size": dataclasses.asdict(size), "repeats": arguments.repeats}
    what = f"mstpass bench sequences: one of {ranks} ranks"
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder}  # new, and of all ranks, which compile alike
        found = processes.call(what, figures_of_rank, given, ranks=ranks, environment=caches)
    return [[Row(**fields) for fields in rows] for rows in found]


# ---- a rank ------------------------------------------------------------------------------------
def figures_of_rank(size: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    """This rank's figures of each way.

    The ranks go through the same ways, steps and rounds in the same order, since each step has
    exchanges. An error ends the whole benchmark: a rank that went on alone would wait for others.
    """
    sizes = LlamaSize(**size)
    random = torch.Generator().manual_seed(1)  # all ranks hold the whole batch
    length = sizes.length * dist.get_world_size()
    ids_BS = torch.randint(sizes.vocabulary, (sizes.batch, length), generator=random)
    batch = {"input_ids": ids_BS, "labels": ids_BS}
    whole = _model(sizes, length)
    reference = _outcome(whole, _loss_of(whole), {**batch, "use_cache": False})
    found: dict[str, Row] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, way in WAYS.items():
        row, model = Row(name), _model(sizes, length)
        mstpass.sequence_parallel(model, head_groups=way.head_groups)
        part = mstpass.shard_sequence(batch, gradients="sum")
        made = len(mstpass.reports())
        loss = torch.compile(own_code(_loss_of(model)), **way.how)
        outcome = _added(_outcome(model, loss, part))
        comparison.compare_outcomes(row, outcome, reference, ONE_PROCESS, TOLERANCES)
        figures.write_plan(row, mstpass.reports()[made:])
        steps[name] = functools.partial(_step, model, loss, part)
        steps[name]()
        row.peak_bytes = min(peak_bytes(steps[name]) for _ in range(MEASUREMENTS))
        found[name] = row
    del whole, reference, outcome  # free their memory
    add_rounds(found, steps, repeats)
    return figures.records(found)


def _model(size: LlamaSize, length: int) -> nn.Module:
    """transformers' Llama, two query heads for each key-value head, alike on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp_width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=length,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def _loss_of(model: nn.Module) -> LossOf:
    """The loss alone: what is returned beside it, such as logits, would have to exist."""

    def loss(**part: Any) -> Tensor:
        value: Tensor = model(**part).loss
        return value

    return loss


def _step(model: nn.Module, loss_of: LossOf, part: Mapping[str, Any]) -> Tensor:
    model.zero_grad()
    loss = loss_of(**part)
    loss.backward()
    return loss.detach()


def _outcome(model: nn.Module, loss_of: LossOf, part: Mapping[str, Any]) -> Outcome:
    """The loss and the gradients."""
    loss = _step(model, loss_of, part)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return loss, gradients


def _added(outcome: Outcome) -> Outcome:
    """Loss and gradients of all ranks added up."""
    loss, gradients = outcome
    for value in (loss, *gradients):
        dist.all_reduce(value)
    return loss, gradients


main = Benchmark("sequences", (run,), _DESCRIPTION, EXAMPLES, ("large",))
