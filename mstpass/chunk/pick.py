"""``gather`` of one element a row, in a form that a chunk's other kernels can absorb.

A gather's scattered reads, fused with the gradient's kernel, keep Inductor from writing the
gradient over the logits: a second buffer of chunk x vocabulary. Here the element is read in order,

    x[row, index[row]] = sum over v of where(v == index[row], x[row, v], 0)

which is equal: all other terms are zero. Picking commutes with pointwise ops whose other operands
are the same for the whole row, ``pick(x - r) = pick(x) - r``, with the same rounding; so the sum is
taken of the product itself and shares the pass that looks for the row's maximum.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.build import Builder
from mstpass.graph.joint import tensors_of, value_of

aten = torch.ops.aten


def picks_one(node: fx.Node) -> bool:
    """A gather of one floating element a row."""
    if node.target is not aten.gather.default:
        return False
    source, dim, index = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    value, places = value_of(source), value_of(index)
    assert value is not None and places is not None
    return places.dim() > 1 and places.shape[dim] == 1 and value.is_floating_point()


def pick(builder: Builder, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """``gather(source, dim, index)`` with an index of size 1 along ``dim``."""
    rank = source.meta["val"].dim()
    inner = _varying_operand(source, rank - dim % rank)
    if inner is None:
        return _masked_sum(builder, source, dim % rank, index)
    picked = pick(builder, inner, dim % rank, index)
    args, kwargs = fx.map_arg(
        (source.args, source.kwargs), lambda node: picked if node is inner else node
    )
    return builder.call(source.target, *args, **kwargs)


def _varying_operand(node: fx.Node, from_right: int) -> fx.Node | None:
    """The one operand of a pointwise op that varies along the dim, if no other does."""
    if node.op != "call_function" or not ops.is_pointwise(node):
        return None
    varying = [
        operand
        for operand in node.all_input_nodes
        for value in tensors_of(operand.meta.get("val"))
        if value.dim() >= from_right and value.shape[-from_right] != 1
    ]
    if len(varying) != 1 or varying[0].meta["val"].shape != node.meta["val"].shape:
        return None
    return varying[0]


def _masked_sum(builder: Builder, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    value, call = source.meta["val"], builder.call
    shape = [1] * value.dim()
    shape[dim] = value.shape[dim]
    places = call(
        torch.ops.prims.iota.default,
        value.shape[dim],
        start=0,
        step=1,
        dtype=torch.int64,
        device=value.device,
        requires_grad=False,
    )
    hit = call(aten.eq.Tensor, call(aten.reshape.default, places, shape), index)
    zero = call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    return call(aten.sum.dim_IntList, call(aten.where.self, hit, source, zero), [dim], True)
