"""What lies behind the widening products of a graph, where the op table follows their tokens."""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import WHOLE, Spec
from mstpass.regions.detect import anchors


def downstream(joint: JointGraph) -> dict[fx.Node, tuple[Spec, fx.Node]]:
    """Token dims, and the first product that they come from: of the products and of what is behind.

    A node takes them from the first of its operands that has some.
    """
    found = {anchor: (spec, anchor) for anchor, spec in joint.cached(anchors)}
    for node in joint.nodes:
        if node.op != "call_function" or node in found:
            continue
        source = next((operand for operand in node.all_input_nodes if operand in found), None)
        if source is None:
            continue
        spec, anchor = found[source]
        result = ops.result_spec(node, source, spec)
        if isinstance(result, tuple) and result != WHOLE:
            found[node] = result, anchor
    return found
