"""Measure the peak memory of a rank and the time of a Llama-like step under
FSDP2, on two processes of one thread each: eager, Inductor and mst, with the
whole module compiled, and with blocks and head compiled one by one, for 2,048
and for 4,096 tokens a rank.

examples:
  mstpass bench fsdp
  mstpass bench fsdp --repeats 9 --markdown docs/results/fsdp.md
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mstpass.bench import processes, results
from mstpass.bench.comparison import INDUCTOR, MST, Comparison, Contender, Outcome, own_code
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import Llama, LlamaSize, Step, Work
from mstpass.bench.results import Result, Row, Table, mib_cell, ratio_cell, seconds_cell, times_cell
from mstpass.errors import UserError
from mstpass.measure import peak_bytes

BY_BLOCK = ", block by block"
FEW_TOKENS = 16
OVERHEAD = f"eager, {FEW_TOKENS} tokens"  # weights and gradients, sharded and gathered: FSDP2's own
RANKS = 2
PEAK_LIMIT, TIME_LIMIT = 0.45, 1.02
SIZES = (LlamaSize(length=2048), LlamaSize(length=4096))
QUICK = (LlamaSize(64, 2, 2, 256, 4096, 512),)


def run(arguments: Arguments) -> Result:
    if arguments.device.type != "cpu":
        raise UserError("mstpass bench fsdp measures on the CPU: add --device cpu")
    result = Result("fsdp", f"A Llama-like step under FSDP2, {RANKS} ranks")
    for size in QUICK if arguments.quick else SIZES:
        rows = {row.name: row for row in slowest_and_highest(of_ranks(size, arguments.repeats))}
        _add(result, rows, size)
    result.notes += [
        "Loss and gradients equal eager's. Each rank has a batch of its own and one thread. Peak: "
        "that of the rank with the higher one. Time: of the rank that takes longer; median ratio "
        "over interleaved rounds (least-greatest). Ratios are to Inductor in the same way. The "
        "last row is what FSDP2 itself needs: sharded and gathered weights, and their gradients."
    ]
    return result


def _add(result: Result, rows: dict[str, Row], size: LlamaSize) -> None:
    """Add what was measured for one size."""
    tokens = f"N={size.batch * size.length}"
    result.tables.append(_table(rows, f"{size}, a rank"))
    for way in ("", BY_BLOCK):
        ours, base = rows[MST + way], rows[INDUCTOR + way]
        what = f"{ours.name}: {{}} / {base.name}, {tokens}"
        result.targets += results.peak_and_time_targets(what, ours, base, PEAK_LIMIT, TIME_LIMIT)
    result.notes += (f"{row.name}, {tokens}: {row.plan}." for row in rows.values() if row.plan)
    result.records[tokens] = results.records(rows)


def of_ranks(size: LlamaSize, repeats: int) -> list[list[Row]]:
    """The rows of each rank."""
    return rows_of_ranks("mstpass bench fsdp: a rank", figures_of_rank, size, repeats, RANKS)


def rows_of_ranks(
    what: str, function: Callable[..., Any], size: LlamaSize, repeats: int, ranks: int
) -> list[list[Row]]:
    """The rows that a function of a size finds on each rank."""
    given = {"size": dataclasses.asdict(size), "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder}
        found = processes.call(what, function, given, ranks=ranks, environment=caches)
    return [[Row(**fields) for fields in rows] for rows in found]


def slowest_and_highest(by_rank: list[list[Row]]) -> list[Row]:
    """Of each way, the higher peak of the ranks, and in each round the longer time."""
    return [
        dataclasses.replace(
            each[0],
            peak_bytes=max(row.peak_bytes or 0 for row in each),
            gradient_error=max(row.gradient_error or 0.0 for row in each),
            seconds=[max(times) for times in zip(*(row.seconds for row in each), strict=True)],
        )
        for each in zip(*by_rank, strict=True)
    ]


def _table(rows: dict[str, Row], title: str) -> Table:
    def base(row: Row) -> Row:
        return rows[INDUCTOR + (BY_BLOCK if row.name.endswith(BY_BLOCK) else "")]

    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: row.name,
        "peak MiB of a rank": lambda row: mib_cell(row.peak_bytes),
        "peak / Inductor": lambda row: times_cell(results.peak_ratio(row, base(row))),
        "time s": lambda row: seconds_cell(row.median_s),
        "time / Inductor": lambda row: ratio_cell(results.ratios(row, base(row))),
    }
    return Table.of(title, rows.values(), columns)


# ---- a rank ------------------------------------------------------------------------------------
class ShardedLlama(Llama):
    """Each block is a unit of FSDP2, and all else is another; the head and its loss, one method."""

    def forward(  # type: ignore[override]
        self, ids_BS: Tensor, target_BS: Tensor
    ) -> Tensor:
        x_BSD = self.embed(ids_BS)
        cos, sin = self.cos[: ids_BS.shape[1]], self.sin[: ids_BS.shape[1]]
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos, sin, 1)
        return self.loss(x_BSD, target_BS)

    def loss(self, x_BSD: Tensor, target_BS: Tensor) -> Tensor:
        logits_NV = self.head(self.norm(x_BSD).flatten(0, 1))
        return F.cross_entropy(logits_NV, target_BS.flatten())


def _whole(**how: Any) -> Callable[[ShardedLlama], Callable[..., Tensor]]:
    return lambda model: torch.compile(model, **how)


def _by_block(**how: Any) -> Callable[[ShardedLlama], Callable[..., Tensor]]:
    def build(model: ShardedLlama) -> Callable[..., Tensor]:
        for layer in model.layers:
            layer.compile(**how)
        model.loss = torch.compile(model.loss, **how)  # type: ignore[method-assign]
        return model

    return build


_MST: dict[str, Any] = {"backend": "mst", "options": {"strict": True}}
WAYS: dict[str, Callable[[ShardedLlama], Callable[..., Tensor]]] = {
    "eager": lambda model: model,
    INDUCTOR: _whole(),
    MST: _whole(**_MST),
    INDUCTOR + BY_BLOCK: _by_block(),
    MST + BY_BLOCK: _by_block(**_MST),
}


def _with_own_code(cls: type) -> type:
    """A copy of a class, for which Dynamo compiles anew."""
    methods = {name: own_code(vars(cls)[name]) for name in ("forward", "loss") if name in vars(cls)}
    return type(cls.__name__, (cls,), methods)


class LocalStep(Step):
    """A step whose gradients are this rank's shards."""

    def with_gradients(self) -> Outcome:
        value, gradients = super().with_gradients()
        return value, [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def _sharded(name: str, size: LlamaSize, batch: tuple[Tensor, Tensor]) -> Work:
    """A sharded model that is compiled in one way, on this rank's batch."""
    torch.manual_seed(0)  # the same weights on every rank
    model = ShardedLlama(size)
    for module in (model, *model.layers):
        module.__class__ = _with_own_code(type(module))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    fn = WAYS[name](model)
    return Work.of(model, lambda: fn(*batch), make=LocalStep)


def figures_of_rank(size: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    """This rank's figures of each way."""
    sizes, device = LlamaSize(**size), torch.device("cpu")
    random = torch.Generator().manual_seed(dist.get_rank() + 1)  # every rank has its own batch
    stream = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=random)
    ids, targets = stream[:, :-1].clone(), stream[:, 1:].clone()
    of_way = lambda name: functools.partial(_sharded, name, sizes, (ids, targets))
    comparison = Comparison(None, device, ranks=True)
    comparison.add([Contender(name, lambda fn: fn, work=of_way(name)) for name in WAYS])
    comparison.measure_peaks()
    few = _sharded("eager", sizes, (ids[:, :FEW_TOKENS], targets[:, :FEW_TOKENS]))
    overhead = few.step(few.fn)
    overhead()
    comparison.time(repeats)
    last = Row(OVERHEAD, peak_bytes=peak_bytes(overhead))
    return results.records({**comparison.rows, OVERHEAD: last})


main = Benchmark("fsdp", (run,), __doc__)
