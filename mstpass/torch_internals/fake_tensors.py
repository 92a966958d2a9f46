"""Tensors without data, and what they raise where data would be needed.

Graphs hold a fake tensor for each value; new nodes are computed under the same mode, and a step can
be traced, or run without computing. Source: torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import contextlib

import torch
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
]

APIS = PrivateApis(
    names=(
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs)",
        "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    ),
)


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
    APIS.expect(not raised, f"fake tensors do not raise {', '.join(raised)}")
