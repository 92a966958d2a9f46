"""Token rules of pointwise ops and of ops that create values."""

from __future__ import annotations

from torch import fx

from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of, tensor_inputs
from mstpass.graph.tokens import Refusal, Spec, align, broadcast_source


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
