"""``mstpass::realize``: a value that Inductor is to write to memory where it stands in the graph.

Inductor computes a pointwise value where it is read, and keeps alive what it is computed from:
three values of a residual stream in the place of their sum. This op is that value, written once.
"""

from __future__ import annotations

import torch
from torch import fx, library

from mstpass.graph.builder import fake_mode_of
from mstpass.graph.copies import copy_of
from mstpass.torch_internals.lowerings import write_to_memory

_LIBRARY = library.Library("mstpass", "DEF")
_LIBRARY.define("realize(Tensor x) -> Tensor")
_LIBRARY.impl("realize", lambda x: x.clone(), "CompositeExplicitAutograd")


def realized(value: fx.Node) -> fx.Node:
    """The value written to memory, behind it in its graph."""
    op = torch.ops.mstpass.realize.default
    write_to_memory(op)
    graph = value.graph
    with graph.inserting_after(value):
        node = graph.create_node("call_function", op, (value,), name=copy_of(value.name))
    with fake_mode_of([value]):
        node.meta = {**value.meta, "val": op(value.meta["val"])}
    return node
