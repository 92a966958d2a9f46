"""One process of `mstpass bench sharded`: a head whose vocabulary is sharded over all ranks.

Rank 0 writes the figures of its own share to a file, as JSON. Every rank runs the same steps in the
same order, because each step exchanges numbers with the other ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from mstpass.bench.comparison import compare, inductor, mst
from mstpass.bench.models import Head, LossFn, Step

LEAST = "mst, memory_budget=0.0"


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


def main(path: str, tokens: int, width: int, vocabulary: int, repeats: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    device = torch.device("cpu")
    loss, step = sharded(Head.build(tokens, width, vocabulary, device), mesh)
    contenders = [inductor(), mst(), mst(LEAST, memory_budget=0.0)]
    rows = compare(contenders, loss, step, repeats=repeats, device=device)
    if dist.get_rank() == 0:
        found = {"rows": [dataclasses.asdict(row) for row in rows.values()]}
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
