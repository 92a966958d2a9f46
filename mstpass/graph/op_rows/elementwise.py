"""The rows of pointwise ops, of copies, and of ops that make a value from no tensor.

Pointwise ops need no row unless something is known of them besides: PyTorch tags them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mstpass.graph import linearity
from mstpass.graph.linearity import LinearRule, first_only, never
from mstpass.graph.op_rows.row import Row
from mstpass.graph.token_rules import views

aten = torch.ops.aten
prims = torch.ops.prims


def pointwise(linear: LinearRule = never, **known: Any) -> Row:
    """The row of a pointwise op, with what is known of it besides."""
    return Row("pointwise", views.pointwise, linear, **known)


# The ``work`` of rows is ns for an element * 10 bytes of memory in a ns. Measured 2026-11-28 as the
# ns that one more op adds to a fused kernel (2 cores of an AMD EPYC, 2 threads, fp32, torch 2.13):
# exp 0.24, sigmoid 0.30, log 0.32, erf 0.38, sin 0.18, log1p 0.51, tanh 0.95, pow 1.36; add, mul,
# div, cast and round under 0.01, where and a comparison 0.01, an op on rows of 16 elements 0.03.
def pointwise_rows() -> dict[Any, Row]:
    return {
        aten.add.Tensor: pointwise(linearity.sum_of(0, 1)),
        aten.sub.Tensor: pointwise(linearity.sum_of(0, 1)),
        aten.mul.Tensor: pointwise(linearity.product),
        aten.div.Tensor: pointwise(first_only),
        aten.neg.default: pointwise(first_only),
        aten.where.self: pointwise(linearity.branches),
        "prims::fma": pointwise(linearity.product_and_term),  # of Inductor, from torch 2.12 on
        **dict.fromkeys(
            (
                aten.mul.Scalar,
                aten.div.Scalar,
                aten.threshold_backward.default,
                aten.gelu_backward.default,
                aten.silu_backward.default,
                aten.sigmoid_backward.default,
                aten.tanh_backward.default,
                aten.native_dropout_backward.default,
            ),
            pointwise(first_only),
        ),
        aten.exp.default: pointwise(work=2.4, slow_on_cpu=True),
        aten.log.default: pointwise(work=3, slow_on_cpu=True),
        aten.sigmoid.default: pointwise(work=3, slow_on_cpu=True),
        aten.tanh.default: pointwise(work=9, slow_on_cpu=True),
        aten.softplus.default: pointwise(work=8),
        **dict.fromkeys(
            (aten.log10.default, aten.log1p.default, aten.log2.default),
            pointwise(work=5, slow_on_cpu=True),
        ),
        **dict.fromkeys((aten.cos.default, aten.sin.default, aten.erf.default), pointwise(work=3)),
        aten.pow.Tensor_Tensor: pointwise(work=14),
        **dict.fromkeys(
            (
                aten.sign.default,
                aten.sgn.default,
                aten.floor.default,
                aten.ceil.default,
                aten.round.default,
                aten.trunc.default,
                aten.fmod.Scalar,
                aten.fmod.Tensor,
                aten.remainder.Scalar,
                aten.remainder.Tensor,
            ),
            pointwise(jumps=True),
        ),
        aten.clone.default: pointwise(first_only, copies=True),
        aten.copy.default: pointwise(),
        # Linear if the new dtype only rounds: see ``Row.is_linear``.
        prims.convert_element_type.default: pointwise(first_only, copies=True),
    }


def created_rows() -> dict[Any, Row]:
    created = Row("create", views.created, shape_arg=0)
    like = dataclasses.replace(created, shape_arg=None)
    constant = dataclasses.replace(like, rule=views.numbered)
    return {
        **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), created),
        **dict.fromkeys(
            (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), like
        ),
        **dict.fromkeys(
            (aten.scalar_tensor.default, prims.iota.default, aten.arange.start_step), constant
        ),
    }
