"""A pipeline of two stages, one on each rank, compiled one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import mstpass
from tests.models import Block, GatedMLP

BATCH, S, D, VOCABULARY = 4, 128, 32, 600


def _outcome(compiled: Callable[[Any], Any]) -> list[Tensor]:
    """The gradients of this rank's stage after a step of two micro-batches."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    block, head = Block(D, GatedMLP(D, 4 * D, "silu")), nn.Linear(D, VOCABULARY, bias=False)
    torch.manual_seed(2)
    x, labels = torch.randn(BATCH, S, D), torch.randint(VOCABULARY, (BATCH, S))

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())

    between = x[:2].clone().requires_grad_()  # of one micro-batch
    cpu = torch.device("cpu")
    stage = PipelineStage(
        compiled(block), rank, 2, cpu, input_args=(between,), output_args=(between,)
    )
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=compiled(loss))
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=labels)
    parameters = [*block.parameters(), *(head.parameters() if rank else ())]
    return [p.grad.clone() for p in parameters if p.grad is not None]


def pipeline(mesh: DeviceMesh) -> dict[str, Any]:
    right = _outcome(lambda fn: fn)
    torch.compiler.reset()
    before = len(mstpass.reports())
    options = {"strict": True, "chunk_tokens": 64}
    found = _outcome(lambda fn: torch.compile(fn, backend="mst", options=options))
    outcomes = [report.outcome for report in mstpass.reports()[before:]]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
    return {
        "error": max(errors),
        "regions": [(r.kind, r.mode, len(r.loops)) for o in outcomes for r in o.regions],
        "solvers": [o.save_plan.solver for o in outcomes if o.save_plan is not None],
        "notes": [note for o in outcomes for note in o.notes],
        "rejections": [str(r) for o in outcomes for r in o.rejections],
    }
