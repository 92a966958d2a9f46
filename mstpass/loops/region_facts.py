"""What all plans of one region have in common, looked up once.

Terms:
    *member*: a node of the region. Its spec says where it holds its tokens, or its heads
        (graph/axes.py); None marks a value that is reduced over them, such as a sum.
    *wide value*: a member with at least a quarter of the elements of ``[num_tokens, width]``, where
        ``width`` is that of the region's widest result.
    *buffered value*: a wide value that Inductor writes to memory: the result or an operand of a
        product, which is a matmul or attention. Chunks exist to keep these small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_product
from mstpass.graph.axes import ALONG_A_DIM, QUERIES, axis_of
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of
from mstpass.graph.loop_work import LoopWork, loop_work
from mstpass.graph.row_sums import ExponentialSum, exponential_sum
from mstpass.graph.sizes import generic_shape
from mstpass.graph.token_rules.arguments import tensor_inputs
from mstpass.graph.tokens import Refusal, Spec, token_count
from mstpass.loops.rounds import early_outputs, handed_on, rounds
from mstpass.plans import LoopPlan, Region
from mstpass.regions.masked_attention import KIND as MASKED

LOW_PRECISION = (torch.bfloat16, torch.float16)


class RegionFacts:
    """One region with the nodes that its names stand for.

    Attributes:
        axis: what the region's loops run over.
        specs: the spec of each member, in the graph's order.
        outputs: members that nodes outside the region read.
        backward: members that belong to the backward.
        exponentials: the sums of exponentials over tokens whose maximum the loop finds as well.
        rounds: which of several loops of its phase computes each member (loops/rounds.py).
        early: the outputs that a later round, or a collective, waits for. Where attention ends
            rounds, no loop computes what another one has: all outputs are.
        handed_on: of such a region, what a loop of the backward returns for later ones.
        buffered: the buffered values, each storage once.
        bytes_before: size of the buffered values at full length. Only products' results count, as
            Inductor writes a result's gradient into the result's own buffer; if the step returns
            the result, it cannot, and all buffered values count. Of attention with a mask that is
            computed it is the mask's, or that of another value of its size.
    """

    def __init__(self, joint: JointGraph, region: Region):
        self.joint, self.region = joint, region
        self.specs: dict[fx.Node, Spec | None] = {
            joint.by_name[name]: spec for name, spec in region.members
        }
        self.outputs = [joint.by_name[name] for name in region.outputs]
        self.backward = {joint.by_name[name] for name in region.backward}
        self.axis = axis_of(region.axis, region.num_tokens)
        self.buffered = [node for node in self.specs if self._is_buffered(node)]
        products = [node for node in self.buffered if is_product(node)]
        self.bytes_before = sum(map(nbytes, self.buffered if region.returned else products))
        if region.axis == QUERIES and region.kind == MASKED:
            self.bytes_before = max(nbytes(node) for node in self.specs if not is_product(node))
        self._operand_specs: dict[fx.Node, dict[fx.Node, Spec | None]] = {}
        self.exponentials = self._find_exponentials()
        self.rounds = rounds(joint, self.specs, self.operand_specs, region.fused)
        self.early = early_outputs(joint, self.specs, self.operand_specs)
        self.handed_on: set[fx.Node] = set()
        if region.axis == QUERIES:
            self.early |= set(self.outputs)
            self.handed_on = handed_on(self.rounds, self.specs, self.operand_specs, self.backward)
        for total, known in self.exponentials.items():  # one loop finds both
            if not self.early.isdisjoint((total, known.maximum)):
                self.early |= {total, known.maximum}

    def _find_exponentials(self) -> dict[fx.Node, ExponentialSum]:
        found = {n: exponential_sum(n) for n, spec in self.specs.items() if spec is None}
        return {
            node: known
            for node, known in found.items()
            if known and self.specs.get(known.values) and self.specs.get(known.maximum, ()) is None
        }

    @cached_property
    def work(self) -> LoopWork:
        """What all members compute (graph/loop_work.py)."""
        return self._work_of(self.specs)

    def work_of(self, loops: Iterable[LoopPlan]) -> LoopWork:
        """What these loops over tokens compute."""
        loops = list(loops)
        names = {name for loop in loops for name in loop.members}
        members = {node: spec for node, spec in self.specs.items() if node.name in names}
        is_all = members.keys() == self.specs.keys()
        work = self.work if is_all else self._work_of(members)
        return work.summed_in(max(loop.least_sum_bytes for loop in loops))

    def _work_of(self, members: Mapping[fx.Node, Spec | None]) -> LoopWork:
        return loop_work(self.joint, members, self.region.axis, self.region.num_tokens)

    @cached_property
    def _generic_tokens(self) -> int:
        if self.region.axis in ALONG_A_DIM:
            return self.region.num_tokens
        return next(
            token_count(generic_shape(value), spec)
            for node, spec in self.specs.items()
            if spec
            for value in tensors_of(node.meta["val"])
        )

    def _is_buffered(self, node: fx.Node) -> bool:
        if not self.specs[node] or ops.is_view(node) or not self.is_wide(node):
            return False
        if self.region.axis in ALONG_A_DIM and node in self.outputs:
            return False  # the gradient of a weight
        return is_product(node) or any(map(is_product, ops.readers_through_views(node)))

    def is_wide(self, node: fx.Node) -> bool:
        return numel(node) * 4 >= self.region.width * self._generic_tokens

    def is_widest(self, node: fx.Node) -> bool:
        """Whether no member has more elements."""
        return numel(node) >= self.region.width * self._generic_tokens

    def operand_specs(self, node: fx.Node) -> dict[fx.Node, Spec | None]:
        """The spec that a member needs of each of its operands."""
        if node not in self._operand_specs:
            self._operand_specs[node] = self._find_operand_specs(node)
        return self._operand_specs[node]

    def _find_operand_specs(self, node: fx.Node) -> dict[fx.Node, Spec | None]:
        spec = self.specs[node]
        if spec is not None:
            found = self.axis.operand_specs(node, spec)
            assert not isinstance(found, Refusal), (node, found)
            return dict(found)
        if node in self.exponentials:
            known = self.exponentials[node]
            return {known.values: self.specs[known.values], known.maximum: None}
        for operand in node.all_input_nodes:
            source = self.specs.get(operand)
            if source:
                return dict(self.axis.sum_operands(node, operand, source))
        return dict.fromkeys(tensor_inputs(node))  # a sum of sums
