"""Grow a region of heads from an attention product: to all that is computed head by head.

Pseudo-code::

    add(attention's result)
    until nothing changes, for each member with heads:
        add its operands with heads that an op computes
        add its users, with heads or as a sum over heads
    add the nodes that only add sums over heads up

A user or an operand whose op mixes heads stays outside. The values between it and the members are
then read in slices, or stacked by the loop. No path may leave the members and come back
(round_trips.py).
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.heads import (
    HeadDim,
    forward_of,
    is_attention,
    operand_heads,
    result_heads,
    summed_heads,
)
from mstpass.graph.joint import JointGraph
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, CannotTake, Reduced, Refusal
from mstpass.regions.attention_seeds import Seed
from mstpass.regions.round_trips import Paths
from mstpass.regions.sums_of_sums import sums_of_sums
from mstpass.walk import walk_once

Held = HeadDim | Reduced
ANOTHER = "already belongs to another region"
ONCE = "a collective runs once on all heads, in step with the other ranks"
OTHER_ATTENTION = "another attention reads the same keys and values"
ROUND_TRIP = "is computed from all heads, and the heads need it again"


class RoundTrip(CannotTake):
    """A path leaves the region and comes back; without the members in ``cut`` it does not."""

    def __init__(self, node: fx.Node, reason: str, cut: Set[fx.Node]):
        super().__init__(node, reason)
        self.cut = cut


def grow(joint: JointGraph, seed: Seed, num_heads: int, taken: Set[fx.Node]) -> HeadGrowth:
    """The region around a seed, in which ``num_heads`` heads are told apart.

    Where a path leaves the region and comes back, the members on its one side are left out: the
    region begins after a norm over all heads, and ends before the attention of another layer that
    adds the same bias to its scores.

    Raises:
        CannotTake: there is no such region.
    """
    left_out: dict[fx.Node, str] = {}
    while True:
        growth = HeadGrowth(joint, num_heads, taken, left_out)
        try:
            growth.grow(seed.node, HeadDim(seed.held.dim, seed.num_heads // num_heads))
        except RoundTrip as trip:
            if seed.node in trip.cut:
                raise
            left_out.update(dict.fromkeys(trip.cut, trip.reason))
        else:
            return growth


class HeadGrowth:
    """A region of heads while it grows.

    Args:
        left_out: nodes that are no members, with the reason.

    Attributes:
        held: where each member holds its heads; SUM for a sum over heads.
        sliced: the same of the values that the members read, but that are no members.
        barriers: why nodes that read members, or that members read, are none themselves.
    """

    def __init__(
        self,
        joint: JointGraph,
        num_heads: int,
        taken: Set[fx.Node],
        left_out: Mapping[fx.Node, str] | None = None,
    ):
        self.joint, self.num_heads, self.taken = joint, num_heads, taken
        self.left_out = left_out or {}
        self.held: dict[fx.Node, Held] = {}
        self.sliced: dict[fx.Node, HeadDim] = {}
        self.barriers: dict[fx.Node, str] = {}
        self._queue: deque[fx.Node] = deque()

    def grow(self, seed: fx.Node, held: HeadDim) -> None:
        """Add the seed and all that is computed head by head with it.

        Raises:
            RoundTrip: see ``_check_round_trips``.
            CannotTake: a member's heads do not come apart.
        """
        self._put(seed, held)
        while self._queue:
            node = self._queue.popleft()
            self._pull_operands(node)
            self._push_users(node)
        self._add_sums()
        self._check_members()
        self._check_round_trips(seed)

    def operand_heads(self, node: fx.Node) -> OperandSpecs:
        """Where a member's operands hold their heads; those of a sum of sums are left out.

        Raises:
            CannotTake: the node's op mixes heads.
        """
        held = self.held[node]
        if isinstance(held, HeadDim):
            found = operand_heads(node, held, self.num_heads)
            if isinstance(found, Refusal):
                raise CannotTake(node, found.reason)
            return found
        for operand in node.all_input_nodes:
            source = self.held.get(operand)
            if isinstance(source, HeadDim):
                return summed_heads(node, operand, source)
        return {}

    # ---- growing -------------------------------------------------------------------------------
    def _put(self, node: fx.Node, held: Held) -> None:
        if node not in self.held:
            if node in self.taken or node in self.left_out:
                raise CannotTake(node, self.left_out.get(node, ANOTHER))
            self.held[node] = held
            self._queue.append(node)
        elif self.held[node] != held:
            raise CannotTake(node, f"holds its heads in {self.held[node]} and in {held}")

    def _pull_operands(self, node: fx.Node) -> None:
        for operand, held in self.operand_heads(node).items():
            if not isinstance(held, HeadDim):
                continue
            reason = self._why_not(operand, held)
            if reason is None:
                self._put(operand, held)
                continue
            if self.sliced.setdefault(operand, held) != held:
                raise CannotTake(operand, "is read along several dims")
            if operand.op == "call_function":
                self.barriers[operand] = reason

    def _why_not(self, operand: fx.Node, held: HeadDim) -> str | None:
        """Why an operand cannot be computed head by head; None if it can."""
        if operand.op != "call_function":
            return f"is a {operand.op}"
        outside = self._why_outside(operand)
        if outside is not None:
            return outside
        needs = operand_heads(operand, held, self.num_heads)
        if isinstance(needs, Refusal):
            return needs.reason
        if operand.target is operator.getitem:  # an item joins with the op that returns it
            ((source, of_source),) = needs.items()
            assert isinstance(of_source, HeadDim), "the of source is a dim of heads"
            return self._why_not(source, of_source)
        return None

    def _why_outside(self, node: fx.Node) -> str | None:
        """Why a node can be no member, whatever its op; None if it can."""
        if is_collective(node) or is_wait(node):
            return ONCE
        if node in self.taken or node in self.left_out:
            return self.left_out.get(node, ANOTHER)
        if is_attention(node) and forward_of(node) not in self.held:
            return OTHER_ATTENTION
        return None

    def _push_users(self, member: fx.Node) -> None:
        held = self.held[member]
        if not isinstance(held, HeadDim) or ops.is_constant(member):  # it may serve all layers
            return
        for user in self.joint.users(member):
            if user in self.held or user.op == "output":
                continue
            outside = self._why_outside(user)
            result: Held | Refusal = Refusal(outside or "")
            if outside is None:
                result = result_heads(user, member, held, self.num_heads)
            if isinstance(result, Reduced) and result != SUM:
                result = Refusal(f"{user.target} reduces over all heads")
            if isinstance(result, HeadDim):
                needs = operand_heads(user, result, self.num_heads)
                if isinstance(needs, Refusal):
                    result = needs
            if isinstance(result, Refusal):
                self.barriers[user] = result.reason
                continue
            self._put(user, result)

    # ---- sums over heads -----------------------------------------------------------------------
    def _add_sums(self) -> None:
        """Add what adds up several sums over heads, so that the loop returns one of them."""
        sums = {node for node, held in self.held.items() if held == SUM}
        self.held.update(dict.fromkeys(sums_of_sums(self.joint, sums, self.held.keys()), SUM))

    # ---- paths that leave the region and come back ---------------------------------------------
    def _check_members(self) -> None:
        """Check what each member reads, now that all are known.

        Raises:
            CannotTake: a member needs all heads of another one.
        """
        for node in self.joint.sorted(self.held):
            for operand, needed in self.operand_heads(node).items():
                held = self.held.get(operand, self.sliced.get(operand))
                in_loop = (node in self.joint.backward) == (operand in self.joint.backward)
                if held != needed and (isinstance(held, HeadDim) or (held == SUM and in_loop)):
                    raise CannotTake(node, f"every head needs all of {operand.name}")

    def _check_round_trips(self, seed: fx.Node) -> None:
        """Check that no loop needs what is computed from its own results.

        Raises:
            RoundTrip: a node outside lies between two members of one phase.
        """
        index = self.joint.index
        for backward in (False, True):
            part = {
                node
                for node in self.held
                if (node in self.joint.backward) == backward and not ops.is_constant(node)
            }  # a loop makes its own constants
            places = [index[node] for node in part] or [0]
            paths = Paths(part, self.joint.nodes[min(places) : max(places) + 1])
            trip = paths.first_round_trip()
            if trip is not None:
                core = self._core_of_backward(seed, paths) if backward else {seed}
                cut = paths.to_leave_out(core) or {n for n in trip.all_input_nodes if n in part}
                raise RoundTrip(trip, self.barriers.get(trip, ROUND_TRIP), cut)

    def _core_of_backward(self, seed: fx.Node, paths: Paths) -> set[fx.Node]:
        """The backward's members computed from the seed's, up to the first path that leaves."""
        of_seed = self._computed_with(seed)
        inside = lambda node: (user for user in node.users if user in paths.part)
        core = set(walk_once((user for node in of_seed for user in inside(node)), inside))
        return core - paths.after(core)

    def _computed_with(self, seed: fx.Node) -> set[fx.Node]:
        """The members of the forward from which the seed is computed, and what these lead to.

        The transposed weights of another layer are not among them.
        """
        forward = [n for n in self.joint.sorted(self.held) if n not in self.joint.backward]
        found = {seed}
        for node in reversed(forward):
            if not found.isdisjoint(node.users) and not ops.is_constant(node):
                found.add(node)
        for node in forward:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found
