"""Split a joint graph into forward and backward modules, for a given set of saved values.

::

    saved = saved values, and the inputs, sizes and opaque values of the step that backward reads
    forward, backward = torch's extraction of the two graphs around them
    backward: give nested values a recomputation of their own   (schedule/nested_recomputation.py)
    backward: move each recomputation to just before its first use              (torch does)
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph, Modules, is_tangent, nbytes
from mstpass.graph.sizes import is_size
from mstpass.graph.source_location import source_of
from mstpass.plans import SavedValue, SavePlan
from mstpass.schedule.nested_recomputation import recompute_nested_values
from mstpass.torch_internals.opaque_values import is_opaque
from mstpass.torch_internals.partitioners import (
    extract_forward_and_backward,
    finish_forward_and_backward,
)


def split(
    joint: JointGraph,
    saved: Set[str],
    solver: str,
    nested: Set[str] = frozenset(),
    inner: Set[str] = frozenset(),
    **torch_kwargs: Any,
) -> tuple[Modules, SavePlan]:
    """Forward and backward modules, and the values that cross between them.

    Args:
        saved: the values that forward hands to backward, by name; ``verify`` accepts them.
        solver: the name of the solver that chose them, for the report.
        nested: values that backward recomputes ahead of time, as in ``Plan.nested``.
        inner: those of them that are on the way to the others, as in ``Plan.inner``.
        torch_kwargs: further arguments that AOTAutograd passes to a partitioner.
    """
    nested = nested - saved
    forward, backward = _extract(joint, [joint.by_name[n] for n in saved], torch_kwargs)
    recompute_nested_values(backward.graph, (nested - inner, nested & inner))
    modules = finish_forward_and_backward(forward, backward)
    save_plan = SavePlan(
        saved_values(modules, joint),
        solver,
        nested=tuple(sorted(nested)),
        inner=tuple(sorted(nested & inner)),
    )
    return modules, save_plan


def saved_values(modules: Modules, joint: JointGraph) -> tuple[SavedValue, ...]:
    """What the forward module returns for the backward, without inputs of the step, sizes and
    opaque values.

    The largest comes first.
    """
    forward, _ = modules
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
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
    found: set[fx.Node] = set()
    seen = set(saved)
    stack = list(joint.backward_outputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _takes_no_memory(node) and node not in joint.backward:
            found.add(node)
            continue
        if node.op == "placeholder" and not is_tangent(node):
            found.add(node)
        stack.extend(node.all_input_nodes)
    return found
