"""What all plans of one region have in common, looked up once.

Terms:
    *member*: a node of the region. Its spec names its token dims; None marks a sum over tokens.
    *wide value*: a member with at least a quarter of the elements of ``[num_tokens, width]``, where
        ``width`` is that of the region's widest result.
    *buffered value*: a wide value that Inductor writes to memory: a matmul's result or operand.
        Chunks exist to keep these small.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of
from mstpass.graph.loop_work import loop_work
from mstpass.graph.sizes import generic_shape
from mstpass.graph.tokens import WHOLE, Refusal, Spec, token_count
from mstpass.loops.rounds import rounds
from mstpass.plans import Region


class RegionFacts:
    """One region with the nodes that its names stand for.

    Attributes:
        specs: the token dims of each member, in the graph's order.
        outputs: members that nodes outside the region read.
        backward: members that belong to the backward.
        rounds: which of several loops computes each member (loops/rounds.py).
        buffered: the buffered values, each storage once.
        bytes_before: size of the buffered values at full length. Only matmul results count, because
            Inductor writes a result's gradient into the result's own buffer; if the step returns
            the result, it cannot, and all buffered values count.
        work: what all members compute (graph/loop_work.py).
    """

    def __init__(self, joint: JointGraph, region: Region):
        self.joint, self.region = joint, region
        self.specs: dict[fx.Node, Spec | None] = {
            joint.by_name[name]: spec for name, spec in region.members
        }
        self.outputs = [joint.by_name[name] for name in region.outputs]
        self.backward = {joint.by_name[name] for name in region.backward}
        self.rounds = rounds(joint, self.specs)
        self._generic_tokens = next(
            token_count(generic_shape(value), spec)
            for node, spec in self.specs.items()
            if spec
            for value in tensors_of(node.meta["val"])
        )
        self.buffered = [node for node in self.specs if self._is_buffered(node)]
        products = [node for node in self.buffered if ops.is_matmul(node)]
        self.bytes_before = sum(map(nbytes, self.buffered if region.returned else products))
        self.work = loop_work(joint, self.specs, region.num_tokens)
        self._operand_specs: dict[fx.Node, dict[fx.Node, Spec]] = {}

    def _is_buffered(self, node: fx.Node) -> bool:
        if not self.specs[node] or ops.is_view(node) or not self.is_wide(node):
            return False
        return ops.is_matmul(node) or any(map(ops.is_matmul, ops.readers_through_views(node)))

    def is_wide(self, node: fx.Node) -> bool:
        return numel(node) * 4 >= self.region.width * self._generic_tokens

    def operand_specs(self, node: fx.Node) -> dict[fx.Node, Spec]:
        """The token dims that a member needs of each of its operands."""
        if node not in self._operand_specs:
            self._operand_specs[node] = self._find_operand_specs(node)
        return self._operand_specs[node]

    def _find_operand_specs(self, node: fx.Node) -> dict[fx.Node, Spec]:
        spec = self.specs[node]
        found: dict[fx.Node, Spec] | Refusal
        if spec is None:
            operand = next(n for n in node.all_input_nodes if self.specs.get(n))
            found = ops.sum_operands(node, operand, self.specs[operand] or WHOLE)
        else:
            found = ops.operand_specs(node, spec)
        assert not isinstance(found, Refusal), (node, found)
        return found
