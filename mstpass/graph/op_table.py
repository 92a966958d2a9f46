"""The op table: one row for each op that the passes understand. An op without a row is refused.

A row (``Op``) says of an op:

    kind       the group that it belongs to, such as "pointwise" or "reduce"
    forward    token rule: the spec of one operand -> the spec of the result (token_rules/)
    backward   token rule: the spec of the result -> the specs of the operands (token_rules/)
    linear     whether the result is linear in given operands (linearity.py); ask ``is_linear``
    shape_arg  the position of the argument with sizes, which a chunk replaces by its own

Pointwise ops need no row: PyTorch tags them (``torch.Tag.pointwise``), see ``lookup`` in ops.py.
``NOT_TOKEN_PARALLEL`` lists ops of which it is known that no rule exists, with the reason.

To add an op, add its row to the function of its kind below and a case to
tests/token_rule_cases.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.linearity import LinearRule, first_only, linear_view, never
from mstpass.graph.token_rules import (
    BackwardRule,
    ForwardRule,
    along_dims,
    collectives,
    grouped_matmul,
    indexing,
    matmul,
    pointwise,
    scaled_matmul,
    views,
)
from mstpass.torch_internals.collectives import ALL_TO_ALL_OF_DTENSOR, NAMESPACE, overloads

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Op:
    """A row of the table; see the top of this file."""

    # "pointwise" | "view" | "reduce" | "matmul" | "index" | "sort" | "write" | "create" |
    # "collective"
    kind: str
    forward: ForwardRule
    backward: BackwardRule
    linear: LinearRule
    shape_arg: int | None = None

    def is_linear(self, node: fx.Node, operands: set[fx.Node]) -> bool:
        """Whether the node's result is linear in the operands, up to rounding."""
        return linearity.has_linear_dtype(node) and self.linear(node, operands)


def pointwise_row(linear: LinearRule) -> Op:
    """The row of a pointwise op."""
    return Op("pointwise", pointwise.pointwise_forward, pointwise.pointwise_backward, linear)


def _rows() -> dict[Any, Op]:
    copies = pointwise_row(first_only)
    scaled = Op("matmul", scaled_matmul.scaled_forward, scaled_matmul.scaled_backward, never)
    grouped = Op("matmul", grouped_matmul.grouped_forward, grouped_matmul.grouped_backward, never)
    product = Op("matmul", matmul.matmul_forward, matmul.matmul_backward, linearity.linear_matmul)
    return {
        aten.clone.default: copies,
        aten.copy.default: dataclasses.replace(copies, linear=never),
        prims.convert_element_type.default: copies,
        **dict.fromkeys(matmul.MATMULS, product),
        **dict.fromkeys(matmul.SCALED, scaled),
        **dict.fromkeys(grouped_matmul.GROUPED, grouped),
        **_views(),
        **_reductions(),
        **_along_dims(),
        **_indexing(),
        **_created(),
        **_collectives(),
    }


def _views() -> dict[Any, Op]:
    view = Op("view", views.view_forward, views.view_backward, linear_view, shape_arg=1)
    squeezed = dataclasses.replace(view, shape_arg=None)
    permute = Op("view", views.permute_forward, views.permute_backward, linear_view)
    expand = Op(
        "view", views.expand_forward, pointwise.pointwise_backward, linear_view, shape_arg=1
    )
    select = Op("view", along_dims.select_forward, along_dims.select_backward, linear_view)
    part = Op("view", *along_dims.along(along_dims.dim_argument), linear_view)
    parts = Op("view", views.complex_forward, views.complex_backward, linear_view)
    return {
        operator.getitem: Op("view", views.getitem_forward, views.getitem_backward, linear_view),
        **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), view),
        **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), squeezed),
        aten.squeeze.default: dataclasses.replace(squeezed, backward=views.squeeze_all_backward),
        **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), permute),
        aten.expand.default: expand,
        **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), parts),
        **dict.fromkeys((aten.select.int, aten.unbind.int), select),
        **dict.fromkeys(
            (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default), part
        ),
    }


def _reductions() -> dict[Any, Op]:
    total = Op(
        "reduce", along_dims.reduce_forward(sums=True), along_dims.reduce_backward, linear_view
    )
    mean = Op(
        "reduce", along_dims.reduce_forward(sums=False), along_dims.reduce_backward, linear_view
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
    selections = (  # Inductor calls ATen's kernels for these
        aten.kthvalue.default,
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
    )
    other = dataclasses.replace(mean, linear=never)
    return {
        **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), total),
        **dict.fromkeys((aten.mean.dim, aten.mean.default), mean),
        **dict.fromkeys(others, other),
        **dict.fromkeys(selections, dataclasses.replace(other, kind="sort")),
    }


def _along_dims() -> dict[Any, Op]:
    def along(
        linear: LinearRule, worked_dims: along_dims.WorkedDims = along_dims.dim_argument
    ) -> Op:
        return Op("index", *along_dims.along(worked_dims), linear)

    norm = Op("reduce", along_dims.norm_forward, along_dims.norm_backward, never)
    sort = dataclasses.replace(along(never), kind="sort")
    sorts = (
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.cumprod.default,
        aten.cummax.default,
        aten.cummin.default,
        aten.logcumsumexp.default,
        aten.scatter_reduce.two,
    )
    softmaxes = (aten._softmax.default, aten._log_softmax.default)
    return {
        **dict.fromkeys(softmaxes, along(never)),
        **dict.fromkeys(sorts, sort),
        aten.cumsum.default: along(first_only),
        aten.gather.default: along(first_only),
        aten.cat.default: along(linearity.linear_cat),
        aten.stack.default: Op(
            "index", along_dims.stack_forward, along_dims.stack_backward, linearity.linear_cat
        ),
        **dict.fromkeys(
            (
                aten.slice_scatter.default,
                aten.scatter.value,
                aten.scatter.src,
                aten.scatter_add.default,
            ),
            along(linearity.linear_scatter),
        ),
        aten.select_scatter.default: Op(
            "index",
            along_dims.select_scatter_forward,
            along_dims.select_scatter_backward,
            linearity.linear_scatter,
        ),
        **dict.fromkeys(
            (aten.flip.default, aten.roll.default, prims.rev.default),
            along(linear_view, along_dims.dims_argument),
        ),
        **dict.fromkeys(
            (aten.tril.default, aten.triu.default), along(linear_view, along_dims.last_two)
        ),
        aten.constant_pad_nd.default: along(linearity.linear_pad, along_dims.padded),
        aten.repeat.default: Op(
            "index", along_dims.repeat_forward, along_dims.repeat_backward, linear_view
        ),
        aten.native_layer_norm.default: norm,
    }


def _indexing() -> dict[Any, Op]:
    read = Op("index", indexing.index_forward, indexing.index_backward, linear_view)
    write = Op("write", indexing.put_forward, indexing.put_backward, linearity.linear_put)
    return {
        aten.embedding.default: Op(
            "index", indexing.embedding_forward, indexing.embedding_backward, never
        ),
        **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), read),
        **dict.fromkeys(indexing.PUTS, write),
    }


def _created() -> dict[Any, Op]:
    created = Op(
        "create", pointwise.created_forward, pointwise.created_backward, never, shape_arg=0
    )
    like = dataclasses.replace(created, shape_arg=None)
    constant = Op("create", pointwise.created_forward, pointwise.iota_backward, never)
    return {
        **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), created),
        **dict.fromkeys(
            (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), like
        ),
        **dict.fromkeys((aten.scalar_tensor.default, prims.iota.default), constant),
    }


def _collectives() -> dict[Any, Op]:
    names = {
        collectives.elementwise: ("all_reduce", "broadcast", "wait_tensor"),
        collectives.first_dim: (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
        ),
    }
    found = {
        op: Op("collective", *rules, never)
        for rules, each in names.items()
        for op in overloads(tuple(f"{NAMESPACE}::{name}" for name in each))
    }
    exchanged = Op("collective", *collectives.gathered_and_divided, never)
    return {**found, **dict.fromkeys(overloads((ALL_TO_ALL_OF_DTENSOR,)), exchanged)}


# Ops of which it is known that they are not token-parallel, by the names of their schemas.
_ATTENTION = "attention: every token reads other tokens"
GROUPED_BY_EXPERT = "the rows are grouped by expert"
_RANDOM = "draws random numbers"
_ACCUMULATES = "adds rows at indices that depend on the token"
_COUNTS = "counts over all elements"
NOT_TOKEN_PARALLEL: Mapping[str, str] = {
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
    **dict.fromkeys(
        ("aten::_flash_attention_forward", "aten::_flash_attention_backward"), _ATTENTION
    ),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), GROUPED_BY_EXPERT),
    "transformers::grouped_mm_fallback": GROUPED_BY_EXPERT,
    "transformers::grouped_mm_fallback_backward": GROUPED_BY_EXPERT,
    "aten::embedding_dense_backward": _ACCUMULATES,
    "aten::_unsafe_masked_index_put_accumulate": _ACCUMULATES,
    **dict.fromkeys(("prims::inductor_random", "prims::inductor_randint"), _RANDOM),
    "prims::inductor_lookup_seed": "draws a random seed",
    **dict.fromkeys(("aten::histc", "aten::bincount"), _COUNTS),
    "aten::convolution": "a convolution reads neighbouring positions",
    "aten::convolution_backward": "a convolution reads neighbouring positions",
    "aten::nonzero": "the size of the result depends on data",
    **dict.fromkeys(
        ("aten::as_strided", "aten::as_strided_scatter", "aten::new_empty_strided"),
        "addresses memory by strides, not by dims",
    ),
    "aten::equal": "compares whole tensors",
}

TABLE: Mapping[Any, Op] = _rows()
