"""The rows of products, attention, collectives, random draws and of other ops that mix tokens.

A key that is a name, such as ``aten::mm``, stands for all overloads without a row of their own, and
for the kernel of that name in Inductor's schedule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mstpass.graph import advice
from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.linearity import linear_matmul
from mstpass.graph.op_rows import row
from mstpass.graph.op_rows.row import CHEAP, HEAVY, PINNED, Attention, Factors, FlexArguments, Row
from mstpass.graph.token_rules import along_dims, products
from mstpass.problem.op import POINTWISE, REALIZED, VIEW
from mstpass.torch_internals.collectives import ALL_TO_ALL_OF_DTENSOR, NAMESPACE, WAITS, overloads
from mstpass.torch_internals.graphs import name_of

aten = torch.ops.aten


# ---- products ------------------------------------------------------------------------------------
def product_rows() -> dict[Any, Row]:
    rows_by_expert = Row(
        "matmul",
        products.grouped,
        factors=Factors(grouped=True),
        repeat=PINNED,
    )
    sums_by_expert = dataclasses.replace(rows_by_expert, factors=Factors(grouped=True, adds=True))
    by_expert = Row(
        "other",
        mixes=advice.ONLY_DENSE("the rows are grouped by expert"),
        factors=Factors(grouped=True),
    )
    found: dict[Any, Row] = {
        aten._scaled_mm.default: Row("matmul", products.scaled, factors=Factors()),
        grouped_rows: rows_by_expert,
        grouped_sums: sums_by_expert,
        **dict.fromkeys(("aten::_scaled_mm", "aten::_int_mm"), Row("other", factors=Factors())),
        **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), by_expert),
        **dict.fromkeys(
            ("transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"),
            dataclasses.replace(by_expert, repeat=PINNED),
        ),
        **dict.fromkeys(
            (
                "aten::addmm_",
                "aten::baddbmm_",
                "extern_kernels.bias_addmm",
                "mstpass::add_product_",
            ),
            Row("other", workspace=row.PRODUCT, repeat=PINNED),
        ),
    }
    for op in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
        biased = op in products.BIASED
        factors = Factors(left=int(biased), batched="bmm" in str(op), adds=not biased)
        found[name_of(op)] = Row("other", factors=factors, workspace=row.PRODUCT)
        found[op] = Row(
            "matmul",
            products.matmul,
            linear_matmul,
            factors=factors,
            workspace=row.PRODUCT,
            writes_anywhere=True,
        )
    return found


# ---- attention -----------------------------------------------------------------------------------
def attention_rows() -> dict[Any, Row]:
    """Fused attention; the names of the workspaces are those of memory/workspaces.py."""
    sdpa, flash, efficient = "aten::_scaled_dot_product_", "aten::_flash", "aten::_efficient"
    reason = advice.NEEDS_ALL("attention: every token reads other tokens")

    def fused(backward: bool, workspace: str, **known: Any) -> Row:
        attention = Attention(backward, results=4 if backward else 2, **known)
        return Row("other", mixes=reason, attention=attention, workspace=workspace)

    def both(name: str, forward: str, backward: str, **known: Any) -> dict[str, Row]:
        of_backward = fused(True, backward, **known)
        return {name: fused(False, forward, **known), f"{name}_backward": of_backward}

    by_memory = {"by_row": True, "efficient": True}
    return {
        **both(f"{sdpa}flash_attention_for_cpu", row.CPU_FLASH, row.CPU_FLASH, by_row=True),
        **both(f"{sdpa}flash_attention", row.FLASH, row.FLASH_BACKWARD),
        f"{sdpa}efficient_attention": fused(False, row.EFFICIENT, **by_memory),
        f"{sdpa}efficient_attention_backward": fused(
            True, row.EFFICIENT_BACKWARD, mask_to_write=4, **by_memory
        ),
        **both(f"{sdpa}cudnn_attention", "", row.CUDNN_BACKWARD, by_row=True),
        **both(f"{sdpa}fused_attention_overrideable", "", ""),
        f"{flash}_attention_forward": fused(False, row.FLASH, heads_dim=2),
        f"{flash}_attention_backward": fused(True, row.FLASH_BACKWARD, heads_dim=2),
        # No loop over heads runs these.
        f"{efficient}_attention_forward": Row(
            "other", attention=Attention(False, heads_dim=2), workspace=row.EFFICIENT
        ),
        f"{efficient}_attention_backward": Row(
            "other",
            attention=Attention(True, heads_dim=2, mask_to_write=4),
            workspace=row.EFFICIENT_BACKWARD,
        ),
        "aten::_cudnn_attention_backward": Row(
            "other", attention=Attention(True), workspace=row.CUDNN_BACKWARD
        ),
        "flex_attention": Row(
            "other", attention=Attention(False, results=3, flex=FlexArguments(3, 4, (3,)))
        ),
        "flex_attention_backward": Row(
            "other",
            attention=Attention(True, results=3, flex=FlexArguments(7, 9, (7, 8))),
            workspace=row.FLEX_BACKWARD,
        ),
        **both("mstpass::attend_rows", row.ROWS, row.ROWS_BACKWARD),
        "mstpass::add_attend_rows_backward_": fused(True, row.ROWS_BACKWARD),
    }


# ---- collectives ---------------------------------------------------------------------------------
def collective_rows() -> dict[Any, Row]:
    names = {
        along_dims.elementwise_over_ranks: ("all_reduce", "broadcast", "wait_tensor"),
        along_dims.first_dim_over_ranks: (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
        ),
    }
    found: dict[Any, Row] = {name: Row("other", runs=VIEW, repeat=PINNED) for name in WAITS}
    for rules, each in names.items():
        for name in (f"{NAMESPACE}::{op}" for op in each):
            runs = VIEW if name in WAITS else ""  # it returns the memory of the pending result
            found |= dict.fromkeys(overloads((name,)), Row("collective", rules, runs=runs))
    exchanged = Row("collective", along_dims.gathered_and_divided)
    return {**found, **dict.fromkeys(overloads((ALL_TO_ALL_OF_DTENSOR,)), exchanged)}


_POOLS = (  # and their gradients; Inductor decomposes other ops that resize or pool
    *(f"aten::{kind}_pool{dims}d" for kind in ("avg", "_adaptive_avg") for dims in (2, 3)),
    *(f"aten::{kind}_pool{dims}d_backward" for kind in ("avg", "_adaptive_avg") for dims in (2, 3)),
    *(f"aten::max_pool{dims}d_with_indices" for dims in (2, 3)),
    *(f"aten::max_pool{dims}d_with_indices_backward" for dims in (2, 3)),
    "prims::_low_memory_max_pool_with_offsets",
)


# ---- the rest ------------------------------------------------------------------------------------
def other_rows() -> dict[Any, Row]:
    """Ops that mix tokens, those that draw random numbers, and ops of mstpass itself."""
    random, counts = (
        advice.NO_DROPOUT("draws random numbers"),
        advice.ROWWISE("counts over all elements"),
    )
    neighbours = advice.NEEDS_ALL("a convolution reads neighbouring positions")
    strides = advice.SEPARATE_DIMS("addresses memory by strides, not by dims")
    reasons = {
        "aten::embedding_dense_backward": advice.SELECT_FIRST(
            "adds rows at indices that depend on the token"
        ),
        "prims::inductor_lookup_seed": advice.NO_DROPOUT("draws a random seed"),
        **dict.fromkeys(("aten::histc", "aten::bincount"), counts),
        **dict.fromkeys(("aten::convolution", "aten::convolution_backward"), neighbours),
        **dict.fromkeys(_POOLS, advice.RESIZE_FEATURES("pools neighbouring positions")),
        "aten::nonzero": advice.SELECT_FIRST("the size of the result depends on data"),
        **dict.fromkeys(
            ("aten::as_strided", "aten::as_strided_scatter", "aten::new_empty_strided"), strides
        ),
        "aten::equal": advice.ROWWISE("compares whole tensors"),
    }
    return {
        **{name: Row("other", mixes=reason) for name, reason in reasons.items()},
        # Functions of a seed, which is a value of the graph, and of their position. They are pinned
        # although a second run would give the same numbers.
        **dict.fromkeys(
            ("prims::inductor_random", "prims::inductor_randint"),
            Row("other", mixes=random, repeat=PINNED),
        ),
        # Frozen weights in 4 bits: a layer's weight is made again rather than kept for backward.
        **dict.fromkeys(
            ("bitsandbytes::dequantize_4bit", "mstpass::dequantize_nf4"),
            Row("other", repeat=CHEAP),
        ),
        "mst_loop": Row("other", repeat=HEAVY),  # the mode of its region says whether it may
        "mstpass::realize": Row("other", runs=REALIZED, repeat=PINNED),
        "mstpass::before_write": Row("other", runs=POINTWISE, repeat=PINNED),  # it becomes a copy
    }
