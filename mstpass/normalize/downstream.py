"""The values that depend on a wide matmul, with their token dims."""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import WHOLE, Spec
from mstpass.regions.anchors import anchors


def downstream(joint: JointGraph) -> dict[fx.Node, tuple[Spec, fx.Node]]:
    """Of the anchors and the values that depend on them: the token dims, and the anchor.

    A node gets both from its first operand that has them. Values whose token dims the op table
    cannot follow are left out.
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
