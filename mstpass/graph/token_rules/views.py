"""Token rules of pointwise ops, of ops that create values, and of views.

Views here have all elements of their operand: view, expand, items. (``permute`` moves dims,
``select`` and ``unbind`` drop one and ``slice`` shortens one: see along_dims.py.)
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of, tensor_inputs
from mstpass.graph.tokens import Refusal, Spec, align, broadcast_source, through_view

aten = torch.ops.aten


def pointwise_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """The operand's token dims, counted from the right as broadcasting counts them."""
    out, source = shape_of(node), shape_of(operand)
    dims = align(spec, len(source), len(out))
    if any(out[d] != source[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal("an operand is broadcast over the token dims")
    return dims


def pointwise_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = {}
    for operand in tensor_inputs(node):
        source = broadcast_source(shape_of(operand), shape_of(node), spec)
        if isinstance(source, Refusal):
            return source
        needs[operand] = source
    return needs


# ---- created values ---------------------------------------------------------------------------
def created_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """``full_like`` and ``zeros_like``: the shape of the result is the operand's."""
    return spec


def created_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    return dict.fromkeys(tensor_inputs(node), spec)


def iota_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """``iota`` numbers its elements: a chunk of token numbers is not the iota of a chunk."""
    return Refusal(f"{node.target} numbers its elements along a token dim") if spec else {}


# ---- views --------------------------------------------------------------------------------------
def view_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return through_view(shape_of(operand), shape_of(node), spec)


def view_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    operand = node.all_input_nodes[0]
    source = through_view(shape_of(node), shape_of(operand), spec)
    return source if isinstance(source, Refusal) else {operand: source}


def squeeze_all_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """``squeeze`` without dims: a chunk's leading token dims have size 1 and would be dropped."""
    if len(spec) > 1:
        return Refusal(f"{node.target} without dims would drop the token dims of a chunk")
    return view_backward(node, spec)


def expand_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return pointwise_forward(node, operand, spec)


def getitem_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    return spec


def getitem_backward(node: fx.Node, spec: Spec) -> OperandSpecs:
    return {node.all_input_nodes[0]: spec}
