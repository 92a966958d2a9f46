"""Rewrites that are not applied, because the products that they would make end in no loop.

Two rewrites make products: of chunks that a user has made (join_windows.py), and of convolutions
(convolutions_as_products.py). The chunks may need less memory, and the convolution less time, than
a product of all tokens in one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.normalize.convolutions_as_products import weights_of_one_element
from mstpass.regions.anchors import anchors


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What is not rewritten.

    Attributes:
        windows: products of the chunks that a user has made.
        convolutions: those with weights of these names.
    """

    windows: bool = False
    convolutions: frozenset[str] = frozenset()

    def and_in_vain(
        self, joint: JointGraph, prepared: JointGraph, members: Container[str]
    ) -> LeftOut:
        """The same, with what has made products that are in no region.

        Args:
            joint: the graph before the rewrites.
            prepared: the one after them.
            members: the names of the nodes of its regions.
        """
        convolutions = convolutions_in_vain(joint, prepared, members)
        weights = {ops.base_of(joint.by_name[name]).name for name in convolutions}
        windows = any(
            node.name not in members and _weights(node).isdisjoint(weights)
            for node, _ in prepared.cached(anchors)
            if node.name not in joint.by_name
        )
        return LeftOut(self.windows or windows, self.convolutions | convolutions)


NOTHING = LeftOut()


def convolutions_in_vain(
    joint: JointGraph, prepared: JointGraph, members: Container[str]
) -> frozenset[str]:
    """The weights of the convolutions of which no product is in a region."""
    used: set[str] = set()
    for node in prepared.nodes:
        if node.name in members and ops.is_matmul(node) and node not in prepared.backward:
            used |= _weights(node)
    weights = weights_of_one_element(joint)
    return frozenset(each.name for each in weights if ops.base_of(each).name not in used)


def _weights(product: fx.Node) -> set[str]:
    return {ops.base_of(factor).name for factor in ops.matmul_factors(product)}
