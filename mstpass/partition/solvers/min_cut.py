"""The cheapest saved set as a minimum s-t cut: the least saved bytes.

Each value v is an edge v_in -> v_out of capacity bytes(v); u_out -> v_in is uncuttable for every
input u of v; the source feeds every value that must not be recomputed, the sink drinks from every
needed one. A cut edge is a saved value. (Cohen et al., "Min-cut rematerialization";
torch/_functorch/partitioners.py uses the same network with other costs.)

Between sets of equal bytes the cut takes the values closest to where backward uses them: fewer
are recomputed.

The network of a deep model is made small first (contract.py); what is left falls apart, and equal
parts have equal cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
from networkx.algorithms import flow

from mstpass.partition.solvers.reduce_network import Network, Vertex
from mstpass.problem.problem import CutProblem, Value

_STEPS = 1024


def min_cut(problem: CutProblem) -> frozenset[str]:
    """The names to save. The optimum in bytes; ties broken towards the backward."""
    relevant, network = network_of(problem)
    saved = network.contract()
    known: dict[tuple[Vertex, ...], list[int]] = {}
    for part in network.parts():
        vertices = network.vertices(part)
        if vertices not in known:
            known[vertices] = cut(vertices)
        saved.update(part[i] for i in known[vertices])
    return frozenset(relevant[i].name for i in saved)


def network_of(problem: CutProblem) -> tuple[list[Value], Network]:
    """What backward can need, and its network, a vertex each."""
    distance = _distances(problem)
    relevant = [v for v in problem.values if v.name in distance and not v.free]
    index = {value.name: i for i, value in enumerate(relevant)}
    network = Network(
        [_capacity(value, distance[value.name]) for value in relevant],
        kept=(i for i, value in enumerate(relevant) if problem.keeps(value)),
        needed=(i for i, value in enumerate(relevant) if value.needed),
        inputs=[{index[n] for n in value.inputs if n in index} for value in relevant],
    )
    return relevant, network


def _capacity(value: Value, distance: int) -> float:
    if not value.savable:
        return math.inf
    return max(1, value.bytes) * _STEPS * 4 + min(distance, _STEPS - 1)


def cut(vertices: Sequence[Vertex]) -> list[int]:
    """The positions that a minimum cut saves."""
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, (capacity, kept, needed, inputs) in enumerate(vertices):
        if capacity == math.inf:
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
    every = range(len(vertices))
    return [i for i in every if (i, "in") in reachable and (i, "out") not in reachable]


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
