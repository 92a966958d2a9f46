"""Tensors without data, and what they raise where data would be needed.

Graphs hold a fake tensor for each value; new nodes are computed under the same mode, and a step can
be traced, or run without computing. Source: torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "as_while_tracing",
    "without_guards",
]

APIS = PrivateApis(
    names=(
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs)",
        "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.suppress_guards",
        "torch._guards.tracing(context)",
        "torch._guards.TracingContext(fake_mode)",
    ),
)


def as_while_tracing(graph: fx.Graph) -> AbstractContextManager[Any]:
    """Let torch find the mode of a graph's fake tensors, as it does while the graph is traced."""
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return tracing(TracingContext(mode))


@contextlib.contextmanager
def without_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Ops compute fake values of this mode, and no comparison of sizes becomes a guard."""
    shapes = mode.shape_env
    with mode, contextlib.nullcontext() if shapes is None else shapes.suppress_guards():
        yield


def probe() -> None:
    APIS.require()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.ones(2))
    APIS.expect(isinstance(fake, FakeTensor) and fake.fake_mode is mode, "a fake has no fake_mode")
    APIS.expect(hasattr(mode, "allow_scalar_outputs"), "FakeTensorMode has no allow_scalar_outputs")
    raised = []
    for op, expected in (
        (torch.nonzero, DynamicOutputShapeException),
        (lambda value: value.sum().item(), DataDependentOutputException),
    ):
        with mode, contextlib.suppress(expected):
            op(fake)
            raised.append(expected.__name__)
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = fake
    with as_while_tracing(graph):
        found = TracingContext.try_get()
    APIS.expect(found is not None and found.fake_mode is mode, "a TracingContext has no fake_mode")
    APIS.expect(not raised, f"fake tensors do not raise {', '.join(raised)}")
