"""Split a joint graph into forward and backward modules, as a plan has them.

::

    program = what the plan makes of the graph                 (memory/program.py)
    crossing = saved values, and the inputs, sizes and opaque values of the step that backward reads
    forward, backward = torch's extraction of the two graphs around them
    both are written again in the order of the program         (schedule/write_program.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph, Modules, is_tangent, nbytes
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import is_size
from mstpass.memory.host_copies import HostCopy
from mstpass.memory.program import Program
from mstpass.plans import SavedValue, SavePlan, Transfer
from mstpass.problem.problem import Plan
from mstpass.schedule.write_program import write_program
from mstpass.torch_internals.aot_autograd import (
    extract_forward_and_backward,
    finish_forward_and_backward,
)
from mstpass.torch_internals.graphs import is_opaque
from mstpass.walk import walk_once


def split_joint(
    joint: JointGraph, program: Program, plan: Plan, solver: str, **torch_kwargs: Any
) -> tuple[Modules, SavePlan]:
    """Forward and backward modules, and the values that cross between them.

    Args:
        program: what ``plan`` makes of this graph.
        solver: the name of the solver that made the plan, for the report.
        torch_kwargs: further arguments that AOTAutograd passes to a partitioner.
    """
    extracted = _extract(joint, [joint.by_name[n] for n in plan.saved], torch_kwargs)
    written, on_host = write_program(extracted, program)
    modules = finish_forward_and_backward(*written)
    nested = sorted(plan.nested.keys() - plan.saved)
    saved = [
        dataclasses.replace(
            value,
            node=on_host[value.node],
            value=value.node,
            on_host=True,
            by_chunk=value.node in plan.by_chunk,
        )
        if value.node in on_host
        else value
        for value in saved_values(extracted, joint)
    ]
    save_plan = SavePlan(
        tuple(saved),
        solver,
        nested=tuple(nested),
        inner=tuple(name for name in nested if plan.nested[name] > 1),
        levels=tuple(plan.nested[name] for name in nested),
    )
    return modules, _with_transfers(save_plan, program) if program.offloads else save_plan


def _with_transfers(save_plan: SavePlan, program: Program) -> SavePlan:
    """The same with the copies between device and host, and the times of the ops beside them."""

    def transfers(copies: tuple[HostCopy, ...], to_host: bool) -> Iterator[Transfer]:
        for copy in copies:
            times = copy.start_us, copy.end_us, copy.stall_us
            yield Transfer(copy.name, copy.bytes, to_host, *times)

    return dataclasses.replace(
        save_plan,
        transfers=(*transfers(program.offloads, True), *transfers(program.reloads, False)),
        forward_us=sum(op.us for op in program.forward),
        backward_us=sum(op.us for op in program.backward),
    )


def saved_values(modules: Modules, joint: JointGraph) -> tuple[SavedValue, ...]:
    """What the forward module returns for the backward, without inputs of the step, sizes and
    opaque values.

    The largest comes first.
    """
    forward, _ = modules
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "the outputs are a list"
    crossing = {
        n.name: n
        for n in outputs[joint.num_fwd_outputs :]
        if isinstance(n, fx.Node) and n.op != "placeholder" and not _takes_no_memory(n)
    }
    saved = [
        SavedValue(n.name, nbytes(n), source_of(joint.by_name.get(n.name, n)))
        for n in crossing.values()
    ]
    return tuple(sorted(saved, key=lambda value: -value.bytes))


def _extract(joint: JointGraph, saved: list[fx.Node], torch_kwargs: dict[str, Any]) -> Modules:
    """The two graphs around the saved nodes, by torch's extraction."""
    saved = joint.sorted(saved)
    read = joint.sorted(_free_values_read(joint, saved))
    inputs = [n for n in read if not _takes_no_memory(n)]
    placeholders = [n for n in joint.nodes if n.op == "placeholder"]
    static = torch_kwargs.get("static_lifetime_input_indices") or []
    return extract_forward_and_backward(
        joint.module,
        [*inputs, *saved],
        saved_sizes=[n for n in read if is_size(n)],
        num_fwd_outputs=joint.num_fwd_outputs,
        static_inputs=[placeholders[i] for i in static],
        saved_opaque=[n for n in read if is_opaque(n)],
    )


def _takes_no_memory(node: fx.Node) -> bool:
    """Whether the value is a size, or opaque: it crosses as it is."""
    return is_size(node) or is_opaque(node)


def _free_values_read(joint: JointGraph, saved: list[fx.Node]) -> set[fx.Node]:
    """The inputs, sizes and opaque values that backward reads, itself or to recompute a value."""
    crosses = lambda node: _takes_no_memory(node) and node not in joint.backward
    ends = {*saved, *filter(crosses, joint.nodes)}
    read = walk_once(joint.backward_outputs, lambda n: () if n in ends else n.all_input_nodes)
    is_input = lambda node: node.op == "placeholder" and not is_tangent(node)
    return {node for node in read if crosses(node) or is_input(node)} - set(saved)
