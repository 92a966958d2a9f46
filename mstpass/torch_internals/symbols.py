"""Sizes as the compiler sees them: their hints, and the names that they were given first.

Inductor takes unknown sizes as 0 where it counts the bytes that two kernels share, and then fuses
none of them. Source: torch/fx/experimental/symbolic_shapes.py, torch/_inductor/sizevars.py.
"""

from __future__ import annotations

import sympy
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unbacked_symint",
        "torch._inductor.sizevars.SizeVarAllocator.optimization_hint(fallback)",
        "torch.fx.experimental.sym_node.SymNode.expr",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode(hint)",
    ),
)


def set_hint(size: SymInt, hint: int) -> None:
    """Estimates take the size, which is a symbol of its own, as ``hint``; nothing is guarded."""
    size.node.shape_env.var_to_hint_override[size.node.expr] = hint


def first_expression(size: SymInt) -> sympy.Expr:
    """The size before its symbol turned out equal to another one. Inductor names inputs by it."""
    found: sympy.Expr = size.node._expr
    return found


def renamed(size: SymInt) -> SymInt:
    """The same size, named by the symbol that stands for it now."""
    node = size.node
    found: SymInt = node.shape_env.create_symintnode(node.expr, hint=node.hint)
    return found


def probe() -> None:
    from torch._inductor.sizevars import SizeVarAllocator

    APIS.require()
    shapes = ShapeEnv()
    size = shapes.create_unbacked_symint()
    set_hint(size, 7)
    found = SizeVarAllocator(shapes).optimization_hint(size.node.expr, fallback=0)
    APIS.expect(found == 7, f"a hint of 7 for an unknown size is read as {found}")
    names = (first_expression(size), first_expression(renamed(size)))
    APIS.expect(names == (size.node.expr,) * 2, "a size has another name than its own")
