"""Models that two ranks share, as cases: each is compiled with mst and compared with eager.

Run by ``tests/ranks/launch.py`` in two processes. A case builds its model twice, with the same
weights on every rank; one copy is run without ``torch.compile``. What a rank finds goes back to the
test as plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass.measure import peak_bytes
from mstpass.problem.solver_registry import registered
from tests.mixed_solver import mixed_wherever_possible
from tests.models import Block, GatedMLP
from tests.ranks.pipeline_case import pipeline
from tests.ranks.token_rules import token_rules

N, D, VOCABULARY = 256, 32, 1024
LARGE = (512, 64, 4096)  # the same for a head whose peak is measured
BF16 = torch.bfloat16

Finding = dict[str, Any]
_Made = TypeVar("_Made", Tensor, nn.Linear)
Step = Callable[[], Iterable[Tensor | None]]  # runs a step, returns what to compare


def local(value: Tensor | None) -> Tensor:
    assert value is not None
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def compared(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module, Callable[..., Any]], Iterable[Tensor | None]],
    backend: str = "mst",
    exact: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> Finding:
    """The error against eager of what ``step(model, compile)`` returns, and mst's reports.

    With ``exact``, which builds the same model in float64, the errors of mst and of eager are those
    against that model.
    """
    eager = [local(value) for value in step(build(), lambda fn: fn)]
    right = eager if exact is None else [local(v) for v in step(exact(), lambda fn: fn)]
    torch.compiler.reset()
    before = len(mstpass.reports())
    given = {"strict": True, **options}

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend=backend, options=given, fullgraph=True)

    found = [local(value) for value in step(build(), compiled)]
    reports = mstpass.reports()[before:]
    ours, eagers = _errors(found, right), _errors(eager, right)
    outcomes = [report.outcome for report in reports]
    return {
        "error": max(ours),
        "errors": ours,
        "eager_errors": eagers,
        "regions": [(r.kind, r.mode, len(r.loops)) for o in outcomes for r in o.regions],
        "solvers": [o.save_plan.solver for o in outcomes if o.save_plan is not None],
        "notes": [note for o in outcomes for note in o.notes],
        "rejections": [str(r) for o in outcomes for r in o.rejections],
        "simulated": [o.peak_bytes for o in outcomes],
        "scheduled": [o.scheduled_peak_bytes for o in outcomes],
    }


def _errors(values: list[Tensor], right: list[Tensor]) -> list[float]:
    pairs = zip(values, right, strict=True)
    return [float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs]


def hidden(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, N // 2, D))).requires_grad_()


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    return [*(p.grad for p in model.parameters()), *(x.grad for x in inputs)]


# ---- tensor and sequence parallel ----------------------------------------------------------------
def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(D, GatedMLP(D, 4 * D, "silu")) for _ in range(2)))


def _mlp_plan(**kwargs: Any) -> dict[str, Any]:
    colwise = {name: ColwiseParallel() for name in ("gate", "up")}
    return {**colwise, "down": RowwiseParallel(**kwargs)}


def tensor_parallel(mesh: DeviceMesh, **options: Any) -> Finding:
    """Gate and up sharded by columns, down by rows: an all-reduce after each MLP."""

    def build() -> nn.Module:
        model = blocks()
        for block in model:
            parallelize_module(block.mlp, mesh, _mlp_plan())
        return model

    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        x = hidden()
        value = compiled(lambda x: model(x).sin().mean())(x)
        value.backward()
        return [value, *gradients(model, x)]

    return compared(build, step, chunk_tokens=64, **options)


def sequence_parallel(mesh: DeviceMesh) -> Finding:
    """Norms on a part of the sequence: an all-gather before each MLP, a reduce-scatter after it."""

    def build() -> nn.Module:
        model = blocks()
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "out": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            }
            parallelize_module(block, mesh, plan)
            parallelize_module(
                block.mlp, mesh, _mlp_plan(output_layouts=Shard(1), use_local_output=False)
            )
        return model

    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        part = hidden().detach().chunk(2, dim=1)[dist.get_rank()].clone().requires_grad_()

        def loss(x: Tensor) -> Tensor:
            sharded = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
            return model(sharded).to_local().sin().sum()

        value = compiled(loss)(part)
        value.backward()
        return [value, *gradients(model, part)]

    return compared(build, step, chunk_tokens=64)


def checkpointed(mesh: DeviceMesh) -> Finding:
    """The same blocks in checkpoints: the collectives inside are run again, on all ranks."""

    def build() -> nn.Module:
        model = blocks()
        for block in model:
            parallelize_module(block.mlp, mesh, _mlp_plan())
        return model

    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        x = hidden()

        def loss(x: Tensor) -> Tensor:
            for block in model:  # type: ignore[attr-defined]
                x = checkpoint(block, x, use_reentrant=False)
            return x.sin().mean()

        value = compiled(loss)(x)
        value.backward()
        return [value, *gradients(model, x)]

    return compared(build, step, chunk_tokens=64)


# ---- heads ---------------------------------------------------------------------------------------
class Head(nn.Module):
    """A linear layer whose rows, the vocabulary, are sharded."""

    def __init__(
        self,
        mesh: DeviceMesh,
        vocabulary: int = VOCABULARY,
        width: int = D,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.head = _in_dtype(nn.Linear(width, vocabulary, bias=False), dtype)
        plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        parallelize_module(self, mesh, plan)


def _in_dtype(made: _Made, dtype: torch.dtype) -> _Made:
    """With the same numbers in bfloat16 and in float64."""
    return made if dtype is torch.float32 else made.to(BF16).to(dtype)


def _labels(tokens: int = N, vocabulary: int = VOCABULARY) -> Tensor:
    torch.manual_seed(2)
    labels = torch.randint(vocabulary, (tokens,))
    labels[::7] = -100
    return labels


def sharded_head(
    mesh: DeviceMesh,
    tokens: int = N,
    width: int = D,
    vocabulary: int = VOCABULARY,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Finding:
    """A head under ``loss_parallel``; also the peak of a step, which is that of the last one.

    In bfloat16 it is compared with float64.
    """
    peaks = []

    def build(dtype: torch.dtype = dtype) -> nn.Module:
        return Head(mesh, vocabulary, width, dtype)

    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        own = model.head.weight.dtype  # type: ignore[union-attr]
        x = _in_dtype(hidden(tokens, width).detach(), own).requires_grad_()  # type: ignore[arg-type]
        labels = _labels(tokens, vocabulary)

        def loss(x: Tensor) -> Tensor:
            logits = model.head(x)  # type: ignore[operator]
            logits = logits.float() if own is BF16 else logits
            value = F.cross_entropy(logits, labels, reduction=reduction)
            return (value.to_local() if isinstance(value, DTensor) else value).sum() * 1.5

        fn = compiled(loss)
        value = x.new_zeros(())

        def run() -> None:
            nonlocal value
            with loss_parallel():
                value = fn(x)
                value.backward()

        run()
        x.grad = model.head.weight.grad = None  # type: ignore[union-attr]
        peaks.append(peak_bytes(run))
        return [value, *gradients(model, x)]

    exact = (lambda: build(torch.float64)) if dtype is BF16 else None
    found = compared(build, step, exact=exact, **options)
    return {**found, "peak": peaks[-1]}


def sections_of_a_share(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Finding:
    """The gradient of a rank's words in sections, wherever that is possible."""
    registered["mixed"] = mixed_wherever_possible
    return sharded_head(mesh, dtype=dtype, chunk_tokens=64, memory_budget=0.5, solver="mixed")


def plans_apart(mesh: DeviceMesh) -> Finding:
    """Shards of different sizes; one rank runs loops, the other one does not."""
    own = {"chunk_tokens": 64} if dist.get_rank() == 0 else {"chunk": "off"}
    return sharded_head(mesh, vocabulary=VOCABULARY + 1, **own)


class _SumOfRanks(torch.autograd.Function):
    """The all-reduce of Megatron's vocabulary-parallel loss: its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str) -> Tensor:
        return funcol.all_reduce(x, op, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def own_loss(mesh: DeviceMesh) -> Finding:
    """A vocabulary-parallel loss written with functional collectives, without DTensor."""
    rank, share = dist.get_rank(), VOCABULARY // 2

    def build() -> nn.Module:
        torch.manual_seed(rank)
        return nn.Linear(D, share, bias=False)

    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        x, labels = hidden(N, D), _labels().clamp_min(0)

        def loss(x: Tensor) -> Tensor:
            logits = model(x).float()
            most = _SumOfRanks.apply(logits.detach().amax(-1, keepdim=True), "max")
            shifted = logits - most
            own = labels - rank * share
            outside = (own < 0) | (own >= share)
            picked = shifted[torch.arange(N), own.masked_fill(outside, 0)]
            picked = _SumOfRanks.apply(picked.masked_fill(outside, 0.0), "sum")
            total = _SumOfRanks.apply(shifted.exp().sum(-1), "sum")
            return (total.log() - picked).mean()

        value = compiled(loss)(x)
        value.backward()
        return [value, *gradients(model, x)]

    return compared(build, step, chunk_tokens=64)


# ---- attention on parts of the sequence ----------------------------------------------------------
class Attention(nn.Module):
    """Causal attention on this rank's part of the sequence, then an MLP on that part."""

    def __init__(self, exchange: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.norm, self.block = nn.LayerNorm(D), Block(D, GatedMLP(D, 4 * D, "silu"))
        self.exchange = exchange

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.block(x_BSD + self.out(self.exchange(self, self.norm(x_BSD))))


def _all_to_all(x: Tensor) -> Tensor:
    """Swap blocks of the first dim with the other ranks."""
    return funcol.all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)


def ulysses_attention(module: nn.Module, x_BSD: Tensor) -> Tensor:
    """All of the sequence for a part of the heads, by an all-to-all before and after attention."""
    B, S, _ = x_BSD.shape
    qkv = module.qkv(x_BSD).view(B, S, 2, 3, 2, D // 4).permute(2, 0, 3, 4, 1, 5)  # ranks first
    swapped = _all_to_all(qkv).permute(2, 1, 3, 0, 4, 5).reshape(3, B, 2, 2 * S, D // 4)
    mixed = F.scaled_dot_product_attention(*swapped, is_causal=True)
    back = _all_to_all(mixed.view(B, 2, 2, S, D // 4).permute(2, 0, 1, 3, 4))
    return back.permute(1, 3, 0, 2, 4).reshape(B, S, D)


def _gathered_keys(module: nn.Module, x_BSD: Tensor) -> Tensor:
    """Keys and values of the whole sequence for the queries of this part."""
    B, S, _ = x_BSD.shape
    q, k, v = module.qkv(x_BSD).view(B, S, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
    both = torch.stack((k, v)).movedim(3, 0).contiguous()
    gathered = funcol.all_gather_tensor_autograd(both, 0, dist.group.WORLD)
    keys, values = gathered.movedim(0, 3)
    first = dist.get_rank() * S
    rows = torch.arange(S)[:, None] + first
    allowed = rows >= torch.arange(2 * S)[None]
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
    return mixed.transpose(1, 2).reshape(B, S, D)


def _attention(exchange: Callable[[nn.Module, Tensor], Tensor]) -> Finding:
    def step(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor | None]:
        part = hidden().detach().chunk(2, dim=1)[dist.get_rank()].clone().requires_grad_()
        value = compiled(lambda x: model(x).sin().sum())(part)
        value.backward()
        return [value, *gradients(model, part)]

    return compared(lambda: Attention(exchange), step, chunk_tokens=64)


def ulysses(mesh: DeviceMesh) -> Finding:
    return _attention(ulysses_attention)


def gathered_keys(mesh: DeviceMesh) -> Finding:
    return _attention(_gathered_keys)


CASES: dict[str, Callable[[DeviceMesh], Finding]] = {
    "token rules": token_rules,
    "tensor parallel": tensor_parallel,
    "tensor parallel, least memory": lambda mesh: tensor_parallel(mesh, memory_budget=0.0),
    "sequence parallel": sequence_parallel,
    "checkpointed": checkpointed,
    "sharded head": lambda mesh: sharded_head(mesh, *LARGE, chunk_tokens=64, memory_budget=0.0),
    "sharded head, sections": sections_of_a_share,
    "sharded head, bfloat16": lambda mesh: sharded_head(mesh, dtype=BF16, chunk_tokens=64),
    "sharded head, sections, bfloat16": lambda mesh: sections_of_a_share(mesh, BF16),
    "sharded head, sum": lambda mesh: sharded_head(mesh, reduction="sum", chunk_tokens=100),
    "sharded head, none": lambda mesh: sharded_head(mesh, reduction="none", chunk_tokens=64),
    "plans apart": plans_apart,
    "own loss": own_loss,
    "Ulysses": ulysses,
    "pipeline": pipeline,
    "gathered keys": gathered_keys,
}
