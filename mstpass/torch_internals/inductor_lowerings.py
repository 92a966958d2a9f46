"""Tell Inductor how to lower an op: write a value to memory, or call the op as it is.

Also the table of decompositions that Inductor applies before it lowers: graphs that are traced
after AOTAutograd need it. Source: torch/_inductor/lowering.py, decomposition.py, ir.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import lowering
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from mstpass.torch_internals.op_types import OpOverload
from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["call_as_it_is", "call_with_aligned_result", "select_decomp_table", "write_to_memory"]

APIS = PrivateApis(
    names=(
        "torch._inductor.lowering.lowerings",
        "torch._inductor.lowering.register_lowering(type_promotion_kind)",
        "torch._inductor.lowering.make_fallback(warn)",
        "torch._inductor.lowering.fallback_handler",
        "torch._inductor.graph.GraphLowering",
        "torch._inductor.virtualized.V",
        "torch._inductor.ir.StorageBox.realize",
        "torch._inductor.decomposition.select_decomp_table",
    ),
)


def write_to_memory(op: OpOverload) -> None:
    """Lower an op of one tensor to that tensor, written where the op stands."""
    if op not in lowering.lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_written)


def _written(value: Any) -> Any:
    value.realize()
    return value


def call_as_it_is(op: OpOverload) -> None:
    """Have Inductor call an op that it has no lowering for.

    It does so by itself, except where the environment variable CI is set: there it asserts that
    the op has no decomposition (2.11 and 2.13).
    """
    if op not in lowering.lowerings:
        lowering.make_fallback(op, warn=False)


def call_with_aligned_result(op: OpOverload) -> None:
    """Have Inductor call an op as it is, and take its result to begin at a multiple of 16 bytes.

    Inductor does not take that for granted where an operand of the op is on the CPU, and makes
    slower kernels for what reads the result.
    """
    if op in lowering.lowerings:
        return
    call = lowering.fallback_handler(op)

    def aligned(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        V.graph.unaligned_buffers.discard(result.get_name())
        return result

    lowering.register_lowering(op, type_promotion_kind=None)(aligned)


def probe() -> None:
    APIS.require()
    APIS.expect(torch.ops.aten.mm.default in lowering.lowerings, "lowerings has no aten.mm")
    table = select_decomp_table()
    APIS.expect(torch.ops.aten.zeros.default in table, "select_decomp_table has no aten.zeros")
    call_as_it_is(torch.ops.aten.addmm_.default)
    known = torch.ops.aten.addmm_.default in lowering.lowerings
    APIS.expect(known, "make_fallback does not register a lowering")
