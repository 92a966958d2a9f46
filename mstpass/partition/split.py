"""Split a joint graph into forward and backward modules, as a plan has them, or as torch would.

::

    program = what the plan makes of the graph                 (memory/program.py)
    crossing = saved values, and the inputs, sizes and opaque values of the step that backward reads
    forward, backward = torch's extraction of the two graphs around them
    both are written again in the order of the program         (schedule/write_program.py)

**Torch's own partitioner** gets the graphs of which our partition problem lacks what they do. Such
graphs have writes of other forms than the update of a buffer (graph/own_ops.py), sizes that depend
on data, sends and receives between two ranks, subgraphs (but for FlexAttention's), or a memory
budget that the user set for a part of the model.

**Inductor alone** would save the values that this partitioner saves. They enter the partition
problem as data (``CutProblem.torch_saved``), with the time and the peak of the step in which they
are saved (``CutProblem.alone``). The search, the promise that no plan needs more memory, and the
report all compare with this one step: with the graph as it was traced, before any rewrite. The
partitioner runs on a copy of that graph, and builds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import OUR_BUDGET
from mstpass.graph.attention import is_flex, is_flex_subgraph
from mstpass.graph.collectives import is_between_two_ranks
from mstpass.graph.joint import JointGraph, Modules, is_tangent, nbytes, tensors_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.node_meta import source_of
from mstpass.graph.recompute_rules import (
    draws_random_numbers,
    has_effect,
    policies_of,
    unproven_write,
)
from mstpass.graph.sizes import depends_on_data, is_size
from mstpass.memory.host_copies import HostCopy
from mstpass.memory.program import Program
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.solvers.candidate import Candidate, by_torch
from mstpass.plans import SavedValue, SavePlan, Transfer
from mstpass.problem.op import ITEM, VIEW
from mstpass.problem.problem import RECOMPUTED, Alone, CutProblem, Plan, Value
from mstpass.schedule.write_program import write_program
from mstpass.torch_internals.aot_autograd import (
    extract_forward_and_backward,
    finish_forward_and_backward,
    has_torch_budget,
    min_cut_rematerialization_partition,
    saved_by_torch,
)
from mstpass.torch_internals.graphs import HigherOrderOperator, is_opaque
from mstpass.walk import walk, walk_once

TORCH_BUDGET = OUR_BUDGET(
    "a part of the model has torch's own budget, which only torch's partitioner obeys"
)


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


# ---- torch's partitioner -------------------------------------------------------------------------
def split_by_torch(joint: JointGraph, **torch_kwargs: Any) -> tuple[Modules, SavePlan]:
    """Forward and backward modules by torch's partitioner, and the values that cross."""
    modules = min_cut_rematerialization_partition(
        joint.module, None, num_fwd_outputs=joint.num_fwd_outputs, **torch_kwargs
    )
    return modules, SavePlan(saved_values(modules, joint), "torch")


def needs_torch(joint: JointGraph) -> str:
    """The reason to leave the graph to torch's partitioner; empty where we split it."""
    if reason := unproven_write(joint):
        return reason
    for node, tag in policies_of(joint).tags.items():
        if tag in RECOMPUTED and draws_random_numbers(node):
            return f"{node.name} draws random numbers inside a checkpoint, which repeats the draw"
    reasons = filter(None, map(_unsupported, joint.nodes))
    return next(reasons, TORCH_BUDGET if has_torch_budget(joint.nodes) else "")


def _unsupported(node: fx.Node) -> str:
    """What our partition problem cannot describe about a node; empty for most nodes."""
    value = node.meta.get("val")
    tensors = list(tensors_of(value))
    if value is not None and not tensors and not is_size(node) and not is_opaque(node):
        return f"{node.name} is neither a tensor nor a size"
    if any(map(depends_on_data, tensors)):
        return f"the size of {node.name} depends on data"
    for user in node.users if node.op == "get_attr" else ():
        if _is_unknown(user):
            return f"{user.name} is the higher-order op {user.target}"
    if node.op == "get_attr" and not (tensors or _is_loop_body(node) or is_flex_subgraph(node)):
        return f"{node.name} is a subgraph"
    if _is_unknown(node):
        return f"{node.name} is the higher-order op {node.target}"
    if node.meta.get("memory_budget") is not None:
        return TORCH_BUDGET
    return f"{node.name} is a send or a receive" if is_between_two_ranks(node) else ""


def _is_unknown(node: fx.Node) -> bool:
    """Whether the node is a higher-order op other than those whose subgraphs we know.

    Most ops with an effect have none.
    """
    is_known = node.target is mst_loop or is_flex(node) or has_effect(node)
    return isinstance(node.target, HigherOrderOperator) and not is_known


def _is_loop_body(node: fx.Node) -> bool:
    return all(user.target is mst_loop for user in node.users)


def inductor_alone(traced: JointGraph, static_inputs: list[int] | None = None) -> Candidate | str:
    """The step as Inductor alone splits it, or why that is not known.

    Args:
        traced: the joint graph as Inductor's joint passes have left it.
        static_inputs: as AOTAutograd gives them to a partitioner.
    """
    try:
        names = saved_by_torch(traced.copy().module, traced.num_fwd_outputs, static_inputs)
    except Exception as error:  # of torch's own code, whose choice is not needed for a plan
        return f"torch's partitioner fails on this graph: {type(error).__name__}: {error}"
    found = by_torch(_with_torch_saved(cut_problem(traced), names))
    assert found is not None, "by_torch has a plan where it is known what torch saves"
    return found


def with_alone(
    problem: CutProblem, joint: JointGraph, traced: JointGraph, alone: Candidate
) -> CutProblem:
    """The problem of a graph that knows the step under Inductor alone.

    Args:
        joint: the graph, which rewrites may have made from ``traced``.
    """
    saved = (name for kept in alone.plan.saved for name in _holding(joint, traced, kept))
    figures = Alone(alone.us, alone.peak_bytes)
    return dataclasses.replace(_with_torch_saved(problem, saved), alone=figures)


def _holding(joint: JointGraph, traced: JointGraph, name: str) -> Iterator[str]:
    """The nodes of a rewritten graph that hold what a node of the traced graph holds.

    Where that node has no place there, as a product of which rewrites compute only the rows that
    are read, these are what its views have become.
    """
    found = lambda node: joint.standing_for(node.name)
    views = lambda node: () if found(node) else filter(ops.shares_storage, node.users)
    return filter(None, map(found, walk([traced.by_name[name]], views)))


def _with_torch_saved(problem: CutProblem, names: Iterable[str]) -> CutProblem:
    """The problem that knows what torch saves, of the values that it has.

    A view stands for the value that it shows. Inputs of the step and sizes take no memory.
    """
    by_name = {value.name: value for value in problem.values}
    saved = {_base(by_name, name) for name in names if name in by_name}
    kept = [v.name for v in problem.values if v.name in saved and v.savable and not v.free]
    return dataclasses.replace(problem, torch_saved=tuple(kept))


def _base(by_name: dict[str, Value], name: str) -> str:
    """The value that a view, or an item of a split, shows."""
    value = by_name[name]
    while value.kind in (VIEW, ITEM) and not value.savable and value.inputs:
        value = by_name[value.inputs[0]]
    return value.name
