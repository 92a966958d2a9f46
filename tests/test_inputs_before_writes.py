"""Backward reads inputs that the step overwrites as they were before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.fuzz.case import Case
from mstpass.graph.joint import JointGraph
from mstpass.normalize.plain_values import as_copies, inputs_before_writes
from tests.checks import compiled, joint_graph
from tests.test_fuzz_findings import held

Step = Callable[..., Tensor]
_WRITE = torch.ops.aten.copy_.default
_BEFORE = torch.ops.mstpass.before_write.default
_BUDGETS = ["free", 0.5, 0.0]


def read_then_written(weight: Tensor, scratch: Tensor) -> Tensor:
    """Backward needs ``exp(scratch)`` in float64, which takes twice the bytes of ``scratch``."""
    loss = (weight * scratch.double().exp()).sum()
    scratch.mul_(0.5)
    return loss


def read_through_a_view(weight: Tensor, scratch: Tensor) -> Tensor:
    loss = (weight * scratch.view(2, 4).t().double().exp().flatten()).sum()
    scratch.add_(1)
    return loss


def written_then_read(weight: Tensor, scratch: Tensor) -> Tensor:
    scratch.mul_(0.5)
    return (weight * scratch.double().exp()).sum() + (scratch * weight).sin().sum()


def counted(weight: Tensor, scratch: Tensor) -> Tensor:
    scratch.add_(1)
    return weight.exp().sum()


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, requires_grad=True), torch.randn(8)


def _gradient(step: Step) -> tuple[Tensor, Tensor]:
    weight, scratch = _inputs()
    step(weight, scratch).backward()
    assert weight.grad is not None
    return weight.grad, scratch


@pytest.mark.op_by_op
@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("step", [read_then_written, read_through_a_view, written_then_read])
def test_gradients_are_those_of_the_old_value(step: Step, budget: Any) -> None:
    found = _gradient(compiled(step, memory_budget=budget))
    torch.testing.assert_close(found, _gradient(step))


def test_gradients_of_kernels_are_those_of_the_old_value() -> None:
    found = _gradient(compiled(read_then_written))
    torch.testing.assert_close(found, _gradient(read_then_written))


@pytest.mark.op_by_op
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of the input
@pytest.mark.parametrize("budget", _BUDGETS)
def test_an_input_that_requires_a_gradient(budget: Any) -> None:
    """Its new value is copied behind the forward graph; torch's partitioner saves the old one."""

    def results(step: Step) -> list[Tensor]:
        weight, scratch = _inputs()
        scratch.requires_grad_()
        step(weight, scratch * 1.0).backward()
        assert weight.grad is not None and scratch.grad is not None
        return [weight.grad, scratch.grad]

    found = results(compiled(written_then_read, memory_budget=budget))
    torch.testing.assert_close(found, results(written_then_read))


class Head(nn.Module):
    """A loop over the head's tokens computes its input again, from what the step overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor, scratch: Tensor, labels: Tensor) -> Tensor:
        scratch.mul_(0.5)
        logits = self.head(x + scratch.unsqueeze(-1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.op_by_op
@pytest.mark.parametrize("budget", _BUDGETS)
def test_a_loop_reads_the_old_value(budget: Any) -> None:
    torch.manual_seed(0)
    model, x = Head(), torch.randn(2, 64, 16, requires_grad=True)
    scratch, labels = torch.randn(2, 64), torch.randint(64, (2, 64))

    def results(step: Step) -> list[Tensor]:
        written = scratch.clone()
        loss = step(x, written, labels)
        return [written, *torch.autograd.grad(loss, [x, model.head.weight])]

    found = results(compiled(model, memory_budget=budget, chunk_tokens=32))
    torch.testing.assert_close(found, results(model))


def test_loops_that_mix_tokens_read_the_old_value() -> None:
    """The fuzzer's case: scores of tokens by tokens, in loops that begin with the input's value."""
    held(
        Case(
            logit_ops=("self_product", "roll_tokens"),
            mutations=("input_scaled", "counter"),
            variants=("half", "over heads"),
        )
    )


@pytest.mark.parametrize(
    ("step", "needed"), [(read_then_written, True), (written_then_read, True), (counted, False)]
)
def test_only_what_backward_depends_on_is_read_otherwise(step: Step, needed: bool) -> None:
    joint = JointGraph(*joint_graph(step, *_inputs()))
    new, _ = inputs_before_writes(joint)
    assert (new is not joint) == needed
    if needed:
        (before,) = new.module.graph.find_nodes(op="call_function", target=_BEFORE)
        (write,) = new.module.graph.find_nodes(op="call_function", target=_WRITE)
        (value,) = before.all_input_nodes
        assert set(value.users) == {before, write}
        as_copies((new.module, new.module))
        assert before.target is torch.ops.aten.clone.default


def test_an_input_that_is_written_before_it_is_read_stays() -> None:
    """A graph with a write in its midst reads the new value behind it, as FSDP's graphs do."""
    module, outputs = joint_graph(written_then_read, *_inputs())
    graph = module.graph
    (write,) = graph.find_nodes(op="call_function", target=_WRITE)
    value = write.args[0]
    assert isinstance(value, torch.fx.Node)
    write.all_input_nodes[1].append(write)
    with graph.inserting_after(write):
        later = graph.call_function(torch.ops.aten.sin.default, (value,))
        later.meta = dict(value.meta)
    joint = JointGraph(module, outputs)
    assert inputs_before_writes(joint)[0] is joint
