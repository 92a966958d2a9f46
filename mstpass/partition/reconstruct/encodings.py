"""What crosses written in fewer bytes, with nothing lost.

    narrow: a float32 value whose elements are all bfloat16 (or float16) numbers, because it was
            cast from one, crosses in that type;
    bits:   a bool tensor crosses with eight elements in a byte. The last dim D is cut in eight
            parts of D / 8; part k is bit k, so that reads and writes are contiguous.

Both are exact for every value, infinities and NaN included (their payload aside).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import value_of
from mstpass.graph.loop_op import STACK, mst_loop
from mstpass.partition.reconstruct.rule import CAST, Writer, aten, dtype_of, prims, rank

_LOW = (torch.bfloat16, torch.float16)
_BYTE = torch.uint8
BITS = 8


def encoding_of(node: fx.Node) -> str:
    """The name of the encoding that fits the value; empty where none does."""
    if dtype_of(node) == torch.float32 and low_type(node) is not None:
        return "narrow"
    value = value_of(node)
    if value is None or value.dtype != torch.bool or value.dim() == 0:
        return ""
    last = value.shape[-1]
    return "bits" if isinstance(last, int) and last > 0 and last % BITS == 0 else ""


def bytes_after(node: fx.Node, encoding: str, size: int) -> int:
    if encoding == "bits":
        return size // BITS
    return size // 2 if encoding == "narrow" else size


def low_type(node: fx.Node) -> torch.dtype | None:
    """The 16-bit type that all elements of a float32 value are numbers of, if that is certain."""
    while ops.is_cheap_view(node) or node.target is aten.clone.default:
        node = node.all_input_nodes[0]
    if node.target is CAST:
        before = dtype_of(node.all_input_nodes[0])
        return before if before in _LOW else None
    if node.target is operator.getitem:
        return _low_loop_result(node)
    return None


def _low_loop_result(node: fx.Node) -> torch.dtype | None:
    """A loop that stacks chunks copies them; what its body returns decides."""
    loop, position = node.args[:2]
    if not isinstance(loop, fx.Node) or loop.target is not mst_loop:
        return None
    body: Any = loop.args[0]
    specs: Any = loop.args[4]
    if specs[position][0] != STACK:
        return None
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    results: Any = module.graph.output_node().args[0]
    return low_type(results[position])


def encode(writer: Writer, node: fx.Node, value: fx.Node, encoding: str) -> fx.Node:
    """``value``, the new graph's version of ``node``, in fewer bytes."""
    if encoding == "narrow":
        return writer.call(CAST, value, low_type(node))
    *outer, last = writer.shape(value)
    assert isinstance(last, int)
    parts = writer.call(aten.reshape.default, value, [*outer, BITS, last // BITS])
    packed: fx.Node | None = None
    for k in range(BITS):
        part = writer.call(CAST, writer.call(aten.select.int, parts, rank(value) - 1, k), _BYTE)
        part = writer.call(aten.mul.Tensor, part, 1 << k)
        packed = part if packed is None else writer.call(aten.bitwise_or.Tensor, packed, part)
    assert packed is not None
    return packed


def decode(writer: Writer, node: fx.Node, packed: fx.Node, encoding: str) -> fx.Node:
    if encoding == "narrow":
        return writer.call(CAST, packed, dtype_of(node))
    value = value_of(packed)
    assert value is not None
    numbers = writer.call(
        prims.iota.default,
        BITS,
        start=0,
        step=1,
        dtype=_BYTE,
        device=value.device,
        requires_grad=False,
    )
    weights = writer.call(aten.bitwise_left_shift.Tensor, _ones(writer, numbers), numbers)
    column = writer.call(aten.unsqueeze.default, weights, 1)
    rows = writer.call(aten.unsqueeze.default, packed, rank(packed) - 1)
    found = writer.call(aten.bitwise_and.Tensor, rows, column)
    mask = writer.call(aten.ne.Scalar, found, 0)
    return writer.call(aten.reshape.default, mask, writer.shape(node))


def _ones(writer: Writer, like: fx.Node) -> fx.Node:
    return writer.call(
        aten.full.default, [BITS], 1, dtype=_BYTE, device=like.meta["val"].device, pin_memory=False
    )
