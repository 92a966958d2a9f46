"""`mstpass bench sharded`: an LM head whose vocabulary two processes share, under `loss_parallel`.

The *floor* of a rank is the memory that no loop can avoid: the gradient of its share of the weight,
the gradient of the input, and one chunk of its share of the logits, as long as mst's chunks are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from mstpass.bench import figures, losses, processes
from mstpass.bench.comparison import INDUCTOR, MST, compare, inductor, mst
from mstpass.bench.figures import Row
from mstpass.bench.harness import Arguments, Benchmark, Progress
from mstpass.bench.models import Head, LossFn, Step
from mstpass.bench.results import Result, Table, Target, mib_cell, quotient, ratio_cell, times_cell

LEAST = "mst, memory_budget=0.0"
PEAK_LIMIT = 1.10
RANKS = 2
_TIMEOUT_S = 1800
_DESCRIPTION = """\
Measure an LM head whose vocabulary is sharded over two processes on the CPU:
step time against Inductor without chunks, and the peak of a rank against its
floor, which is the memory that no loop can avoid."""
EXAMPLES = """  mstpass bench sharded
  mstpass bench sharded --repeats 3 --markdown docs/results/losses.md
"""


def run(arguments: Arguments) -> Result:
    tokens, width, vocabulary = losses.sizes(arguments.quick)
    given = {"sizes": (tokens, width, vocabulary), "repeats": arguments.repeats}
    with Progress("sharded", 1) as advance:
        found = processes.call("a rank", figures_of_rank, given, ranks=RANKS, timeout_s=_TIMEOUT_S)[
            0
        ]
        advance("")
    rows = {row["name"]: Row(**row) for row in found}
    floors = {name: _floor(row, tokens, width, vocabulary) for name, row in rows.items()}
    of_floor = {name: quotient(row.peak_bytes, floors[name]) for name, row in rows.items()}
    title = f"A head on {RANKS} ranks: N={tokens}, d={width}, V={vocabulary}, fp32, gloo"
    result = Result("sharded", title)
    columns: dict[str, Callable[[Row], str]] = {
        "contender": lambda row: row.name,
        "plan": lambda row: row.error or row.plan or "-",
        "time / Inductor": lambda row: ratio_cell(figures.ratios(row, rows[INDUCTOR])),
        "MiB of a rank": lambda row: mib_cell(row.peak_bytes),
        "peak / floor": lambda row: times_cell(of_floor[row.name]),
    }
    result.tables.append(Table.of("sharded", rows.values(), columns))
    result.targets += [
        Target(f"{name}: peak / floor", of_floor[name], PEAK_LIMIT) for name in (MST, LEAST)
    ]
    result.notes.append(
        "Time: median ratio over interleaved rounds (least-greatest). Floor: gradient of the "
        "rank's share of the weight + input gradient + one chunk of its share of the logits. The "
        "logits are computed twice, because the maximum and the sum of all ranks are known only "
        "after the first time."
    )
    result.records["rows"] = found
    return result


def _floor(row: Row, tokens: int, width: int, vocabulary: int) -> int | None:
    """Bytes of a rank that no loop can avoid, in float32; None for a row without loops."""
    if " in " not in row.plan:
        return None
    chunks, share = int(row.plan.rpartition(" in ")[2]), -(-vocabulary // RANKS)
    return 4 * (share * width + tokens * width + -(-tokens // chunks) * share)


# ---- a rank ------------------------------------------------------------------------------------
class _LocalStep(Step):
    """A step under ``loss_parallel``, whose gradients are this rank's shards."""

    def with_gradients(self) -> tuple[Tensor, list[Tensor]]:
        with loss_parallel():
            value, gradients = super().with_gradients()
        return value, [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def sharded(head: Head, mesh: DeviceMesh) -> tuple[LossFn, Callable[[LossFn], Step]]:
    """The loss of a head whose weight is sharded by rows, and what makes a step of it."""
    weight = distribute_tensor(head.weight.detach(), mesh, [Shard(0)]).requires_grad_()

    def loss() -> Tensor:
        hidden = DTensor.from_local(head.hidden, mesh, [Replicate()], run_check=False)
        value: Tensor = F.cross_entropy(F.linear(hidden, weight), head.target)
        return value.to_local() if isinstance(value, DTensor) else value

    return loss, lambda fn: _LocalStep(fn, (head.hidden, weight))


def figures_of_rank(sizes: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    """The rows of this rank's share.

    Every rank runs the same steps in the same order, because each step exchanges numbers with the
    other ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    device = torch.device("cpu")
    loss, step = sharded(Head.build(*sizes, device), mesh)
    contenders = [inductor(), mst(), mst(LEAST, memory_budget=0.0)]
    rows = compare(contenders, loss, step, repeats=repeats, device=device)
    return figures.records(rows)


main = Benchmark("sharded", (run,), _DESCRIPTION, EXAMPLES)
