"""Tell the compiler about how large a size is that only the running program knows.

Inductor takes unknown sizes as 0 where it counts the bytes that two kernels share, and then fuses
none of them. Source: torch/fx/experimental/symbolic_shapes.py, torch/_inductor/sizevars.py.
"""

from __future__ import annotations

from torch import SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unbacked_symint",
        "torch._inductor.sizevars.SizeVarAllocator.optimization_hint(fallback)",
    ),
)


def set_hint(size: SymInt, hint: int) -> None:
    """Estimates take the size, which is a symbol of its own, as ``hint``; nothing is guarded."""
    size.node.shape_env.var_to_hint_override[size.node.expr] = hint


def probe() -> None:
    from torch._inductor.sizevars import SizeVarAllocator

    APIS.require()
    shapes = ShapeEnv()
    size = shapes.create_unbacked_symint()
    set_hint(size, 7)
    found = SizeVarAllocator(shapes).optimization_hint(size.node.expr, fallback=0)
    APIS.expect(found == 7, f"a hint of 7 for an unknown size is read as {found}")
