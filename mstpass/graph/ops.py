"""What the passes know about ops: one row an op. An op without a row is a barrier.

A row (``Op``) answers four questions:
    forward:  given the spec of one operand, what is the result: a spec, SUM, or a Refusal?
    backward: given the spec of the result, what must each operand's spec be?
    linear:   is the result linear (and homogeneous) in these operands?
    shape_arg: which argument holds sizes that must be rewritten for a chunk?

Pointwise ops are those that PyTorch tags so (``torch.Tag.pointwise``) and that draw no random
numbers; every other op needs a row of its own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.sizes import generic_shape, is_size
from mstpass.graph.tokens import (
    SUM,
    WHOLE,
    Refusal,
    Spec,
    Sum,
    align,
    broadcast_source,
    through_view,
    without_ones,
)

aten = torch.ops.aten
prims = torch.ops.prims

Forward = Callable[[fx.Node, fx.Node, Spec], "Spec | Sum | Refusal"]
Backward = Callable[[fx.Node, Spec], "dict[fx.Node, Spec] | Refusal"]
Linear = Callable[[fx.Node, "set[fx.Node]"], bool]


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str  # "pointwise" | "view" | "reduce" | "matmul" | "index" | "create"
    forward: Forward
    backward: Backward
    linear: Linear
    shape_arg: int | None = None


def lookup(node: fx.Node) -> Op | Refusal:
    """The node's row, or why it has none."""
    if node.op != "call_function":
        return Refusal(f"{node.op} {node.name}")
    row = TABLE.get(node.target)
    if row is not None:
        return row
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return Refusal(f"{target} draws random numbers")
        if target._schema.is_mutable:
            return Refusal(f"{target} writes to its operands")
        if torch.Tag.pointwise in target.tags:
            return Op("pointwise", _pointwise_forward, _pointwise_backward, _linear_in(target))
    return Refusal(f"no token rule for {target}")


def is_view(node: fx.Node) -> bool:
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "view"


def is_cheap_view(node: fx.Node) -> bool:
    """A view that a loop's body can redo for free; an item of a tuple is not one."""
    return is_view(node) and node.target is not operator.getitem


def is_constant(node: fx.Node) -> bool:
    """Made from no tensor: ``full``, ``iota``, ..."""
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "create" and not _tensor_inputs(node)


def is_pointwise(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "pointwise"


def is_matmul(node: fx.Node) -> bool:
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "matmul"


def is_zero(node: object) -> bool:
    """A constant that is 0 everywhere."""
    if isinstance(node, int | float):
        return node == 0
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in _FILLS:
        return bool(node.args[_FILLS[node.target]] == 0)
    if node.target in (aten.zeros.default, aten.zeros_like.default):
        return True
    return is_view(node) and is_zero(node.args[0])


_FILLS: Mapping[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
}


def _shape(node: fx.Node) -> torch.Size:
    value = next(tensors_of(node.meta.get("val")))
    return generic_shape(value)


def _ints(argument: Any) -> list[int]:
    """An argument that holds plain ints."""
    assert isinstance(argument, tuple | list) and all(isinstance(d, int) for d in argument)
    return list(argument)


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if any(True for _ in tensors_of(n.meta.get("val")))]


# ---- pointwise --------------------------------------------------------------------------------
def _pointwise_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    out, src = _shape(node), _shape(operand)
    dims = align(spec, len(src), len(out))
    if any(out[d] != src[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal("token dims are broadcast")
    return dims


def _pointwise_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    needs: dict[fx.Node, Spec] = {}
    for operand in _tensor_inputs(node):
        source = broadcast_source(_shape(operand), _shape(node), spec)
        if isinstance(source, Refusal):
            return source
        needs[operand] = source
    return needs


def _linear_in(target: Any) -> Linear:
    return _LINEAR_POINTWISE.get(target, _never)


def _never(node: fx.Node, operands: set[fx.Node]) -> bool:
    return False


def _first_only(node: fx.Node, operands: set[fx.Node]) -> bool:
    return operands == {node.args[0]} and not any(a in operands for a in _flat(node)[1:])


def _product(node: fx.Node, operands: set[fx.Node]) -> bool:
    """Linear when exactly one factor depends on the operands."""
    return sum(a in operands for a in node.args if isinstance(a, fx.Node)) == 1


def _total(node: fx.Node, operands: set[fx.Node]) -> bool:
    """add, sub, cat, where's branches: every term depends on the operands or is zero."""
    return all(
        a in operands or is_zero(a) for a in _flat(node) if isinstance(a, fx.Node | float | int)
    )


def _sum_of_two(node: fx.Node, operands: set[fx.Node]) -> bool:
    return all(a in operands or is_zero(a) for a in node.args[:2])


def _branches(node: fx.Node, operands: set[fx.Node]) -> bool:
    return node.args[0] not in operands and all(a in operands or is_zero(a) for a in node.args[1:3])


def _flat(node: fx.Node) -> list[Any]:
    first = node.args[0]
    return [*(first if isinstance(first, tuple | list) else [first]), *node.args[1:]]


_LINEAR_POINTWISE: Mapping[Any, Linear] = {
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _first_only,
    aten.div.Tensor: _first_only,
    aten.div.Scalar: _first_only,
    aten.neg.default: _first_only,
    aten.add.Tensor: _sum_of_two,
    aten.sub.Tensor: _sum_of_two,
    aten.where.self: _branches,
    aten.clone.default: _first_only,
    prims.convert_element_type.default: _first_only,
}


# ---- views ------------------------------------------------------------------------------------
def _view_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return through_view(_shape(operand), _shape(node), spec)


def _view_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    source = through_view(_shape(node), _shape(operand), spec)
    return source if isinstance(source, Refusal) else {operand: source}


def _permutation(node: fx.Node) -> list[int]:
    rank = len(_shape(node))
    if node.target is aten.permute.default:
        return [d % rank for d in _ints(node.args[1])]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = (d % rank for d in _ints(node.args[1:3]))
    order[a], order[b] = order[b], order[a]
    return order


def _permute_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    order = _permutation(node)
    return tuple(order.index(d) for d in spec)


def _permute_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    order = _permutation(node)
    return {node.all_input_nodes[0]: tuple(order[d] for d in spec)}


def _expand_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return _pointwise_forward(node, operand, spec)


def _linear_view(node: fx.Node, operands: set[fx.Node]) -> bool:
    return operands == {node.args[0]}


# ---- along one other dim: reductions, softmax, slices, concatenation, gather ------------------
def _dims(node: fx.Node, position: int, rank: int) -> list[int]:
    dims = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return [d % rank for d in _ints(dims)]


def _reduce_forward(sums: bool) -> Forward:
    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
        source = _shape(operand)
        dims = _dims(node, 1, len(source)) if source else []
        if not set(dims) & set(spec):
            return _after_reduction(len(source), dims, len(_shape(node)), spec)
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


def _reduce_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    source = _shape(operand)
    dims = _dims(node, 1, len(source)) if source else []
    if len(_shape(node)) == len(source):
        result = spec
    else:
        kept = [d for d in range(len(source)) if d not in dims]
        result = tuple(kept[d] for d in spec)
    if set(result) & set(dims):
        return Refusal(f"{node.target} reduces over tokens")
    return {operand: result}


def _along_forward(position: int) -> Forward:
    """Ops that work along one dim and keep the rank: softmax, slice, cat, cumsum, split."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
        if _along(node, position) in spec:
            return Refusal(f"{node.target} works along a token dim")
        return spec

    return forward


def _along(node: fx.Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % max(1, len(_shape(node)))


def _along_backward(position: int) -> Backward:
    def backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
        if _along(node, position) in spec:
            return Refusal(f"{node.target} works along a token dim")
        out = _shape(node)
        needs: dict[fx.Node, Spec] = {}
        for operand in _tensor_inputs(node):
            if any(_shape(operand)[d] != out[d] for d in spec):
                return Refusal(f"{node.target}: operands differ in their token dims")
            needs[operand] = spec
        return needs

    return backward


def _select_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    (dim,) = (d % len(_shape(operand)) for d in _ints(node.args[1:2]))
    if dim in spec:
        return Refusal("select of one token")
    return tuple(d - (d > dim) for d in spec)


def _select_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    operand = node.all_input_nodes[0]
    (dim,) = (d % len(_shape(operand)) for d in _ints(node.args[1:2]))
    return {operand: tuple(d + (d >= dim) for d in spec)}


def _pad_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    if any(_shape(node)[d] != _shape(operand)[d] for d in spec):
        return Refusal("padding along a token dim")
    return spec


def _pad_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    operand = node.all_input_nodes[0]
    result = _pad_forward(node, operand, spec)
    return result if isinstance(result, Refusal) else {operand: result}


def _getitem_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    return spec


def _getitem_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    return {node.all_input_nodes[0]: spec}


def _embedding_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return (
        spec if operand is node.args[1] else Refusal("the embedding table is looked up by tokens")
    )


def _embedding_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    if len(_shape(node)) - 1 in spec:
        return Refusal("tokens along the embedding's features")
    return {weight: WHOLE, ids: spec}


def _linear_scatter(node: fx.Node, operands: set[fx.Node]) -> bool:
    """scatter/slice_scatter of a linear source into zeros, or of zeros into a linear base."""
    base, *rest = node.args
    source = rest[0] if node.target is aten.slice_scatter.default else rest[-1]
    return all(a in operands or is_zero(a) for a in (base, source))


# ---- matmul -----------------------------------------------------------------------------------
def _factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    nodes = node.args[:3] if node.target in _BIASED else (None, *node.args[:2])
    bias, a, b = nodes
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return (bias if isinstance(bias, fx.Node) else None), a, b


def matmul_factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices of a mm, addmm, bmm or baddbmm node."""
    return _factors(node)[1:]


def _matmul_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    bias, a, b = _factors(node)
    rank = len(_shape(node))
    row, col = rank - 2, rank - 1
    if a is b:
        return Refusal("a matrix times itself")
    if operand is bias:
        return _pointwise_forward(node, operand, spec)
    if len(spec) != 1:
        return Refusal("tokens over several dims of a matmul")
    (dim,) = spec
    contracted = col if operand is a else row
    if dim != contracted:
        return spec
    if bias is not None:
        return Refusal("addmm that contracts tokens")
    return SUM


def _matmul_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    bias, a, b = _factors(node)
    rank = len(_shape(node))
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
        source = broadcast_source(_shape(bias), _shape(node), spec)
        if isinstance(source, Refusal):
            return source
        if needs.get(bias, source) != source:
            return Refusal("one value is bias and factor")
        needs[bias] = source
    return needs


def sum_operands(node: fx.Node, operand: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    """What a node that is SUM needs of its operands, given one operand's spec."""
    if not is_matmul(node):
        return {operand: spec}
    _, a, b = _factors(node)
    rank = len(_shape(node))
    return {a: (rank - 1,), b: (rank - 2,)}


def _linear_matmul(node: fx.Node, operands: set[fx.Node]) -> bool:
    bias, a, b = _factors(node)
    return (a in operands) != (b in operands) and (bias is None or bias in operands)


# ---- created values ---------------------------------------------------------------------------
def _created_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return spec  # full_like and zeros_like have their operand's shape


def _created_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    return dict.fromkeys(_tensor_inputs(node), spec)


def _constant_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    return Refusal(f"{node.target} counts along the token dim") if spec else {}


_BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})


def _rows() -> dict[Any, Op]:
    view = Op("view", _view_forward, _view_backward, _linear_view, shape_arg=1)
    squeezed = dataclasses.replace(view, shape_arg=None)
    permute = Op("view", _permute_forward, _permute_backward, _linear_view)
    expand = Op("view", _expand_forward, _pointwise_backward, _linear_view, shape_arg=1)
    total = Op("reduce", _reduce_forward(sums=True), _reduce_backward, _linear_view)
    mean = Op("reduce", _reduce_forward(sums=False), _reduce_backward, _linear_view)
    reduce = dataclasses.replace(mean, linear=_never)
    matmul = Op("matmul", _matmul_forward, _matmul_backward, _linear_matmul)
    created = Op("create", _created_forward, _created_backward, _never, shape_arg=0)
    like = dataclasses.replace(created, shape_arg=None)
    constant = Op("create", _created_forward, _constant_backward, _never)
    pointwise = Op("pointwise", _pointwise_forward, _pointwise_backward, _first_only)

    def along(position: int, linear: Linear) -> Op:
        return Op("index", _along_forward(position), _along_backward(position), linear)

    rows: dict[Any, Op] = {
        operator.getitem: Op("view", _getitem_forward, _getitem_backward, _linear_view),
        aten.embedding.default: Op("index", _embedding_forward, _embedding_backward, _never),
        aten.select.int: Op("view", _select_forward, _select_backward, _linear_view),
        aten.slice.Tensor: dataclasses.replace(along(1, _linear_view), kind="view"),
        aten.slice_scatter.default: along(2, _linear_scatter),
        aten.cat.default: along(1, _total),
        aten.split.Tensor: dataclasses.replace(along(2, _linear_view), kind="view"),
        aten.split_with_sizes.default: dataclasses.replace(along(2, _linear_view), kind="view"),
        aten.gather.default: along(1, _first_only),
        aten.scatter.value: along(1, _linear_scatter),
        aten.scatter.src: along(1, _linear_scatter),
        aten.scatter_add.default: along(1, _linear_scatter),
        aten._softmax.default: along(1, _never),
        aten._log_softmax.default: along(1, _never),
        aten.cumsum.default: along(1, _first_only),
        aten.constant_pad_nd.default: Op("index", _pad_forward, _pad_backward, _never),
        aten.clone.default: pointwise,
        aten.copy.default: dataclasses.replace(pointwise, linear=_never),
        prims.convert_element_type.default: pointwise,
    }
    rows |= dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default), view
    )
    rows |= dict.fromkeys(
        (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
        squeezed,
    )
    rows |= dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), permute)
    rows |= {aten.expand.default: expand}
    rows |= dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), total)
    rows |= {aten.mean.dim: mean}
    rows |= dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.var_mean.correction,
            aten.var.correction,
            aten.logsumexp.default,
            aten.argmax.default,
            aten.argmin.default,
            aten.any.dim,
            aten.prod.dim_int,
            aten.max.dim,
        ),
        reduce,
    )
    rows |= dict.fromkeys(
        (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), matmul
    )
    rows |= dict.fromkeys((aten.scalar_tensor.default, prims.iota.default), constant)
    rows |= dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), created)
    rows |= dict.fromkeys(
        (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), like
    )
    return rows


TABLE: Mapping[Any, Op] = _rows()


def result_spec(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    """The node's spec given that one of its operands has ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    result = row.forward(node, operand, spec)
    if isinstance(result, tuple):
        return without_ones(_shape(node), result)
    return result


def size_operands(node: fx.Node) -> list[fx.Node]:
    """Symbolic sizes that a node reads as numbers, its ``shape_arg`` left out."""
    row = lookup(node)
    shape_arg = row.shape_arg if isinstance(row, Op) else None
    found: dict[fx.Node, None] = {}
    values = [a for i, a in enumerate(node.args) if i != shape_arg]
    fx.map_arg((values, node.kwargs), lambda n: found.setdefault(n) if is_size(n) else None)
    return list(found)


def operand_specs(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    """What a node needs of its operands to have ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    operands = [n for n in node.all_input_nodes if not is_size(n)]
    if any(value_of(n) is None and not n.meta.get("val") for n in operands):
        return Refusal(f"{node.name} has an operand without a tensor value")
    needs = row.backward(node, spec)
    if isinstance(needs, Refusal):
        return needs
    return {n: without_ones(_shape(n), s) for n, s in needs.items()}
