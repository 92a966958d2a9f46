"""FSDP2 around a model, compiled in every way that people do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import mstpass
from tests.ranks import steps

STRICT = {"strict": True}
compiled = functools.partial(torch.compile, backend="mst", options=STRICT)
Step = Callable[[steps.Model, Callable[..., Tensor]], object]


def _one_step(_: steps.Model, fn: Callable[..., Tensor]) -> None:
    fn(*steps.batch()).backward()


def _eager(model: steps.Model) -> steps.Model:
    return model


def _whole(model: steps.Model, **how: Any) -> Callable[..., Tensor]:
    return compiled(model, **how)


def _by_block(model: steps.Model) -> steps.Model:
    for layer in model.layers:
        layer.compile(backend="mst", options=STRICT)
    model.head_and_loss = compiled(model.head_and_loss)  # type: ignore[method-assign]
    return model


def _sharded(model: steps.Model, **how: Any) -> steps.Model:
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def _tried(
    compile: Callable[[steps.Model], Callable[..., Tensor]] = _whole,
    change: Callable[[steps.Model], object] = lambda model: None,
    step: Step = _one_step,
    new: Callable[[], steps.Model] = steps.Model,
    measured: bool = True,
    **how: Any,
) -> dict[str, Any]:
    """A step in eager mode and under mst: gradients, peaks, and how often weights are gathered.

    Args:
        change: what is done to the model before it is sharded.
        new: makes the model.
        measured: whether gathers and peaks are.
        how: arguments of ``fully_shard``.
    """
    found: dict[str, Any] = {"gathers": [], "peaks": []}
    gradients = []
    for build in (_eager, compile):
        model = steps.made(new)
        change(model)
        fn = build(_sharded(model, **how))
        found["reports"] = steps.reports_of(lambda: step(model, fn))  # noqa: B023
        gradients.append(steps.gradients(model))
        if not measured:
            continue
        model.zero_grad()
        found["gathers"].append(_num_gathers(lambda: step(model, fn)))  # noqa: B023
        model.zero_grad()
        found["peaks"].append(steps.peak_bytes(lambda: step(model, fn)))  # noqa: B023
    return {**found, "error": steps.error(gradients[1], gradients[0])}


def _num_gathers(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return sum(e.count for e in profiler.key_averages() if e.key == "c10d::_allgather_base_")


# ---- cases ---------------------------------------------------------------------------------------
def explained() -> dict[str, Any]:
    """`explain` and `explain_all` on one rank alone, before the first step and after it."""
    model = _sharded(steps.made(steps.Model))
    fn = functools.partial(model, *steps.batch())
    reports: list[mstpass.Report] = []
    gradients: list[list[Tensor]] = []
    for is_last in (False, False, True):
        if dist.get_rank() == 0 and not is_last:
            reports += mstpass.explain_all(fn)
            with pytest.raises(mstpass.ExplainError, match=r"FSDP2.*mstpass\.explain_all"):
                mstpass.explain(fn)
        fn().backward()
        gradients.append(steps.gradients(model))
        model.zero_grad()
    return {
        "reports": [steps.summary(report) for report in reports],
        "error": max(steps.error(each, gradients[-1]) for each in gradients),
    }


def whole() -> dict[str, Any]:
    return _tried()


def resharded() -> dict[str, Any]:
    return _tried(reshard_after_forward=True)


def by_block() -> dict[str, Any]:
    return _tried(_by_block)


def kept() -> dict[str, Any]:
    return _tried(reshard_after_forward=False)


def offloaded() -> dict[str, Any]:
    return _tried(offload_policy=CPUOffloadPolicy(pin_memory=False))


def accumulated() -> dict[str, Any]:
    """Gradients of the first batch are not reduced before those of the second are there."""

    def step(model: steps.Model, fn: Callable[..., Tensor]) -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            fn(*steps.batch(seed=int(last))).backward()

    return _tried(step=step)


def checkpointed() -> dict[str, Any]:
    def change(model: steps.Model) -> None:
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)

    return _tried(change=change)


def mixed() -> dict[str, Any]:
    """bfloat16 weights and float32 reductions: as far from float32 as eager is."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = steps.batch(2 * steps.TOKENS)
    gradients, reports = [], []
    for build, how in (
        (_eager, {}),
        (_eager, {"mp_policy": policy}),
        (_whole, {"mp_policy": policy}),
    ):
        model = steps.model()
        fn = build(_sharded(model, **how))
        reports = steps.reports_of(lambda: fn(*batch).backward())  # noqa: B023
        gradients.append(steps.gradients(model))
    right, eager, ours = gradients
    errors = steps.error(ours, right), steps.error(eager, right)
    return {"error": errors[0], "eager": errors[1], "reports": reports}


def head_of_its_own() -> dict[str, Any]:
    """FSDP2 wraps the head by itself, so that its hooks part it from the loss."""
    return _tried(change=lambda model: fully_shard(model.head))


class _HeadAndLoss(nn.Module):
    def __init__(self, model: steps.Model) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class _WithUnit(steps.Model):
    def __init__(self) -> None:
        super().__init__()
        self.unit = _HeadAndLoss(self)
        del self.norm, self.head

    def head_and_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.unit(x, labels)


def head_and_loss_of_their_own() -> dict[str, Any]:
    """FSDP2 wraps a module with head and loss, and keeps it gathered."""
    return _tried(change=lambda m: fully_shard(m.unit, reshard_after_forward=False), new=_WithUnit)


class _LoRA(nn.Module):
    """A frozen linear layer and a product of two small ones, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 8, bias=False)
        self.b = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def lora() -> dict[str, Any]:
    """Small products beside every product of the blocks; all else is frozen, the head too."""

    def change(model: steps.Model) -> None:
        model.requires_grad_(False)
        for layer in model.layers:
            for name in ("up", "down"):
                setattr(layer.mlp, name, _LoRA(getattr(layer.mlp, name)))

    return _tried(change=change)


def hybrid() -> dict[str, Any]:
    """Four ranks: shards on two, replicated twice."""
    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return _tried(mesh=mesh)


def _lengths(*lengths: tuple[int, int], **how: Any) -> dict[str, Any]:
    """Steps whose lengths differ between the ranks; the number of graphs after each."""
    graphs: list[int] = []

    def step(model: steps.Model, fn: Callable[..., Tensor]) -> None:
        for k, by_rank in enumerate(lengths):
            before = counters["stats"]["unique_graphs"]
            fn(*steps.batch(by_rank[dist.get_rank() % 2], seed=k)).backward()
            graphs.append(counters["stats"]["unique_graphs"] - before)

    found = _tried(functools.partial(_whole, **how), step=step, measured=False)
    return {**found, "graphs": graphs[len(graphs) // 2 :]}  # the first half is of eager mode


def lengths() -> dict[str, Any]:
    """Only rank 0 has a new length in the second step, and only rank 1 in the third."""
    return _lengths((768, 640), (512, 640), (512, 896))


def symbolic_lengths() -> dict[str, Any]:
    return _lengths((768, 640), (512, 640), (512, 896), dynamic=True)
