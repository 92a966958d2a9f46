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

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention, is_product
from mstpass.graph.axes import ALONG_A_DIM, QUERIES, axis_of
from mstpass.graph.collectives import collectives_of, is_collective
from mstpass.graph.device_costs import Costs, costs_of
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of
from mstpass.graph.loop_work import LoopWork, loop_work
from mstpass.graph.row_sums import ExponentialSum, exponential_sum
from mstpass.graph.sizes import generic_shape
from mstpass.graph.token_rules.arguments import tensor_inputs
from mstpass.graph.tokens import Refusal, Spec, token_count
from mstpass.plans import LoopInput, LoopOutput, LoopPlan, Region
from mstpass.regions.attention import KIND as MASKED
from mstpass.walk import walk_once

LOW_PRECISION = (torch.bfloat16, torch.float16)


def loop_plan(
    joint: JointGraph,
    phase: str,
    specs: Mapping[fx.Node, Spec | None],
    inputs: Iterable[tuple[fx.Node, Spec]],
    outputs: Iterable[LoopOutput],
    **how: Any,
) -> LoopPlan:
    """A loop of these members, with their specs, and of these inputs, all in the graph's order."""
    members = joint.sorted(specs)
    ordered = sorted(inputs, key=lambda pair: (joint.index[pair[0]], pair[1]))
    return LoopPlan(
        phase=phase,
        members=tuple(node.name for node in members),
        specs=tuple(specs[node] for node in members),
        inputs=tuple(LoopInput(node.name, spec) for node, spec in ordered),
        outputs=tuple(outputs),
        **how,
    )


def members_of(joint: JointGraph, loop: LoopPlan) -> dict[fx.Node, Spec | None]:
    """What a loop computes, with its specs."""
    pairs = zip(loop.members, loop.specs, strict=True)
    return {joint.by_name[name]: spec for name, spec in pairs}


class RegionFacts:
    """One region with the nodes that its names stand for.

    Attributes:
        axis: what the region's loops run over.
        specs: the spec of each member, in the graph's order.
        outputs: members that nodes outside the region read.
        backward: members that belong to the backward.
        exponentials: the sums of exponentials over tokens whose maximum the loop finds as well.
        rounds: which of several loops of its phase computes each member (see *rounds* below).
        complete: the members that other members read complete.
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
        self._work: dict[frozenset[str], LoopWork] = {}  # by members
        self.exponentials = self._find_exponentials()
        self.complete = self._complete_operands()
        self.rounds, self.early = dict.fromkeys(self.specs, 0), set[fx.Node]()
        if self._may_have_rounds():
            self.rounds, self.early = self._rounds(), self._early_outputs()
        self.handed_on: set[fx.Node] = set()
        if region.axis == QUERIES:
            self.early |= set(self.outputs)
            self.handed_on = self._handed_on()
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
    def device(self) -> torch.device:
        """The device that the loops run on."""
        return next(tensors_of(self.joint.by_name[self.region.name].meta["val"])).device

    @property
    def costs(self) -> Costs:
        """What work costs there."""
        return costs_of(self.device)

    def work_of(self, loops: Sequence[LoopPlan]) -> LoopWork:
        """What these loops compute (graph/loop_work.py)."""
        names = frozenset(name for loop in loops for name in loop.members)
        if names not in self._work:
            members = {node: spec for node, spec in self.specs.items() if node.name in names}
            cut = self.region.axis, self.region.num_tokens
            self._work[names] = loop_work(self.joint, members, *cut)
        return self._work[names].summed_in(max(loop.least_sum_bytes for loop in loops))

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

    # ---- rounds (see below) --------------------------------------------------------------------
    def _rounds(self) -> dict[fx.Node, int]:
        """The round of each member, from 0 on."""
        joint, fused = self.joint, self.region.fused
        # of members that depend on a product of the region; of others, the one that may read them
        found: dict[fx.Node, int] = {}
        last = max(map(joint.index.__getitem__, self.specs))
        for node in joint.nodes[: last + 1]:
            inside, in_backward = node in self.specs, node in joint.backward
            if in_backward and not inside and fused:
                continue
            before = [
                found[n] + (n in self.specs and (not inside or self._is_complete(n, spec)))
                for n, spec in self._reads(node)
                if n in found and (fused or (n in joint.backward) == in_backward)
            ]
            if before or (inside and (in_backward or ops.is_matmul(node))):
                found[node] = max(before, default=0)
        return {node: found.get(node, 0) for node in self.specs}

    def _is_complete(self, member: fx.Node, read: Spec | None) -> bool:
        """Whether it is read as all chunks give it; of a reduction, a chunk's part is not."""
        return read is not None and read != self.specs[member]

    def _reads(self, node: fx.Node) -> Iterable[tuple[fx.Node, Spec | None]]:
        """The operands of a member, or of another node, and how they are read."""
        if node in self.specs:
            return self.operand_specs(node).items()
        return [(operand, ()) for operand in node.all_input_nodes]

    def _may_have_rounds(self) -> bool:
        """Whether a collective, or what members need complete, may come between members."""
        joint, members = self.joint, self.specs
        if joint.cached(collectives_of) or self.complete:
            return True
        last, backward = max(map(joint.index.__getitem__, members)), joint.backward
        readers = lambda node: [n for n in node.users if (n in backward) == (node in backward)]
        outside = lambda node: [
            n for n in readers(node) if n not in members and joint.index[n] < last
        ]
        between = walk_once((node for node, spec in members.items() if spec is None), outside)
        return any(n in members for node in between if node not in members for n in readers(node))

    def _complete_operands(self) -> set[fx.Node]:
        has_attention = any(map(is_attention, self.specs))  # else what has two roles is no result
        candidates = {n for n, spec in self.specs.items() if spec is None or has_attention}
        readers = {user for node in candidates for user in node.users if user in self.specs}
        return {
            operand
            for reader in readers
            for operand, spec in self._reads(reader)
            if operand in candidates and self._is_complete(operand, spec)
        }

    def _handed_on(self) -> set[fx.Node]:
        """The members of the backward that a later round of it reads chunk by chunk.

        To compute them again would be to compute attention's backward again.
        """
        numbers = self.rounds
        return {
            operand
            for node in self.backward
            for operand, spec in self._reads(node)
            if operand in self.backward
            if numbers[operand] < numbers[node] and spec == self.specs[operand]
        }

    def _early_outputs(self) -> set[fx.Node]:
        """The members whose values are needed, outside of loops, before the last round of their
        phase: another round of the phase or a collective waits for them."""
        members, backward = self.specs, self.joint.backward
        early = set(self.complete)
        waits: set[fx.Node] = set()  # nodes outside whose values are waited for
        for node in reversed(self.joint.nodes):
            if any(
                (user in members or user in waits or is_collective(user))
                and (user in backward) == (node in backward)
                for user in node.users
                if node not in members or user not in members
            ):
                (early if node in members else waits).add(node)
        return early


# ---- rounds ------------------------------------------------------------------------------------
# Which loop of a region computes what, where a loop has to end before the next one can begin.
#
# A head whose vocabulary is sharded needs numbers of all ranks for each token, such as the
# maximum of the logits. A loop does not run collectives (graph/collectives.py). A contrastive
# loss needs, for each column of the logits, the maximum and the sum of all tokens' exponentials.
# No chunk knows them. So the loss is several *rounds*, each a loop over all tokens::
#
#     round 0:       logits of a chunk -> its rows' maximum and sum, its part of the columns' ones
#     in between:    the maximum and the sum of all ranks; the columns' logarithms of sums
#     round 1:       logits of the chunk again -> losses and gradients
#
# A member's round is the largest number of times that a path to it from the region's products
# leaves the loops: to a node outside, or because a member needs a value *complete*: one that is
# reduced over all tokens, or that it reads in another way than chunk by chunk, as attention reads
# keys and values, and as what is computed token by token from their gradients reads these. A sum
# of exponentials and its maximum are found in one round (graph/row_sums.py).
#
# An output that a later round or a collective waits for is returned by the loop of its own round,
# so that a collective runs no later than in the graph without loops. All others are left to the
# last round of their phase, which computes what they are made of in any case.
#
# The rounds of the backward are counted anew, as they follow all of the forward. Those of a fused
# region, whose backward runs in the last round of the forward, are counted on.
