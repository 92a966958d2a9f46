"""Measure an LM head whose vocabulary is sharded over two processes on the CPU:
step time against Inductor without chunks, and the peak of a rank against its
floor, which is the memory that no loop can avoid.

The *floor* of a rank is the memory that no loop can avoid: the gradient of its share of the weight,
the gradient of the input, and one chunk of its share of the logits, as long as mst's chunks are.

examples:
  mstpass bench sharded
  mstpass bench sharded --repeats 3 --markdown docs/results/losses.md
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from mstpass.bench import losses, processes, results
from mstpass.bench.comparison import INDUCTOR, MST, Outcome, compare, inductor, mst
from mstpass.bench.fsdp import LocalStep
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import Head, Work
from mstpass.bench.results import Result, Row, Target

LEAST = "mst, memory_budget=0.0"
PEAK_LIMIT = 1.10
RANKS = 2
_TIMEOUT_S = 1800


def run(arguments: Arguments) -> Result:
    tokens, width, vocabulary = losses.sizes(arguments.quick)
    given = {"sizes": (tokens, width, vocabulary), "repeats": arguments.repeats}
    with advancing("sharded", 1) as advance:
        call = functools.partial(processes.call, "a rank", figures_of_rank, given)
        found, *_ = call(ranks=RANKS, timeout_s=_TIMEOUT_S)
        advance("")
    rows = {row["name"]: Row(**row) for row in found}
    floors = {name: _floor(row, tokens, width, vocabulary) for name, row in rows.items()}
    of_floor = {name: results.quotient(row.peak_bytes, floors[name]) for name, row in rows.items()}
    title = f"A head on {RANKS} ranks: N={tokens}, d={width}, V={vocabulary}, fp32, gloo"
    result = Result("sharded", title)
    own = {"peak / floor": lambda row: results.times_cell(of_floor[row.name])}
    columns = ("", "chunks", "time / Inductor", "peak MiB", *own)
    table = results.steps_table("sharded", rows.values(), rows[INDUCTOR], columns, own)
    result.tables.append(table)
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
class _LossParallelStep(LocalStep):
    """A step under ``loss_parallel``."""

    def with_gradients(self) -> Outcome:
        with loss_parallel():
            return super().with_gradients()


def sharded(head: Head, mesh: DeviceMesh) -> Work:
    """The loss of a head whose weight is sharded by rows."""
    weight = distribute_tensor(head.weight.detach(), mesh, [Shard(0)]).requires_grad_()

    def loss() -> Tensor:
        hidden = DTensor.from_local(head.hidden, mesh, [Replicate()], run_check=False)
        value: Tensor = F.cross_entropy(F.linear(hidden, weight), head.target)
        return value.to_local() if isinstance(value, DTensor) else value

    return Work(loss, (head.hidden, weight), make=_LossParallelStep)


def figures_of_rank(sizes: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    """The rows of this rank's share.

    Every rank runs the same steps in the same order, because each step exchanges numbers with the
    other ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    device = torch.device("cpu")
    work = sharded(Head.build(*sizes, device), mesh)
    contenders = [inductor(), mst(), mst(LEAST, memory_budget=0.0)]
    return results.records(compare(contenders, work, Arguments(repeats, False, device)))


main = Benchmark("sharded", (run,), __doc__)
