"""Define a higher-order op of one's own: what it computes, and its results on fake tensors.

``mst_loop`` is such an op. It has no gradient: it is put into graphs that have their backward.
Source: torch/_higher_order_ops/utils.py, torch/_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._higher_order_ops.utils.autograd_not_implemented(deferred_error)",
        "torch._ops.HigherOrderOperator(name, cacheable)",
        "torch._ops.HigherOrderOperator.py_impl",
        "torch._ops.HigherOrderOperator.py_autograd_impl",
        "torch._C.DispatchKey.CompositeExplicitAutograd",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ),
)


def implement(op: HigherOrderOperator, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give the op its implementations; ``fake`` gets the fake mode before the op's arguments."""
    op.py_autograd_impl(autograd_not_implemented(op, deferred_error=True))
    op.py_impl(FakeTensorMode)(fake)
    op.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(eager)


class _Twice(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("mstpass_probe_twice", cacheable=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x)


def probe() -> None:
    APIS.require()
    twice = _Twice()
    implement(twice, eager=lambda x: x * 2, fake=lambda mode, x: x.new_empty(x.shape))
    APIS.expect(twice(torch.ones(2)).tolist() == [2, 2], "a higher-order op runs nothing")
    APIS.expect(twice.cacheable(), "a higher-order op is not cacheable")
    with FakeTensorMode() as mode:
        found = twice(torch.ones(3))
    APIS.expect(getattr(found, "fake_mode", None) is mode, "a higher-order op is not run as fake")
