"""How token dims pass through each kind of op: the rules that the table's rows are made of.

A *forward* rule answers: given the spec of one operand, what is the result: a spec, SUM, or a
Refusal? A *backward* rule: given the spec of the result, what must each operand's spec be?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
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

aten = torch.ops.aten

Forward = Callable[[fx.Node, fx.Node, Spec], "Spec | Sum | Refusal"]
Backward = Callable[[fx.Node, Spec], "dict[fx.Node, Spec] | Refusal"]

BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})
MATMULS = BIASED | {aten.mm.default, aten.bmm.default}


def shape_of(node: fx.Node) -> torch.Size:
    value = next(tensors_of(node.meta.get("val")))
    return value.shape


def _ints(argument: Any) -> list[int]:
    """An argument that holds plain ints."""
    assert isinstance(argument, tuple | list) and all(isinstance(d, int) for d in argument)
    return list(argument)


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


def _permutation(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        return [d % rank for d in _ints(node.args[1])]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = (d % rank for d in _ints(node.args[1:3]))
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


# ---- along one other dim: reductions, softmax, slices, concatenation, gather ------------------
def _dims(node: fx.Node, position: int, rank: int) -> list[int]:
    dims = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return [d % rank for d in _ints(dims)]


def reduce_forward(sums: bool) -> Forward:
    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
        source = shape_of(operand)
        dims = _dims(node, 1, len(source)) if source else []
        if not set(dims) & set(spec):
            return _after_reduction(len(source), dims, len(shape_of(node)), spec)
        if sums and set(spec) <= set(dims):
            return SUM
        return Refusal(
            f"{node.target} reduces over {'all' if set(spec) <= set(dims) else 'some'} tokens"
        )

    return forward


def _after_reduction(in_rank: int, dims: list[int], out_rank: int, spec: Spec) -> Spec:
    if out_rank == in_rank:
        return spec
    kept = [d for d in range(in_rank) if d not in dims]
    return tuple(kept.index(d) for d in spec)


def reduce_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    source = shape_of(operand)
    dims = _dims(node, 1, len(source)) if source else []
    if len(shape_of(node)) == len(source):
        result = spec
    else:
        kept = [d for d in range(len(source)) if d not in dims]
        result = tuple(kept[d] for d in spec)
    if set(result) & set(dims):
        return Refusal(f"{node.target} reduces over tokens")
    return {operand: result}


def along_forward(position: int) -> Forward:
    """Ops that work along one dim and keep the rank: softmax, slice, cat, cumsum, split."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
        if _along(node, position) in spec:
            return Refusal(f"{node.target} works along a token dim")
        return spec

    return forward


def _along(node: fx.Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % max(1, len(shape_of(node)))


def along_backward(position: int) -> Backward:
    def backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
        if _along(node, position) in spec:
            return Refusal(f"{node.target} works along a token dim")
        out = shape_of(node)
        needs: dict[fx.Node, Spec] = {}
        for operand in tensor_inputs(node):
            if any(shape_of(operand)[d] != out[d] for d in spec):
                return Refusal(f"{node.target}: operands differ in their token dims")
            needs[operand] = spec
        return needs

    return backward


def select_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    (dim,) = (d % len(shape_of(operand)) for d in _ints(node.args[1:2]))
    if dim in spec:
        return Refusal("select of one token")
    return tuple(d - (d > dim) for d in spec)


def select_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    operand = node.all_input_nodes[0]
    (dim,) = (d % len(shape_of(operand)) for d in _ints(node.args[1:2]))
    return {operand: tuple(d + (d >= dim) for d in spec)}


def pad_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    if any(shape_of(node)[d] != shape_of(operand)[d] for d in spec):
        return Refusal("padding along a token dim")
    return spec


def pad_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    result = pad_forward(node, operand, spec)
    return result if isinstance(result, Refusal) else {operand: result}


def getitem_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    return spec


def getitem_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    return {node.all_input_nodes[0]: spec}


def embedding_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return (
        spec if operand is node.args[1] else Refusal("the embedding table is looked up by tokens")
    )


def embedding_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    if len(shape_of(node)) - 1 in spec:
        return Refusal("tokens along the embedding's features")
    return {weight: WHOLE, ids: spec}


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
