"""The cheapest saved set as a minimum s-t cut: the least saved bytes.

Each value v is an edge v_in -> v_out of capacity bytes(v); u_out -> v_in is uncuttable for every
input u of v; the source feeds every value that must not be
recomputed, the sink drinks from every needed one. A cut
edge is a saved value. (Cohen et al., "Min-cut rematerialization"; torch/_functorch/partitioners.py
uses the same network with other costs.)

Between sets of equal bytes the cut takes the values closest to where backward uses them: fewer
are recomputed.
"""

from __future__ import annotations

import networkx as nx

from mstpass.partition.problem import CutProblem

_STEPS = 1024


def min_cut(problem: CutProblem) -> frozenset[str]:
    """The names to save. The optimum in bytes; ties broken towards the backward."""
    if not any(value.needed for value in problem.values):
        return frozenset()
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    distance = _distances(problem)
    relevant = [value for value in problem.values if value.name in distance]
    names = {value.name for value in relevant}
    free = {value.name for value in relevant if value.free}
    for value in relevant:
        if value.free:
            continue
        into, out = (value.name, "in"), (value.name, "out")
        if value.savable:
            far = min(distance[value.name], _STEPS - 1)
            network.add_edge(into, out, capacity=max(1, value.bytes) * _STEPS * 4 + far)
        else:
            network.add_edge(into, out)  # no capacity: cannot be cut
        if problem.keeps(value):
            network.add_edge("source", into)
        if value.needed:
            network.add_edge(out, "sink")
        for name in value.inputs:
            if name in names and name not in free:
                network.add_edge((name, "out"), into)
    _, (reachable, _) = nx.minimum_cut(network, "source", "sink")
    return frozenset(
        value.name
        for value in relevant
        if (value.name, "in") in reachable and (value.name, "out") not in reachable
    )


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
