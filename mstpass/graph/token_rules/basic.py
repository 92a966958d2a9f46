"""How token dims pass through pointwise ops, views, matmuls and constants: rules for the table.

A *forward* rule answers: given the spec of one operand, what is the result: a spec, SUM, or a
Refusal? A *backward* rule: given the spec of the result, what must each operand's spec be?
Rules of ops that work along some dims (softmax, gather, sort, ...) are in dims.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import generic_shape
from mstpass.graph.tokens import (
    SUM,
    WHOLE,
    Refusal,
    Spec,
    Sum,
    align,
    broadcast_source,
    through_view,
)
from mstpass.torch_internals.op_types import OpOverload, schema_of

aten = torch.ops.aten

Forward = Callable[[fx.Node, fx.Node, Spec], "Spec | Sum | Refusal"]
Backward = Callable[[fx.Node, Spec], "dict[fx.Node, Spec] | Refusal"]

BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})
MATMULS = BIASED | {aten.mm.default, aten.bmm.default}


def shape_of(node: fx.Node) -> torch.Size:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        value = next(tensors_of(value))
    return generic_shape(value)


def ints(argument: Any) -> list[int]:
    """An argument that holds plain ints."""
    assert isinstance(argument, tuple | list) and all(isinstance(d, int) for d in argument)
    return list(argument)


def argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the op's schema, however it was passed; else its default."""
    assert isinstance(node.target, OpOverload)
    for position, known in enumerate(schema_of(node.target).arguments):
        if known.name == name:
            given = node.args[position] if position < len(node.args) else known.default_value
            return node.kwargs.get(name, given)
    raise LookupError(f"{node.target} has no argument {name}")


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if any(True for _ in tensors_of(n.meta.get("val")))]


# ---- pointwise --------------------------------------------------------------------------------
def pointwise_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    out, src = shape_of(node), shape_of(operand)
    dims = align(spec, len(src), len(out))
    if any(out[d] != src[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal("token dims are broadcast")
    return dims


def pointwise_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    needs: dict[fx.Node, Spec] = {}
    for operand in tensor_inputs(node):
        source = broadcast_source(shape_of(operand), shape_of(node), spec)
        if isinstance(source, Refusal):
            return source
        needs[operand] = source
    return needs


# ---- views ------------------------------------------------------------------------------------
def view_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return through_view(shape_of(operand), shape_of(node), spec)


def view_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    source = through_view(shape_of(node), shape_of(operand), spec)
    return source if isinstance(source, Refusal) else {operand: source}


def squeeze_all_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    """squeeze without dims: in chunk form it would take the leading token dims too."""
    if len(spec) > 1:
        return Refusal(f"{node.target} without dims, of tokens over several dims")
    return view_backward(node, spec)


def _permutation(node: fx.Node) -> list[int]:
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


def permute_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    order = _permutation(node)
    return {node.all_input_nodes[0]: tuple(order[d] for d in spec)}


def expand_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return pointwise_forward(node, operand, spec)


def getitem_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    return spec


def getitem_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    return {node.all_input_nodes[0]: spec}


# ---- matmul -----------------------------------------------------------------------------------
def factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    nodes = node.args[:3] if node.target in BIASED else (None, *node.args[:2])
    bias, a, b = nodes
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return (bias if isinstance(bias, fx.Node) else None), a, b


def matmul_factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices of a mm, addmm, bmm or baddbmm node."""
    return factors(node)[1:]


def matmul_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    bias, a, b = factors(node)
    rank = len(shape_of(node))
    row, col = rank - 2, rank - 1
    if a is b:
        return Refusal("a matrix times itself")
    if operand is bias:
        return pointwise_forward(node, operand, spec)
    if len(spec) != 1:
        return Refusal("tokens over several dims of a matmul")
    (dim,) = spec
    contracted = col if operand is a else row
    if dim != contracted:
        return spec
    if bias is not None:
        return Refusal("addmm that contracts tokens")
    return SUM


def matmul_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    bias, a, b = factors(node)
    rank = len(shape_of(node))
    if a is b or len(spec) > 1:
        return Refusal("tokens over several dims of a matmul")
    if not spec:
        return dict.fromkeys(node.all_input_nodes, WHOLE)
    (dim,) = spec
    if dim < rank - 2:  # a batch of matrices, one a token
        needs = {a: spec, b: spec}
    else:
        needs = {a: spec, b: WHOLE} if dim == rank - 2 else {a: WHOLE, b: spec}
    if bias is not None:
        source = broadcast_source(shape_of(bias), shape_of(node), spec)
        if isinstance(source, Refusal):
            return source
        if needs.get(bias, source) != source:
            return Refusal("one value is bias and factor")
        needs[bias] = source
    return needs


def sum_operands(node: fx.Node, operand: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    """What a node that is SUM needs of its operands, given one operand's spec."""
    if node.target not in MATMULS:
        return {operand: spec}
    _, a, b = factors(node)
    rank = len(shape_of(node))
    return {a: (rank - 1,), b: (rank - 2,)}


# ---- created values ---------------------------------------------------------------------------
def created_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return spec  # full_like and zeros_like have their operand's shape


def created_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    return dict.fromkeys(tensor_inputs(node), spec)


def constant_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    return Refusal(f"{node.target} counts along the token dim") if spec else {}
