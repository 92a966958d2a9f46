"""The hooks into torch do what they are for: torch calls them, and they find what they read.

A version of torch that renames what a hook reads may leave a compilation intact, and only the
hook without effect. These tests fail then. ``test_torch_internals.py`` asks for the names alone.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass import backend
from mstpass.linter.call_stack import OpContext, current_context
from mstpass.memory import scheduled_peak
from mstpass.torch_internals import fake_tensors, scheduler_mends
from tests.checks import compiled


def _head() -> torch.Tensor:
    """The loss of an LM head, which is computed in chunks."""
    x_ND = torch.randn(512, 32, requires_grad=True)
    weight_VD = torch.randn(2048, 32, requires_grad=True)
    labels_N = torch.randint(2048, (512,))
    loss = lambda x, weight: F.cross_entropy(x @ weight.t(), labels_N)
    return compiled(loss, chunk_tokens=64)(x_ND, weight_VD)


def test_inductor_calls_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for hook in (backend.Partitioner, backend.LowerLoops, scheduled_peak.ReadSchedule):
        call: Any = hook.__call__

        def counted(self: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            calls.append(type(self).__name__)
            return _call(self, *args, **kwargs)

        monkeypatch.setattr(hook, "__call__", counted)
    _head().backward()
    assert mstpass.reports()[-1].regions
    assert calls.count("Partitioner") == 1
    assert calls.count("LowerLoops") >= 2  # for forward and backward; bodies of loops may add some
    assert calls.count("ReadSchedule") >= 3  # for forward, backward and the body of each loop


def test_inductors_schedule_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """In full: the backend itself goes on with its own estimate where that fails."""
    with caplog.at_level(logging.DEBUG, logger=scheduled_peak.__name__):
        _head()
    assert [r.message for r in caplog.records if r.name == scheduled_peak.__name__] == []
    assert mstpass.reports()[-1].outcome.scheduled_peak_bytes


class _Contexts(TorchDispatchMode):
    """Notes where each sine is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[OpContext] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            self.found.append(current_context())
        return func(*args, **(kwargs or {}))


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


class _SineWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = _Sine.backward


class _Module(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize("function", [_Sine, _SineWithSetup])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frames_say_where_an_op_runs(function: Any, reentrant: bool) -> None:
    module = _Module(function)
    x = torch.randn(3, requires_grad=True)
    with _Contexts() as contexts:
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    forward, again = contexts.found
    for context in (forward, again):
        assert [run.function for run in context.checkpoints] == [module]
        assert [called for called, _ in context.modules] == [module]
        assert (context.modules_inside, context.upkeep) == (1, False)
        assert any(isinstance(value, torch.Tensor) for value in context.function_inputs[0])
    assert (forward.backward_id, forward.checkpoints[0].reentrant) == (None, reentrant)
    assert forward.checkpoints[0].recordable
    assert again.backward_id is not None and again.recomputed


def test_torch_2_11_counts_the_hints_of_unknown_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As later versions do: kernels that share a chunk of unknown length are fused."""

    class Graph:
        def __init__(self, shapes: ShapeEnv):
            self.sizevars = SimpleNamespace(shape_env=shapes)

        def get_dep_size_hint(self, dep: Any, count_bytes: bool = True) -> int:
            return -1

    def operand(numel: sympy.Expr) -> Any:
        return SimpleNamespace(
            get_numel=lambda: numel, numbytes_hint=lambda: 28, numel_hint=lambda: 7
        )

    shapes = ShapeEnv()
    hinted, unknown = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
    fake_tensors.set_hint(hinted, 7)
    graph: Any = Graph(shapes)
    monkeypatch.setattr(scheduler_mends, "_COUNTS_HINTS", False)
    scheduler_mends.count_hints(graph)
    count = graph.get_dep_size_hint
    assert count(operand(hinted.node.expr)) == 28
    assert count(operand(hinted.node.expr), count_bytes=False) == 7
    assert count(operand(unknown.node.expr * hinted.node.expr)) == -1
    assert count(operand(sympy.Integer(5))) == -1
    scheduler_mends.count_hints(graph)  # a graph is scheduled twice: the method stays
    assert graph.get_dep_size_hint is count
