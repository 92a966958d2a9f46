"""Token rules of views whose result has all elements of the operand: view, permute, expand, items.

``view_as_real`` has a last dim of two more than its complex operand, ``view_as_complex`` one less.
(``select`` and ``unbind`` drop a dim and ``slice`` shortens one: see along_dims.py.)
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import ints, shape_of
from mstpass.graph.token_rules.pointwise import pointwise_forward
from mstpass.graph.tokens import Refusal, Spec, through_view

aten = torch.ops.aten


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


def _permutation(node: fx.Node) -> list[int]:
    """For each dim of the result, the operand's dim."""
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        return [d % rank for d in ints(node.args[1])]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = (d % rank for d in ints(node.args[1:3]))
    order[a], order[b] = order[b], order[a]
    return order


def permute_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    order = _permutation(node)
    return tuple(order.index(d) for d in spec)


def permute_backward(node: fx.Node, spec: Spec) -> OperandSpecs:
    order = _permutation(node)
    return {node.all_input_nodes[0]: tuple(order[d] for d in spec)}


def expand_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return pointwise_forward(node, operand, spec)


def getitem_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    return spec


def getitem_backward(node: fx.Node, spec: Spec) -> OperandSpecs:
    return {node.all_input_nodes[0]: spec}


def complex_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """``view_as_complex`` and ``view_as_real``: all dims are in their places but the last one."""
    return _with_dims(node, node, spec)


def complex_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    operand = node.all_input_nodes[0]
    source = _with_dims(node, operand, spec)
    return source if isinstance(source, Refusal) else {operand: source}


def _with_dims(node: fx.Node, holder: fx.Node, spec: Spec) -> Spec | Refusal:
    """The spec, if ``holder`` has all its dims: real and imaginary parts are no tokens."""
    if max(spec, default=-1) < len(shape_of(holder)):
        return spec
    return Refusal(f"{node.target} works along a token dim")
