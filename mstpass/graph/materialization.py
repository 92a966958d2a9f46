"""``mstpass::realize``: a value that Inductor is to write to memory where it stands in the graph.

Inductor computes a pointwise value where it is read, and keeps alive what it is computed from:
three values of a residual stream in the place of their sum. This op is that value, written once.

Private API, checked with torch 2.11 and 2.13: ``register_lowering`` and ``TensorBox.realize``
(torch/_inductor/lowering.py, ir.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, library
from torch._inductor import lowering

from mstpass.graph.builder import fake_mode_of
from mstpass.graph.copies import copy_of

_LIBRARY = library.Library("mstpass", "DEF")
_LIBRARY.define("realize(Tensor x) -> Tensor")
_LIBRARY.impl("realize", lambda x: x.clone(), "CompositeExplicitAutograd")


def realized(value: fx.Node) -> fx.Node:
    """The value written to memory, behind it in its graph."""
    op = torch.ops.mstpass.realize.default
    if op not in lowering.lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_realize)
    graph = value.graph
    with graph.inserting_after(value):
        node = graph.create_node("call_function", op, (value,), name=copy_of(value.name))
    with fake_mode_of([value]):
        node.meta = {**value.meta, "val": op(value.meta["val"])}
    return node


def _realize(value: Any) -> Any:
    value.realize()
    return value
