"""Compute cheap values once more for their later readers, where that lowers the peak.

memory/repeated_values.py finds which, by simulation. This file writes their copies into the
backward graph; schedule/delay_recomputation.py keeps the copies from being computed earlier.
"""

from __future__ import annotations

import copy

from torch import fx

from mstpass.graph.joint import Modules
from mstpass.graph.node_copies import copy_nodes
from mstpass.memory.repeated_values import Copies, repeated_values
from mstpass.memory.simulate_graph import simulate_step, step_ops
from mstpass.memory.timeline import StepMemory
from mstpass.schedule.cheap_values import is_cheap
from mstpass.torch_internals.graph_modules import graph_module


def add_second_rematerialization(
    modules: Modules, memory: StepMemory, scatters_delayed: bool
) -> tuple[Modules, StepMemory]:
    """Forward and backward with such copies, and their simulated memory.

    Both are as given if no copy lowers the memory. The given modules do not change.

    Args:
        memory: the simulated memory of the modules.
        scatters_delayed: as in ``simulate_step``.
    """
    forward, backward = modules
    if memory.peak is not memory.backward:
        return modules, memory
    ops = step_ops(forward.graph, backward.graph, scatters_delayed)
    cheap = {node.name for node in backward.graph.nodes if is_cheap(node)}
    found = repeated_values(memory, ops.backward, cheap)
    if not found.copies:
        return modules, memory
    other = graph_module(backward, copy.deepcopy(backward.graph))
    other.meta = dict(backward.meta)
    _write(other.graph, found.copies)
    other.graph.lint()
    other.recompile()
    return (forward, other), simulate_step(forward.graph, other.graph, scatters_delayed)


def _write(graph: fx.Graph, found: tuple[Copies, ...]) -> None:
    nodes = {node.name: node for node in graph.nodes}
    for copies in found:
        originals = [nodes[name] for name, _ in copies.names]
        written = copy_nodes(originals, nodes[copies.before])
        for reader in copies.readers:
            for old, new in written.items():
                nodes[reader].replace_input_with(old, new)
        for name, new_name in copies.names:
            nodes[new_name] = written[nodes[name]]
