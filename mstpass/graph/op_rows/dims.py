"""The rows of views, of reductions, of ops along a dim, and of reads and writes by index."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from mstpass.graph import linearity
from mstpass.graph.advice import EXTREMA, NO_STACKS, ROWWISE, SELECT_FIRST, Advice
from mstpass.graph.linearity import LinearRule, first_only, never
from mstpass.graph.op_rows.row import Row
from mstpass.graph.token_rules import along_dims, indexing, views
from mstpass.graph.tokens import ANY, MAX, MIN, SUM
from mstpass.problem.op import CALL, ITEM, SCATTER

aten = torch.ops.aten
prims = torch.ops.prims
ADDS_ROWS = SELECT_FIRST("adds rows at indices that depend on the token")


def view_rows() -> dict[Any, Row]:
    view = Row(
        "view",
        views.ThroughView(),
        first_only,
        shape_arg=1,
    )
    squeezed = dataclasses.replace(view, shape_arg=None)
    whole = dataclasses.replace(squeezed, rule=views.ThroughView(drops_ones=True))
    permute = Row("view", along_dims.permuted, first_only)
    along = along_dims.along(along_dims.dim_argument)
    item = Row("view", along_dims.selected, first_only, reads_elsewhere=True)
    part = Row("view", along, first_only, reads_elsewhere=True)
    return {
        operator.getitem: Row("view", views.item, first_only, runs=ITEM),
        **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), view),
        **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), squeezed),
        aten.squeeze.default: whole,
        **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), permute),
        aten.expand.default: Row(
            "view",
            views.pointwise,
            first_only,
            shape_arg=1,
        ),
        **dict.fromkeys(
            (aten.view_as_complex.default, aten.view_as_real.default),
            Row("view", along_dims.as_complex, first_only),
        ),
        **dict.fromkeys((aten.select.int, aten.unbind.int), item),
        **dict.fromkeys(
            (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default), part
        ),
    }


def reduction_rows() -> dict[Any, Row]:
    def reduction(kind: str, linear: LinearRule, *how: Any) -> Row:
        return Row(kind, along_dims.reduced(*how), linear)

    others = (
        aten.var_mean.correction,
        aten.var.correction,
        aten.logsumexp.default,
        aten.argmax.default,
        aten.argmin.default,
        aten.prod.dim_int,
    )
    selections = (  # Inductor calls ATen's kernels for these
        aten.kthvalue.default,
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
    )
    total, mean = reduction("reduce", first_only, SUM), reduction("reduce", first_only)
    largest, least = reduction("reduce", never, MAX), reduction("reduce", never, MIN)
    some = reduction("reduce", never, ANY)
    return {
        **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), total),
        **dict.fromkeys((aten.amax.default, aten.max.default), largest),
        **dict.fromkeys((aten.amin.default, aten.min.default), least),
        **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), some),
        **dict.fromkeys((aten.mean.dim, aten.mean.default), mean),
        **dict.fromkeys(others, reduction("reduce", never)),
        **dict.fromkeys((aten.max.dim, aten.min.dim), reduction("reduce", never, None, EXTREMA)),
        "prims::prepare_softmax_online": Row("reduce"),  # of Inductor's last graphs
        **dict.fromkeys(selections, reduction("sort", never)),
        aten.native_layer_norm.default: Row("reduce", along_dims.norm),
    }


def rows_along_dims() -> dict[Any, Row]:
    def along(
        linear: LinearRule = never,
        worked_dims: along_dims.WorkedDims = along_dims.dim_argument,
        kind: str = "index",
        advice: Advice = ROWWISE,
        reads_elsewhere: bool = True,
        **known: Any,
    ) -> Row:
        rule = along_dims.along(worked_dims, advice)
        return Row(kind, rule, linear, reads_elsewhere=reads_elsewhere, **known)

    in_place = along(reads_elsewhere=False)
    triangle = along(first_only, along_dims.last_two, reads_elsewhere=False)
    cat = along(
        linearity.linear_cat, advice=NO_STACKS, runs=CALL
    )  # if it copies a part (memory/kernel_rules.py)
    stacked, inserted = along_dims.stacked, along_dims.select_scattered
    written = along(linearity.sum_of(0, -1), runs=SCATTER)
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
    return {
        **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), in_place),
        **dict.fromkeys(sorts, along(kind="sort", reads_elsewhere=False)),
        aten.cumsum.default: along(first_only, runs=CALL),  # a loop nest of its own
        aten.gather.default: along(first_only),
        aten.cat.default: cat,
        aten.stack.default: Row("index", stacked, linearity.linear_cat, reads_elsewhere=True),
        aten.slice_scatter.default: along(linearity.sum_of(0, 1), pads=True),
        aten.select_scatter.default: Row(
            "index", inserted, linearity.sum_of(0, 1), reads_elsewhere=True, pads=True
        ),
        aten.constant_pad_nd.default: along(linearity.linear_pad, along_dims.padded, pads=True),
        **dict.fromkeys((aten.scatter.value, aten.scatter.src), written),
        aten.scatter_add.default: dataclasses.replace(written, added_rows=3),
        **dict.fromkeys(
            (aten.flip.default, aten.roll.default, prims.rev.default),
            along(first_only, along_dims.dims_argument),
        ),
        **dict.fromkeys((aten.tril.default, aten.triu.default), triangle),
        aten.repeat.default: Row("index", along_dims.repeated, first_only, reads_elsewhere=True),
    }


def index_rows() -> dict[Any, Row]:
    read = Row("index", indexing.read, first_only, reads_elsewhere=True)
    write = Row("write", indexing.put, linearity.linear_put, added_rows=2, runs=SCATTER)
    return {
        aten.embedding.default: Row("index", indexing.embedding, reads_elsewhere=True),
        **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), read),
        **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), write),
        "aten::_unsafe_masked_index_put_accumulate": Row(
            "other",
            mixes=ADDS_ROWS,
            added_rows=3,
            runs=SCATTER,
        ),
    }
