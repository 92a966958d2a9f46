"""Encodings: a saved value crosses in fewer bytes, and nothing is lost.

    narrow  A float32 value that was cast from bfloat16 (or float16) crosses in that type: all its
            elements are numbers of it.
    bits    A bool tensor [..., D] crosses as uint8 [..., D / 8]. The last dim is cut into eight
            parts, and part k becomes bit k, so that reads and writes are contiguous.

Both are exact for every value, also for infinities and NaN (but for the payload of a NaN).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import value_of
from mstpass.graph.loop_op import mst_loop, stacked_dim
from mstpass.partition.reconstruct.rule import CAST, Writer, aten, dtype_of, prims, rank

NARROW, BITS = "narrow", "bits"
_LOW_DTYPES = (torch.bfloat16, torch.float16)
_BITS_PER_BYTE = 8


def encoding_of(node: fx.Node) -> str:
    """The name of the encoding that fits the value; empty if none does."""
    if dtype_of(node) == torch.float32 and low_dtype(node) is not None:
        return NARROW
    value = value_of(node)
    if value is None or value.dtype != torch.bool or value.dim() == 0:
        return ""
    last = value.shape[-1]
    fills_bytes = isinstance(last, int) and last > 0 and last % _BITS_PER_BYTE == 0
    return BITS if fills_bytes else ""


def encoded_bytes(encoding: str, size: int) -> int:
    """Bytes that cross in place of ``size`` bytes."""
    return size // _BITS_PER_BYTE if encoding == BITS else size // 2


def low_dtype(node: fx.Node) -> torch.dtype | None:
    """The 16-bit dtype that holds all elements of a float32 value exactly; None if not certain."""
    while ops.is_cheap_view(node) or node.target is aten.clone.default:
        node = node.all_input_nodes[0]
    if node.target is CAST:
        before = dtype_of(node.all_input_nodes[0])
        return before if before in _LOW_DTYPES else None
    if node.target is operator.getitem:
        return _low_dtype_of_loop_result(node)
    return None


def _low_dtype_of_loop_result(node: fx.Node) -> torch.dtype | None:
    """For a result that a loop stacks from chunks: the 16-bit dtype of what its body returns."""
    loop, position = node.args[:2]
    if not isinstance(loop, fx.Node) or loop.target is not mst_loop:
        return None
    body: Any = loop.args[0]
    specs: Any = loop.args[4]
    if stacked_dim(specs[position][0]) is None:
        return None
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    results: Any = module.graph.output_node().args[0]
    return low_dtype(results[position])


def encode(writer: Writer, node: fx.Node, value: fx.Node, encoding: str) -> fx.Node:
    """Encode ``value``, the new graph's version of ``node``."""
    if encoding == NARROW:
        return writer.call(CAST, value, low_dtype(node))
    *outer, last = writer.shape(value)
    assert isinstance(last, int), "the last dim is a number"
    shape = [*outer, _BITS_PER_BYTE, last // _BITS_PER_BYTE]
    parts = writer.call(aten.reshape.default, value, shape)
    packed: fx.Node | None = None
    for k in range(_BITS_PER_BYTE):
        part = writer.call(aten.select.int, parts, rank(value) - 1, k)
        part = writer.call(CAST, part, torch.uint8)
        part = writer.call(aten.mul.Tensor, part, 1 << k)
        packed = part if packed is None else writer.call(aten.bitwise_or.Tensor, packed, part)
    assert packed is not None, "the packed value is known"
    return packed


def decode(writer: Writer, node: fx.Node, packed: fx.Node, encoding: str) -> fx.Node:
    """Compute ``node`` from what ``encode`` returned."""
    if encoding == NARROW:
        return writer.call(CAST, packed, dtype_of(node))
    value = value_of(packed)
    assert value is not None, "the op gives one tensor"
    numbers = writer.call(
        prims.iota.default,
        _BITS_PER_BYTE,
        start=0,
        step=1,
        dtype=torch.uint8,
        device=value.device,
        requires_grad=False,
    )
    bits = writer.call(aten.bitwise_left_shift.Tensor, _ones(writer, value.device), numbers)
    column = writer.call(aten.unsqueeze.default, bits, 1)
    rows = writer.call(aten.unsqueeze.default, packed, rank(packed) - 1)
    parts = writer.call(aten.bitwise_and.Tensor, rows, column)
    mask = writer.call(aten.ne.Scalar, parts, 0)
    return writer.call(aten.reshape.default, mask, writer.shape(node))


def _ones(writer: Writer, device: torch.device) -> fx.Node:
    return writer.call(
        aten.full.default,
        [_BITS_PER_BYTE],
        1,
        dtype=torch.uint8,
        device=device,
        pin_memory=False,
    )
