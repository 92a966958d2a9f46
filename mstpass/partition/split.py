"""Split a joint graph in forward and backward: the problem, and torch's extraction.

Private APIs of torch/_functorch/partitioners.py, checked with torch 2.13: ``min_cut_remat...``
(the fallback for graphs with what our problem does not model), ``_extract_fwd_bwd_modules``,
``reordering_to_mimic_autograd_engine``, ``raise_getitems``, ``thread_graphsafe_rng_from_hops``.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import raise_getitems

from mstpass.graph import op_table
from mstpass.graph.checkpoint_tags import Tags, tags_of
from mstpass.graph.cost import time_us
from mstpass.graph.joint import JointGraph, Modules, is_tangent, nbytes, tensors_of, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.recomputable import draws, is_heavy, is_pinned, shares_storage
from mstpass.graph.sizes import depends_on_data, is_size
from mstpass.graph.source import source_of
from mstpass.memory.kernels import op_of
from mstpass.plans import SavedValue, SavePlan
from mstpass.problem.problem import (
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    RegionModes,
    Value,
    with_needs,
)
from mstpass.schedule.nested_recomputation import run_ahead

TORCH_BUDGET = "torch's own budget, set on a part of the model, is for torch's partitioner"


def split(
    joint: JointGraph,
    saved: Set[str],
    solver: str,
    nested: Set[str] = frozenset(),
    **torch_kwargs: Any,
) -> tuple[Modules, SavePlan]:
    """Forward and backward modules of a verified plan, and what crosses between them."""
    nested = nested - saved
    modules = _extract(joint, [joint.by_name[n] for n in sorted(saved)], nested, **torch_kwargs)
    crossing = _crossing(modules, joint, solver)
    return modules, dataclasses.replace(crossing, nested=tuple(sorted(nested)))


def split_by_torch(joint: JointGraph, **torch_kwargs: Any) -> tuple[Modules, SavePlan]:
    """The same by torch's own partitioner, for graphs with what our problem does not model."""
    modules = partitioners.min_cut_rematerialization_partition(
        joint.module, None, num_fwd_outputs=joint.num_fwd_outputs, **torch_kwargs
    )
    return modules, _crossing(modules, joint, "torch")


def needs_torch(joint: JointGraph) -> str:
    """Why the graph is left to torch's own partitioner; empty when it is ours."""
    if joint.has_side_effects:
        return "an op writes to its operands"
    for node, tag in tags_of(joint).of.items():
        if tag in RECOMPUTED and draws(node):
            return f"{node.name} draws random numbers, which a checkpoint is to draw again"
    for node in joint.nodes:
        value = node.meta.get("val")
        tensors = list(tensors_of(value))
        if value is not None and not tensors and not is_size(node):
            return f"{node.name} is neither a tensor nor a size"
        if any(map(depends_on_data, tensors)):
            return f"the size of {node.name} depends on data"
        if node.op == "get_attr" and not _is_body(node):
            return f"{node.name} is a subgraph or a constant"
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not mst_loop:
            return f"the higher-order op {node.target}"
        if node.meta.get("memory_budget") is not None:
            return TORCH_BUDGET
        if "c10d" in op_table.name_of(node):
            return "collectives"
    return TORCH_BUDGET if has_region_budget(joint.nodes) else ""


def has_region_budget(nodes: Iterable[fx.Node]) -> bool:
    """Whether ``torch.autograd.graph.region_activation_memory_budget`` (torch 2.13) covers some."""
    budget_of = getattr(fx.traceback, "_get_memory_budget_annotation", lambda _: None)
    return any(budget_of(node) is not None for node in nodes)


def _is_body(node: fx.Node) -> bool:
    return all(user.target is mst_loop for user in node.users)


def cut_problem(
    joint: JointGraph, regions: tuple[RegionModes, ...] = (), rows_first: bool = False
) -> CutProblem:
    """The problem of one joint graph; ``rows_first`` as in ``kernels.simulate_step``."""
    known = [n for n in joint.nodes if n.op in ("placeholder", "call_function")]
    names, tags = {n.name for n in known}, tags_of(joint)
    values = [_value(joint, n, names, tags, rows_first) for n in known if n not in joint.backward]
    backward = tuple(
        _value(joint, n, names, tags, rows_first) for n in known if n in joint.backward
    )
    gradients = tuple(n.name for n in joint.backward_outputs)
    return CutProblem(
        with_needs(values, backward, gradients),
        backward=backward,
        outputs=tuple(n.name for n in joint.forward_outputs),
        gradients=gradients,
        regions=regions,
    )


def _value(
    joint: JointGraph, node: fx.Node, names: Set[str], tags: Tags, rows_first: bool
) -> Value:
    op = op_of(node, rows_first=rows_first)
    tag = tags.of.get(node, "")
    return Value(
        name=node.name,
        bytes=op.bytes if value_of(node) is not None else 0,
        inputs=tuple(name for name in op.inputs if name in names),
        kind=op.kind,
        inner_bytes=op.inner_bytes,
        dear=op.dear,
        us=time_us(node),
        free=(node.op == "placeholder" and node not in joint.backward) or is_size(node),
        heavy=is_heavy(node) or node in tags.boundary,
        pinned=tag == MUST_SAVE or (is_pinned(node) and tag not in RECOMPUTED),
        savable=tag not in RECOMPUTED and value_of(node) is not None and not shares_storage(node),
        forward=node in joint.forward,
        tag=tag,
    )


def _extract(
    joint: JointGraph, saved: list[fx.Node], nested: Set[str], **torch_kwargs: Any
) -> Modules:
    saved = joint.sorted(saved)
    loops = [n for n in saved if _from_fused_loop(n)]
    plain = [n for n in saved if n not in loops]
    read = joint.sorted(_free_needed(joint, saved))
    inputs = [n for n in read if not is_size(n)]
    kwargs: dict[str, Any] = {
        "saved_sym_nodes": [n for n in read if is_size(n)],
        "num_fwd_outputs": joint.num_fwd_outputs,
    }
    parameters = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    if "saved_opaque_nodes" in parameters:
        kwargs["saved_opaque_nodes"] = []
    if "static_lifetime_input_nodes" in parameters:
        indices = torch_kwargs.get("static_lifetime_input_indices") or []
        primals = [n for n in joint.nodes if n.op == "placeholder"]
        kwargs["static_lifetime_input_nodes"] = type_of_set(primals[i] for i in indices)
    # Gradients that a fused loop computed come last: see torch_internals/donated_buffers.py.
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint.module, [*inputs, *plain, *loops], **kwargs
    )
    run_ahead(backward.graph, nested)
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    if hasattr(partitioners, "thread_graphsafe_rng_from_hops"):
        forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
        backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def type_of_set(nodes: Iterable[fx.Node]) -> Any:
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet(nodes)


def _from_fused_loop(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is mst_loop


def _free_needed(joint: JointGraph, saved: list[fx.Node]) -> set[fx.Node]:
    """Inputs of the step, and sizes, that backward reads or recomputes from what is not saved."""
    stop = set(saved)
    found: set[fx.Node] = set()
    stack = list(joint.backward_outputs)
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node in stop:
            continue
        seen.add(node)
        if is_size(node) and node not in joint.backward:
            found.add(node)
            continue
        if node.op == "placeholder" and not is_tangent(node):
            found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def _crossing(modules: Modules, joint: JointGraph, solver: str) -> SavePlan:
    """What the forward module returns for the backward, inputs of the step left out."""
    forward, _ = modules
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    crossing = {
        n.name: n
        for n in outputs[joint.num_fwd_outputs :]
        if isinstance(n, fx.Node) and n.op != "placeholder" and not is_size(n)
    }
    saved = [
        SavedValue(n.name, nbytes(n), source_of(joint.by_name.get(n.name, n)))
        for n in crossing.values()
    ]
    return SavePlan(tuple(sorted(saved, key=lambda v: -v.bytes)), solver)
