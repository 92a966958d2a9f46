"""The saved set of the fewest bytes, as a minimum s-t cut.

Each value v becomes an edge v_in -> v_out whose capacity is bytes(v); a cut edge is a saved value.
For every input u of v an edge u_out -> v_in of infinite capacity carries "v is recomputed from u".
The source leads to v_in of every value that must not be recomputed, and v_out of every value that
backward needs leads to the sink. A path from source to sink is then a needed value that would be
recomputed from one that must not be, unless an edge on the path is cut. Views have infinite
capacity: their base is saved instead.

torch/_functorch/partitioners.py uses the same network with other capacities.

Of saved sets of equal bytes, the cut takes the values nearest to where backward uses them, so that
fewer values are recomputed. For that each capacity is 4 * 1024 * bytes plus the distance to the
nearest use (at most 1023). A pointwise value that is saved needs a buffer, while the product that
it is computed from may have one in any case. ``with_buffers_first`` takes such values before: then
the distance is at most 511, and 512 is added to values that would have no buffer.

The network of a deep model is reduced first (reduce_network.py); networkx solves the parts that are
left, equal ones once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import networkx as nx
from networkx.algorithms import flow

from mstpass.partition.solvers.memory_lower_bounds import certain_bytes
from mstpass.partition.solvers.reduce_network import Network, Vertex
from mstpass.problem.problem import CutProblem, Value

_DISTANCES = 1024  # that are told apart


def min_cut(problem: CutProblem, with_buffers_first: bool = False) -> frozenset[str]:
    """Names of the values to save, of the fewest bytes in total.

    Args:
        with_buffers_first: of equal bytes, save the values that have a buffer in any case.

    Raises:
        networkx.NetworkXUnbounded: no saved set gives backward what it needs.
    """
    values, network = network_of(problem, with_buffers_first)
    saved = network.contract()
    cuts: dict[tuple[Vertex, ...], list[int]] = {}
    for part in network.parts():
        vertices = network.vertices(part)
        if vertices not in cuts:
            cuts[vertices] = cut(vertices)
        saved.update(part[i] for i in cuts[vertices])
    return frozenset(values[i].name for i in saved)


def complete(problem: CutProblem, kept: frozenset[str]) -> frozenset[str]:
    """A valid saved set with all of ``kept``.

    Where ``kept`` does not give backward all it needs, such as the result of a random draw, the
    fewest bytes are added.
    """
    values = tuple(
        dataclasses.replace(value, free=True) if value.name in kept else value
        for value in problem.values
    )
    return kept | min_cut(dataclasses.replace(problem, values=values))


def network_of(
    problem: CutProblem, with_buffers_first: bool = False
) -> tuple[list[Value], Network]:
    """The values that backward may need, and the network with one vertex for each of them."""
    distance = _distances_to_use(problem)
    values = [v for v in problem.values if v.name in distance and not v.free]
    index = {value.name: i for i, value in enumerate(values)}
    last = {name: min(far, _DISTANCES - 1) for name, far in distance.items()}
    if with_buffers_first:
        half, certain = _DISTANCES // 2, problem.cached(certain_bytes)
        last = {name: far // 2 + half * (name not in certain) for name, far in last.items()}
    network = Network(
        [_capacity(value, last[value.name]) for value in values],
        kept=(i for i, value in enumerate(values) if problem.keeps(value)),
        needed=(i for i, value in enumerate(values) if value.needed),
        inputs=[{index[n] for n in value.inputs if n in index} for value in values],
    )
    return values, network


def _capacity(value: Value, last: int) -> float:
    """What it costs to save a value; ``last`` decides between values of equal bytes."""
    if not value.savable:
        return math.inf
    return max(1, value.bytes) * _DISTANCES * 4 + last


def cut(vertices: Sequence[Vertex]) -> list[int]:
    """The positions of the vertices that a minimum cut saves."""
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, (capacity, kept, needed, inputs) in enumerate(vertices):
        if capacity == math.inf:
            network.add_edge((i, "in"), (i, "out"))  # without a capacity it cannot be cut
        else:
            network.add_edge((i, "in"), (i, "out"), capacity=capacity)
        if kept:
            network.add_edge("source", (i, "in"))
        if needed:
            network.add_edge((i, "out"), "sink")
        for j in inputs:
            network.add_edge((j, "out"), (i, "in"))
    _, (reachable, _) = nx.minimum_cut(network, "source", "sink", flow_func=flow.boykov_kolmogorov)
    return [
        i for i in range(len(vertices)) if (i, "in") in reachable and (i, "out") not in reachable
    ]


def _distances_to_use(problem: CutProblem) -> dict[str, int]:
    """For each value that backward may need, the ops from it to the nearest needed value."""
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
