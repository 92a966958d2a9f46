"""Whether Inductor's schedule runs the loops of a graph, each before what reads its results.

A loop writes into buffers that exist before it (loops/lowering.py), and nothing but the loop may
touch them until it has run. A scheduler that loses the names of what a loop writes could move a
reader in front of it (scheduler_dependencies.py); gradients would then be wrong, and nothing would
say so. Source: torch/_inductor/scheduler.py (``mutation_real_name``), ir.py (``WhileLoop``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

from mstpass.torch_internals.private_apis import LostLoopError, PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.dependencies.WeakDep",
        "torch._inductor.graph.GraphLowering.run_node",  # an interpreter of the graph it has
        "torch._inductor.ir.WhileLoop",
        "torch._inductor.scheduler.BaseSchedulerNode.get_nodes",
        "torch._inductor.scheduler.BaseSchedulerNode.get_outputs",
        "torch._inductor.scheduler.SchedulerBuffer.get_mutations",
        "torch._inductor.virtualized.V",
    ),
)


def check_loops(nodes: Sequence[Any], condition: str) -> None:
    """Check the schedule of the graph that Inductor compiles now.

    Args:
        nodes: the scheduler's kernels, in their final order.
        condition: what the names of our loops' conditions begin with.

    Raises:
        LostLoopError: a loop is missing, or a kernel reads what it writes before it has run.
    """
    expected = sum(_is_call(node, condition) for node in V.graph.graph.nodes)
    read: set[str] = set()
    found = 0
    for part in (part for node in nodes for part in node.get_nodes()):
        real_name = part.scheduler.mutation_real_name
        if _is_loop(part.node, condition):
            found += 1
            results = part.get_outputs()
            written = {real_name.get(n, n) for r in results for n in r.get_mutations()}
            early = sorted(written & read)
            if not written:
                raise LostLoopError("a loop in Inductor's schedule writes no buffer")
            if early:
                raise LostLoopError(f"Inductor reads {early[0]} before the loop that fills it")
        deps = part.read_writes.reads
        read |= {real_name.get(d.name, d.name) for d in deps if not isinstance(d, WeakDep)}
    if found != expected:
        raise LostLoopError(f"Inductor's schedule has {found} of a graph's {expected} loops")


def _is_call(node: Any, condition: str) -> bool:
    if node.target is not torch.ops.higher_order.while_loop:
        return False
    return str(node.args[0].target).startswith(condition)


def _is_loop(kernel: Any, condition: str) -> bool:
    if not isinstance(kernel, ir.WhileLoop):
        return False
    return str(getattr(kernel.cond_subgraph, "name", "")).startswith(condition)


def probe() -> None:
    """That loops are found in real schedules is tested: tests/test_hook_checks.py."""
    APIS.require()
    fields = ir.WhileLoop.__dataclass_fields__
    APIS.expect("cond_subgraph" in fields, "torch._inductor.ir.WhileLoop has no cond_subgraph")
    operands = inspect.signature(torch.ops.higher_order.while_loop.__call__).parameters
    APIS.expect(next(iter(operands)) == "cond_fn", "while_loop's first operand is no condition")
