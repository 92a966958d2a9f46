"""The cheapest saved set as a minimum s-t cut: the least saved bytes.

Each value v is an edge v_in -> v_out of capacity bytes(v); u_out -> v_in is uncuttable for every
input u of v; the source feeds every value that must not be recomputed, the sink drinks from every
needed one. A cut edge is a saved value. (Cohen et al., "Min-cut rematerialization";
torch/_functorch/partitioners.py uses the same network with other costs.)

Between sets of equal bytes the cut takes the values closest to where backward uses them: fewer
are recomputed.

The network of a deep model is solved in small parts, with the same result::

    save what backward needs and cannot recompute: these values are in every cut
    drop what does not lie between the source and the sink
    what is left falls apart where saved values were; equal parts have equal cuts
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import networkx as nx
from networkx.algorithms import flow

from mstpass.partition.problem import CutProblem, Value

_STEPS = 1024

# Of one value: its capacity (none: cannot be cut), whether source and sink reach it directly, and
# its inputs by position in the part.
_Node = tuple[int | None, bool, bool, tuple[int, ...]]


def min_cut(problem: CutProblem) -> frozenset[str]:
    """The names to save. The optimum in bytes; ties broken towards the backward."""
    distance = _distances(problem)
    relevant = [v for v in problem.values if v.name in distance and not v.free]
    saved = _forced(problem, relevant)
    known: dict[tuple[_Node, ...], list[int]] = {}
    for part in _parts(_between(problem, relevant, saved)):
        position = {value.name: i for i, value in enumerate(part)}
        nodes = tuple(
            (
                _capacity(value, distance[value.name]),
                problem.keeps(value),
                value.needed,
                tuple(position[name] for name in value.inputs if name in position),
            )
            for value in part
        )
        if nodes not in known:
            known[nodes] = _cut(nodes)
        saved |= {part[i].name for i in known[nodes]}
    return frozenset(saved)


def _capacity(value: Value, distance: int) -> int | None:
    if not value.savable:
        return None
    return max(1, value.bytes) * _STEPS * 4 + min(distance, _STEPS - 1)


def _cut(nodes: Sequence[_Node]) -> list[int]:
    """The positions that a minimum cut saves."""
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, (capacity, kept, needed, inputs) in enumerate(nodes):
        if capacity is None:
            network.add_edge((i, "in"), (i, "out"))  # no capacity: cannot be cut
        else:
            network.add_edge((i, "in"), (i, "out"), capacity=capacity)
        if kept:
            network.add_edge("source", (i, "in"))
        if needed:
            network.add_edge((i, "out"), "sink")
        for j in inputs:
            network.add_edge((j, "out"), (i, "in"))
    _, (reachable, _) = nx.minimum_cut(network, "source", "sink", flow_func=flow.boykov_kolmogorov)
    return [i for i in range(len(nodes)) if (i, "in") in reachable and (i, "out") not in reachable]


# ---- smaller networks --------------------------------------------------------------------------
def _forced(problem: CutProblem, relevant: Sequence[Value]) -> set[str]:
    """What every cut saves: what cannot be recomputed, and backward needs but for views."""
    savable = {value.name for value in relevant if value.savable}
    stuck: set[str] = set()
    for value in relevant:
        lost = any(name in stuck and name not in savable for name in value.inputs)
        if problem.keeps(value) or lost:
            stuck.add(value.name)
    needed = {value.name for value in relevant if value.needed}
    for value in reversed(relevant):
        if value.name in needed and not value.savable:
            needed.update(value.inputs)
    return stuck & needed & savable


def _between(problem: CutProblem, relevant: Sequence[Value], saved: Set[str]) -> list[Value]:
    """Values through which something flows from the source to the sink, once these are saved."""
    left = [value for value in relevant if value.name not in saved]
    fed: set[str] = set()
    for value in left:
        if problem.keeps(value) or any(name in fed for name in value.inputs):
            fed.add(value.name)
    wanted: set[str] = set()
    for value in reversed(left):
        if value.needed or value.name in wanted:
            wanted.update((value.name, *value.inputs))
    return [value for value in left if value.name in fed and value.name in wanted]


def _parts(values: Sequence[Value]) -> list[list[Value]]:
    """Values that hang together, each part in order."""
    network = nx.Graph()
    network.add_nodes_from(value.name for value in values)
    names = set(network)
    network.add_edges_from((v.name, name) for v in values for name in v.inputs if name in names)
    part_of = {n: i for i, part in enumerate(nx.connected_components(network)) for n in part}
    parts: dict[int, list[Value]] = {}
    for value in values:
        parts.setdefault(part_of[value.name], []).append(value)
    return list(parts.values())


def _distances(problem: CutProblem) -> dict[str, int]:
    """Steps from each value to the nearest needed one, for values that backward can need."""
    distance: dict[str, int] = {}
    for value in reversed(problem.values):
        if value.needed:
            distance[value.name] = 0
        if value.name not in distance or value.free:
            continue
        for name in value.inputs:
            known = distance.get(name, distance[value.name] + 1)
            distance[name] = min(known, distance[value.name] + 1)
    return distance
