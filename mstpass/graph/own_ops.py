"""``mstpass::realize`` makes Inductor write a value to a buffer at once.

Inductor computes a pointwise value where it is read and until then keeps its operands alive, say
three summands of a residual stream instead of their sum. This op returns its operand unchanged, but
Inductor *materializes* it: it writes the value to a buffer at this place in the graph ("realize" in
Inductor's words).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from mstpass.graph.builder import fake_mode_of
from mstpass.graph.node_meta import copy_name
from mstpass.torch_internals.graphs import own_op
from mstpass.torch_internals.inductor import write_to_memory


def _written(x: Tensor) -> Tensor:
    """A copy that is laid out in memory as its operand, gaps and all, as Inductor has it.

    ``clone`` leaves out the gaps of a slice. Loops read a value by its strides. Of a dim that is
    expanded each element is copied once.
    """
    copy = result = _allocated(x)
    for dim, (size, stride) in enumerate(zip(x.size(), x.stride(), strict=True)):
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 0):
            copy, x = copy.narrow(dim, 0, 1), x.narrow(dim, 0, 1)
    copy.copy_(x)
    return result


def _allocated(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


REALIZE = own_op("realize(Tensor x) -> Tensor", _written, _allocated)


def materialize(value: fx.Node) -> fx.Node:
    """Add the op directly after ``value`` and return its node. The users stay as they are."""
    write_to_memory(REALIZE)
    graph = value.graph
    with graph.inserting_after(value):
        node = graph.create_node("call_function", REALIZE, (value,), name=copy_name(value.name))
    with fake_mode_of([value]):
        node.meta = {**value.meta, "val": REALIZE(value.meta["val"])}
    return node
