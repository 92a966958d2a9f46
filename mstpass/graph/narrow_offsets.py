"""Calls whose kernels compute offsets in 32 bits, on tensors that are too large for that.

From 2^31 elements on, an offset needs more than 32 bits. That is 524,288 tokens of width 4,096. The
kernels that Inductor writes take 64 bits where a buffer is so large, and matrix products do as
well. Of other kernels on CUDA these are known, and they go wrong without an error, or read memory
that is not theirs:

    flash attention, backward    the offset of a row in the float32 gradient of the queries is
                                 ``row * heads * head_dim`` in 32 bits (flash_bwd_kernel.h of
                                 FlashAttention 2.7.4, which torch contains since
                                 pytorch/pytorch#148147; Dao-AILab/flash-attention#767, #1500)
    efficient attention          the offset of a row of the mask is in 32 unsigned bits
                                 (kernel_forward.h; pytorch/pytorch#187227)
    FlexAttention                offsets into keys, values and what its mask reads are in 32 bits
                                 (pytorch/pytorch#190857)
    kernels from elsewhere       nothing is known of them. Those of state-space models go wrong
                                 (state-spaces/mamba#1015, fla-org/flash-linear-attention#1080)

In a loop over heads or over tokens, a call sees one group or chunk, which is far smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_flex
from mstpass.graph.attention_sizes import (
    AttentionSizes,
    attention_sizes,
    call_of,
    padded_features,
    round_up,
)
from mstpass.graph.joint import tensors_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.node_meta import source_of
from mstpass.graph.op_rows import row
from mstpass.graph.sizes import hint, hint_shape
from mstpass.torch_internals.graphs import HigherOrderOperator, OpCall, OpOverload

MOST_ELEMENTS = 2**31
_MOST_UNSIGNED = 2**32
_ROWS = 128  # flash attention rounds tokens up to a multiple of it
_KNOWN = frozenset({"aten", "prims", "inductor", "mstpass", "_c10d_functional", "_dtensor"})
_IN_GROUPS = "run it in groups of heads (memory_budget=0.0), or share the sequence between GPUs"


@dataclasses.dataclass(frozen=True)
class NarrowCall:
    """A call on tensors that are too large for its kernel.

    Attributes:
        node: its name.
        op: the name of the op.
        why: what goes wrong.
        fix: what to change.
        source: the line of the model's code.
    """

    node: str
    op: str
    why: str
    fix: str
    source: str = ""

    def __str__(self) -> str:
        at = f" (at {self.source})" if self.source else ""
        return f"{self.op}{at}: {self.why}; {self.fix}"


def narrow_calls(graphs: Iterable[fx.Graph]) -> list[NarrowCall]:
    """The calls of graphs, and of the loops in them, that are too large for their kernels.

    Symbolic sizes count as in the batch that is planned for. A call that stands in several equal
    layers is listed once.
    """
    found: dict[tuple[str, str, str], NarrowCall] = {}
    for node in (node for graph in graphs for node in _calls(graph)):
        if (call := narrow_call(node)) is not None:
            found.setdefault((call.op, call.why, call.source), call)
    return list(found.values())


def narrow_call(node: fx.Node) -> NarrowCall | None:
    """The node, if its kernel computes offsets in fewer bits than its tensors need."""
    if not any(tensor.device.type == "cuda" for tensor in tensors_of(node.meta.get("val"))):
        return None
    why, fix = _fault_of(node)
    if not why:
        return None
    return NarrowCall(node.name, str(node.target), why, fix, source_of(node))


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        yield node
        body = node.args[0] if node.target is mst_loop else None
        if isinstance(body, fx.Node) and graph.owning_module is not None:
            loop: Any = graph.owning_module.get_submodule(str(body.target))
            yield from _calls(loop.graph)


# ---- what is known of each kernel ----------------------------------------------------------------
def _fault_of(node: fx.Node) -> tuple[str, str]:
    """What goes wrong in a call, and what to change; empty if nothing does."""
    known = _OF_ATTENTION.get(ops.row(node).workspace)
    if known is not None:
        call = call_of(node)
        sizes = attention_sizes(call)
        return ("", "") if sizes is None else known(call, sizes)
    if is_flex(node):
        return _large_operand(
            node,
            "the kernels of FlexAttention compute offsets into it in 32 bits",
            f"{_IN_GROUPS}, or a mask that reads smaller tensors",
        )
    if _is_foreign(node):
        return _large_operand(
            node,
            "it is not known whether the kernel, which is not torch's, computes offsets in 64 bits",
            "compare its result on this size with that on two halves, or use shorter sequences",
        )
    return "", ""


def _flash_backward(call: OpCall, sizes: AttentionSizes) -> tuple[str, str]:
    """The gradient of the queries is summed in float32 ``[S, H, D]``, with S and D rounded up."""
    # sequences in one row: each begins at a multiple of 128
    tokens = sizes.S + (_ROWS * (sizes.B + 1) if sizes.in_one_row else 0)
    elements = round_up(tokens, _ROWS) * sizes.H * padded_features(sizes.D)
    if elements <= MOST_ELEMENTS:
        return "", ""
    why = (
        f"the backward of flash attention computes offsets in 32 bits, and {tokens:,} tokens x "
        f"{sizes.H} heads x {sizes.D} are {elements / MOST_ELEMENTS:.2f} x 2^31 elements: "
        "gradients are wrong, or memory is read that is not its own"
    )
    return why, _IN_GROUPS


def _mask_of_efficient(call: OpCall, sizes: AttentionSizes) -> tuple[str, str]:
    mask = call.operand("attn_bias") or call.operand("bias")
    if mask is None or (sizes.S - 1) * mask.stride[-2] < _MOST_UNSIGNED:
        return "", ""
    why = (
        f"memory-efficient attention computes offsets into its mask of {sizes.S:,} rows in 32 bits "
        "and reads wrong rows"
    )
    return why, "leave the mask out where all tokens count, or pack sequences without padding"


def _large_operand(node: fx.Node, why: str, fix: str) -> tuple[str, str]:
    """The fault, if a tensor that the call reads or returns is too large."""
    for each in (node, *node.all_input_nodes):
        size = max(map(_extent, tensors_of(each.meta.get("val"))), default=0)
        if size > MOST_ELEMENTS:
            return f"{each.name} has {size / MOST_ELEMENTS:.2f} x 2^31 elements, and {why}", fix
    return "", ""


def _extent(tensor: torch.Tensor) -> int:
    """The elements from the tensor's first one to its last."""
    pairs = zip(hint_shape(tensor), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * hint(stride) for size, stride in pairs)


def _is_foreign(node: fx.Node) -> bool:
    """Whether the kernel is neither torch's nor our own: a custom op's, or the user's in Triton."""
    if isinstance(node.target, OpOverload):
        return node.target.namespace not in _KNOWN
    target: Any = node.target
    is_higher = isinstance(target, HigherOrderOperator)
    return is_higher and target.name().startswith("triton_kernel_wrapper")


_OF_ATTENTION = {row.FLASH_BACKWARD: _flash_backward, row.EFFICIENT: _mask_of_efficient}
