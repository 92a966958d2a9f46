"""What the passes know about ops: one row an op. An op without a row is a barrier.

A row (``Op``) answers four questions:
    forward:  given the spec of one operand, what is the result: a spec, SUM, or a Refusal?
    backward: given the spec of the result, what must each operand's spec be?
    linear:   is the result linear (and homogeneous) in these operands?
    shape_arg: which argument holds sizes that must be rewritten for a chunk?

Pointwise ops are those that PyTorch tags so (``torch.Tag.pointwise``) and that draw no random
numbers; every other op needs a row of its own. The rules themselves are in basic.py, reductions.py,
indexing.py and linear.py.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.linearity import (
    VIEWS,
    Linear,
    first_only,
    is_zero,
    linear_cat,
    linear_in,
    linear_matmul,
    linear_pad,
    linear_put,
    linear_scatter,
    linear_view,
    never,
)
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules import basic, indexing, reductions
from mstpass.graph.token_rules.basic import (
    Backward,
    Forward,
    matmul_factors,
    shape_of,
    sum_operands,
)
from mstpass.graph.tokens import Refusal, Spec, Sum, without_ones
from mstpass.torch_internals.op_types import OpOverload, schema_of

__all__ = [
    "TABLE",
    "VIEWS",
    "NoRule",
    "Op",
    "is_cheap_view",
    "is_constant",
    "is_experts",
    "is_matmul",
    "is_pointwise",
    "is_reduction",
    "is_view",
    "is_weight",
    "is_zero",
    "lookup",
    "matmul_factors",
    "name_of",
    "operand_specs",
    "result_spec",
    "row_of",
    "sum_operands",
]

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str  # "pointwise" | "view" | "reduce" | "matmul" | "index" | "sort" | "write" | "create"
    forward: Forward
    backward: Backward
    linear: Linear
    shape_arg: int | None = None


class NoRule(Refusal):
    """Nothing is known about the op: a gap of the table, not a fact about the op."""


def lookup(node: fx.Node) -> Op | Refusal:
    """The node's row, or why it has none."""
    if node.op != "call_function":
        return Refusal(f"{node.op} {node.name}")
    return row_of(node.target)


@functools.cache
def row_of(target: Any) -> Op | Refusal:
    """The row of what a node calls, or why there is none."""
    row = TABLE.get(target)
    if row is not None:
        return row
    if isinstance(target, OpOverload):
        if schema_of(target).name in MIXERS:
            return Refusal(f"{target}: {MIXERS[schema_of(target).name]}")
        if torch.Tag.nondeterministic_seeded in target.tags:
            return Refusal(f"{target} draws random numbers")
        if schema_of(target).is_mutable:
            return Refusal(f"{target} writes to its operands")
        if torch.Tag.pointwise in target.tags:
            return Op(
                "pointwise", basic.pointwise_forward, basic.pointwise_backward, linear_in(target)
            )
    return NoRule(f"no token rule for {target}")


def name_of(node: fx.Node) -> str:
    """Such as ``aten.mm.default``; empty for what calls nothing."""
    return _name(node.target) if node.op == "call_function" else ""


_name = functools.cache(str)  # OpOverload builds its name anew each time


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in VIEWS


def is_cheap_view(node: fx.Node) -> bool:
    """A view that a loop's body can redo for free; an item of a tuple is not one."""
    return is_view(node) and node.target is not operator.getitem


def readers(node: fx.Node) -> list[fx.Node]:
    """Users, seen through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found.extend(readers(user) if is_cheap_view(user) else [user])
    return found


def is_constant(node: fx.Node) -> bool:
    """Made from no tensor: ``full``, ``iota``, ..."""
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "create" and not basic.tensor_inputs(node)


def is_pointwise(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "pointwise"


def is_reduction(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "reduce"


def is_matmul(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in basic.MATMULS


def is_experts(node: fx.Node) -> bool:
    """A product in groups of rows, each with the weights of an expert."""
    row = lookup(node)
    return isinstance(row, Refusal) and row.reason.endswith(_EXPERTS)


def is_weight(node: fx.Node) -> bool:
    """A placeholder seen through views and casts."""
    while is_view(node) or node.target is prims.convert_element_type.default:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _rows() -> dict[Any, Op]:
    """One row an op, by kind."""
    pointwise = Op("pointwise", basic.pointwise_forward, basic.pointwise_backward, first_only)
    table: dict[Any, Op] = {
        aten.clone.default: pointwise,
        aten.copy.default: dataclasses.replace(pointwise, linear=never),
        prims.convert_element_type.default: pointwise,
    }
    for rows in (_views(), _reductions(), _along_dims(), _indexing(), _created()):
        table |= rows
    matmul = Op("matmul", basic.matmul_forward, basic.matmul_backward, linear_matmul)
    return table | dict.fromkeys(basic.MATMULS, matmul)


def _views() -> dict[Any, Op]:
    view = Op("view", basic.view_forward, basic.view_backward, linear_view, shape_arg=1)
    squeezed = dataclasses.replace(view, shape_arg=None)
    permute = Op("view", basic.permute_forward, basic.permute_backward, linear_view)
    expand = Op("view", basic.expand_forward, basic.pointwise_backward, linear_view, shape_arg=1)
    select = Op("view", reductions.select_forward, reductions.select_backward, linear_view)
    part = Op("view", *reductions.along(reductions.dim_argument), linear_view)
    return {
        operator.getitem: Op("view", basic.getitem_forward, basic.getitem_backward, linear_view),
        **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), view),
        **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), squeezed),
        aten.squeeze.default: dataclasses.replace(squeezed, backward=basic.squeeze_all_backward),
        **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), permute),
        aten.expand.default: expand,
        **dict.fromkeys((aten.select.int, aten.unbind.int), select),
        **dict.fromkeys(
            (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default), part
        ),
    }


def _reductions() -> dict[Any, Op]:
    total = Op(
        "reduce", reductions.reduce_forward(sums=True), reductions.reduce_backward, linear_view
    )
    mean = Op(
        "reduce", reductions.reduce_forward(sums=False), reductions.reduce_backward, linear_view
    )
    others = (
        aten.amax.default,
        aten.amin.default,
        aten.var_mean.correction,
        aten.var.correction,
        aten.logsumexp.default,
        aten.argmax.default,
        aten.argmin.default,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.prod.dim_int,
        aten.max.default,
        aten.max.dim,
        aten.min.default,
        aten.min.dim,
    )
    return {
        **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), total),
        **dict.fromkeys((aten.mean.dim, aten.mean.default), mean),
        **dict.fromkeys(others, dataclasses.replace(mean, linear=never)),
    }


def _along_dims() -> dict[Any, Op]:
    def along(linear: Linear, dims_of: reductions.Dims = reductions.dim_argument) -> Op:
        return Op("index", *reductions.along(dims_of), linear)

    norm = Op("reduce", reductions.norm_forward, reductions.norm_backward, never)
    sort = dataclasses.replace(along(never), kind="sort")
    sorts = (
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.cumprod.default,
        aten.cummax.default,
        aten.logcumsumexp.default,
        aten.scatter_reduce.two,
    )
    softmaxes = (aten._softmax.default, aten._log_softmax.default)
    return {
        **dict.fromkeys(softmaxes, along(never)),
        **dict.fromkeys(sorts, sort),
        aten.cumsum.default: along(first_only),
        aten.gather.default: along(first_only),
        aten.cat.default: along(linear_cat),
        aten.stack.default: Op(
            "index", reductions.stack_forward, reductions.stack_backward, linear_cat
        ),
        **dict.fromkeys(
            (
                aten.slice_scatter.default,
                aten.scatter.value,
                aten.scatter.src,
                aten.scatter_add.default,
            ),
            along(linear_scatter),
        ),
        aten.select_scatter.default: Op(
            "index",
            reductions.select_scatter_forward,
            reductions.select_scatter_backward,
            linear_scatter,
        ),
        **dict.fromkeys(
            (aten.flip.default, aten.roll.default, prims.rev.default),
            along(linear_view, reductions.dims_argument),
        ),
        **dict.fromkeys(
            (aten.tril.default, aten.triu.default), along(linear_view, reductions.last_two)
        ),
        aten.constant_pad_nd.default: along(linear_pad, reductions.padded),
        aten.native_layer_norm.default: norm,
    }


def _indexing() -> dict[Any, Op]:
    read = Op("index", indexing.index_forward, indexing.index_backward, linear_view)
    write = Op("write", indexing.put_forward, indexing.put_backward, linear_put)
    return {
        aten.embedding.default: Op(
            "index", indexing.embedding_forward, indexing.embedding_backward, never
        ),
        **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), read),
        **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), write),
    }


def _created() -> dict[Any, Op]:
    created = Op("create", basic.created_forward, basic.created_backward, never, shape_arg=0)
    like = dataclasses.replace(created, shape_arg=None)
    constant = Op("create", basic.created_forward, basic.constant_backward, never)
    return {
        **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), created),
        **dict.fromkeys(
            (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), like
        ),
        **dict.fromkeys((aten.scalar_tensor.default, prims.iota.default), constant),
    }


# Ops that are known not to be token-parallel, by the names of their schemas: no gaps of the table.
_ATTENTION = "attention: a token reads the others"
_EXPERTS = "rows are grouped by the expert that they were sent to"
_RANDOM = "draws random numbers"
_PLACES = "adds up rows at places that tokens choose"
_COUNTS = "counts over all its elements"
MIXERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            f"aten::_scaled_dot_product_{kind}{backward}"
            for kind in (
                "flash_attention_for_cpu",
                "flash_attention",
                "efficient_attention",
                "cudnn_attention",
                "fused_attention_overrideable",
            )
            for backward in ("", "_backward")
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _EXPERTS),
    "transformers::grouped_mm_fallback": _EXPERTS,
    "transformers::grouped_mm_fallback_backward": _EXPERTS,
    "aten::embedding_dense_backward": _PLACES,
    "aten::_unsafe_masked_index_put_accumulate": _PLACES,
    **dict.fromkeys(("prims::inductor_random", "prims::inductor_randint"), _RANDOM),
    "prims::inductor_lookup_seed": "makes a seed",
    **dict.fromkeys(("aten::histc", "aten::bincount"), _COUNTS),
    "aten::convolution": "a convolution reads neighbouring positions",
    "aten::convolution_backward": "a convolution reads neighbouring positions",
    "aten::nonzero": "its size depends on data",
    **dict.fromkeys(
        ("aten::as_strided", "aten::as_strided_scatter", "aten::new_empty_strided"),
        "addresses storage, not dims",
    ),
    "aten::equal": "compares whole tensors",
}


TABLE: Mapping[Any, Op] = _rows()


def result_spec(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    """The node's spec given that one of its operands has ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    result = row.forward(node, operand, spec)
    if isinstance(result, tuple):
        return without_ones(shape_of(node), result)
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
    return {n: without_ones(shape_of(n), s) for n, s in needs.items()}
