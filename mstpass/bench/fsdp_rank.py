"""What each rank of `mstpass bench fsdp` runs: one sharded model for each way to compile it.

The ranks go through the same ways, steps and rounds in the same order, since each step has
collectives. They meet before each timed step. An error ends the whole benchmark: a rank that went
on alone would wait for the others.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mstpass
from mstpass.bench.comparison import INDUCTOR, MST, Outcome, Row, compare_outcomes, own_code
from mstpass.bench.models import Llama, LlamaSize
from mstpass.measure import peak_bytes, timed
from mstpass.torch_internals.caches import fresh_cache
from mstpass.torch_internals.settings import recompilation_fails

BY_BLOCK = ", block by block"
FEW_TOKENS = 16
OVERHEAD = f"eager, {FEW_TOKENS} tokens"  # weights and gradients, sharded and gathered: FSDP2's own
TOLERANCES = 1e-5, 1e-4  # relative errors of the loss and of a gradient, against eager's
_OPTIONS: dict[str, Any] = {"strict": True}


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


_MST: dict[str, Any] = {"backend": "mst", "options": _OPTIONS}
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


class _Sharded:
    """A sharded model in one way, and its step on this rank's batch."""

    def __init__(self, name: str, size: LlamaSize, batch: tuple[Tensor, Tensor]):
        torch.manual_seed(0)  # the same weights on every rank
        model = ShardedLlama(size)
        for module in (model, *model.layers):
            module.__class__ = _with_own_code(type(module))
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        self.model, self.batch, self.fn = model, batch, WAYS[name](model)

    def __call__(self) -> Tensor:
        loss = self.fn(*self.batch)
        loss.backward()
        self.model.zero_grad()
        return loss.detach()

    def with_gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and this rank's shards of the gradients."""
        loss = self.fn(*self.batch)
        loss.backward()
        found = (parameter.grad for parameter in self.model.parameters())
        gradients = [grad.to_local() for grad in found if isinstance(grad, DTensor)]
        self.model.zero_grad()
        return loss.detach(), gradients


def rows(size: LlamaSize, repeats: int) -> dict[str, Row]:
    """This rank's figures of each way."""
    random = torch.Generator().manual_seed(dist.get_rank() + 1)  # every rank has its own batch
    shape = size.batch, size.length + 1
    stream = torch.randint(size.vocabulary, shape, generator=random)
    batch = stream[:, :-1].clone(), stream[:, 1:].clone()
    found: dict[str, Row] = {}
    steps: dict[str, _Sharded] = {}
    reference: Outcome | None = None
    with fresh_cache():
        for name in WAYS:
            row, step = Row(name), _Sharded(name, size, batch)
            made = len(mstpass.reports())
            outcome = step.with_gradients()
            reference = reference or outcome
            compare_outcomes(row, outcome, reference, next(iter(WAYS)), TOLERANCES)
            regions = (r for report in mstpass.reports()[made:] for r in report.regions)
            row.plan = ", ".join(f"{r.kind} {r.mode} in {r.num_chunks}" for r in regions)
            step()
            found[name], steps[name] = row, step
            row.peak_bytes = peak_bytes(step)
    ids, targets = (part[:, :FEW_TOKENS] for part in batch)
    overhead = _Sharded("eager", size, (ids, targets))
    overhead()
    found[OVERHEAD] = Row(OVERHEAD, peak_bytes=peak_bytes(overhead))
    del reference, outcome  # free their memory
    for _ in range(repeats):
        gc.collect()
        for name, step in steps.items():
            dist.barrier()
            with recompilation_fails():
                found[name].seconds += timed({name: step}, 1, warmup=0)[name].seconds
    return found


def main(folder: str, given: str) -> None:
    job = json.loads(given)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = rows(LlamaSize(**job["size"]), job["repeats"])
    text = json.dumps([vars(row) for row in found.values()])
    Path(folder, f"{dist.get_rank()}.json").write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
