"""Sizes as the compiler sees them: their hints, and the names that they were given first.

Inductor takes unknown sizes as 0 where it counts the bytes that two kernels share, and then fuses
none of them. torch 2.11 does so for sizes with a hint as well; later ones count the hint.
Source: torch/fx/experimental/symbolic_shapes.py, torch/_inductor/sizevars.py and graph.py.
"""

from __future__ import annotations

import sympy
from torch import SymInt
from torch._inductor.dependencies import Dep
from torch._inductor.graph import GraphLowering
from torch._inductor.sizevars import SizeVarAllocator
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unbacked_symint",
        "torch._inductor.dependencies.Dep.numbytes_hint",
        "torch._inductor.dependencies.Dep.numel_hint",
        "torch._inductor.graph.GraphLowering.get_dep_size_hint(dep, count_bytes)",
        "torch._inductor.sizevars.SizeVarAllocator.optimization_hint(fallback)",
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",
        "torch.fx.experimental.sym_node.SymNode.expr",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode(hint)",
    ),
)

_COUNTS_HINTS = hasattr(SizeVarAllocator, "all_unbacked_explicitly_hinted")  # from torch 2.12 on


def set_hint(size: SymInt, hint: int) -> None:
    """Estimates take the size, which is a symbol of its own, as ``hint``; nothing is guarded."""
    size.node.shape_env.var_to_hint_override[size.node.expr] = hint


def count_hints(graph: GraphLowering) -> None:
    """Have a graph count what its kernels read and write by the hints of sizes, as torch 2.12 does.

    torch 2.11 counts 0 bytes, so that it fuses none of the kernels of a loop of symbolic length.
    """
    if _COUNTS_HINTS or "get_dep_size_hint" in vars(graph):
        return
    counted_by_torch, hints = graph.get_dep_size_hint, graph.sizevars.shape_env.var_to_hint_override

    def get_dep_size_hint(dep: Dep, count_bytes: bool = True) -> int:
        try:
            unknown = free_unbacked_symbols(dep.get_numel())
        except KeyError:  # it is of no value of the graph
            return counted_by_torch(dep, count_bytes)
        if not unknown or not unknown <= hints.keys():
            return counted_by_torch(dep, count_bytes)
        return dep.numbytes_hint() if count_bytes else dep.numel_hint()

    graph.get_dep_size_hint = get_dep_size_hint  # type: ignore[method-assign]


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
    APIS.require()
    shapes = ShapeEnv()
    size = shapes.create_unbacked_symint()
    set_hint(size, 7)
    found = SizeVarAllocator(shapes).optimization_hint(size.node.expr, fallback=0)
    APIS.expect(found == 7, f"a hint of 7 for an unknown size is read as {found}")
    names = (first_expression(size), first_expression(renamed(size)))
    APIS.expect(names == (size.node.expr,) * 2, "a size has another name than its own")
