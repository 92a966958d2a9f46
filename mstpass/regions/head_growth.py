"""Grow a region of heads from an attention product: to all that is computed head by head.

Pseudo-code::

    add(attention's result)
    until nothing changes, for each member with heads:
        add its operands with heads that an op computes
        add its users, with heads or as a sum over heads
    add the nodes that only add sums over heads up

A user or an operand whose op mixes heads stays outside. The values between it and the members are
then read in slices, or stacked by the loop.

No path may leave the members and come back, for no loop can be written for it::

    queries -> a norm over all heads -> queries      the region begins after the norm
    bias -> this attention -> ... -> next attention  the region ends before the next attention,
       \\________________________________/            and the bias, which both read, is outside

Either way a part of the region stays: the seed, or in the backward what is computed from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import HEADS_APART, NARROW_EXCHANGE, NEEDS_ALL
from mstpass.graph.attention import forward_of, is_attention
from mstpass.graph.heads import HeadAxis, HeadDim
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import SUM, CannotTake, Reduced, Refusal, Spec
from mstpass.regions.grow import ANOTHER, Growth, back_to
from mstpass.walk import walk_once

OTHER_ATTENTION = NEEDS_ALL("another attention reads the same keys and values")
Neighbors = Callable[[fx.Node], Iterable[fx.Node]]
ROUND_TRIP = HEADS_APART("is computed from all heads, and the heads need it again")


class RoundTrip(CannotTake):
    """A path leaves the region and comes back; without the members in ``cut`` it does not."""

    def __init__(self, node: fx.Node, reason: str, cut: Set[fx.Node]):
        super().__init__(node, reason)
        self.cut = cut


class HeadGrowth(Growth):
    """All that is computed head by head.

    Args:
        left_out: nodes that are no members, with the reason.

    Attributes:
        sliced: where what the members read, but is no member, holds its heads.
        barriers: why nodes that read members, or that members read, are none themselves.
    """

    of_collectives = NARROW_EXCHANGE(
        "a collective runs once on all heads, in step with the other ranks"
    )
    of_two_specs = HEADS_APART("holds its heads in {} and in {}")

    def __init__(
        self,
        joint: JointGraph,
        axis: HeadAxis,
        taken: Set[fx.Node],
        left_out: Mapping[fx.Node, str],
    ):
        super().__init__(joint, axis, taken)
        self.num_heads, self.left_out = axis.num_heads, left_out
        self.sliced: dict[fx.Node, Spec] = {}
        self.barriers: dict[fx.Node, str] = {}

    @classmethod
    def around(
        cls, seed: fx.Node, held: HeadDim, joint: JointGraph, axis: HeadAxis, taken: Set[fx.Node]
    ) -> HeadGrowth:
        """The region around a seed.

        Where a path leaves the region and comes back, the members on its one side are left out: the
        region begins after a norm over all heads, and ends before the attention of another layer
        that adds the same bias to its scores.

        Raises:
            CannotTake: there is no such region.
        """
        left_out: dict[fx.Node, str] = {}
        while True:
            growth = cls(joint, axis, taken, left_out)
            try:
                growth.grow(seed, held)
            except RoundTrip as trip:
                if seed in trip.cut:
                    raise
                left_out.update(dict.fromkeys(trip.cut, trip.reason))
            else:
                return growth

    def grow(self, seed: fx.Node, held: HeadDim) -> None:
        """Add the seed and all that is computed head by head with it.

        Raises:
            RoundTrip: see ``_check_round_trips``.
            CannotTake: a member's heads do not come apart.
        """
        self.add(seed, held)
        self.join_sums({node for node, held in self.specs.items() if held == SUM})
        self._check_members()
        self._check_round_trips(seed)

    # ---- what belongs --------------------------------------------------------------------------
    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        if not spec:
            return
        reason = self._why_not(operand, spec)
        if reason is None:
            self._put(operand, spec)
            return
        if self.sliced.setdefault(operand, spec) != spec:
            raise CannotTake(operand, HEADS_APART("is read along several dims"))
        if operand.op == "call_function":
            self.barriers[operand] = reason

    def _why_not(self, operand: fx.Node, spec: Spec) -> str | None:
        """Why an operand cannot be computed head by head; None if it can."""
        if operand.op != "call_function":
            return f"is a {operand.op}"
        outside = self._why_outside(operand)
        if outside is not None:
            return outside
        needs = self.operand_specs(operand, spec)
        if isinstance(needs, Refusal):
            return needs.reason
        if operand.target is operator.getitem:  # an item joins with the op that returns it
            ((source, of_source),) = needs.items()
            return self._why_not(source, of_source)
        return None

    def _why_outside(self, node: fx.Node) -> str | None:
        """Why a node can be no member, whatever its op; None if it can."""
        if node in self.taken or node in self.left_out:
            return self.left_out.get(node, ANOTHER)
        if is_attention(node) and forward_of(node) not in self.specs:
            return OTHER_ATTENTION
        return None

    def spec_of_user(self, user: fx.Node, operand: fx.Node) -> Spec | Reduced | Refusal:
        outside = self._why_outside(user)
        result = Refusal(outside) if outside else super().spec_of_user(user, operand)
        if isinstance(result, Reduced) and result != SUM:
            return Refusal(HEADS_APART(f"{user.target} reduces over all heads"))
        return result

    def _refuses(self, user: fx.Node, reason: str) -> None:
        self.barriers[user] = reason

    # ---- paths that leave the region and come back ---------------------------------------------
    def _check_members(self) -> None:
        """Check what each member reads, now that all are known.

        Raises:
            CannotTake: a member needs all heads of another one.
        """
        for node in self.joint.sorted(self.specs):
            for operand, needed in self.required_specs(node).items():
                held = self.specs.get(operand, self.sliced.get(operand))
                in_loop = (node in self.joint.backward) == (operand in self.joint.backward)
                if held != needed and (isinstance(held, tuple) or (held == SUM and in_loop)):
                    reason = HEADS_APART(f"every head needs all of {operand.name}")
                    raise CannotTake(node, reason)

    def _check_round_trips(self, seed: fx.Node) -> None:
        """Check that no loop needs what is computed from its own results.

        Raises:
            RoundTrip: a node outside lies between two members of one phase.
        """
        index = self.joint.index
        for backward in (False, True):
            part = {
                node
                for node in self.specs
                if (node in self.joint.backward) == backward and not ops.is_constant(node)
            }  # a loop makes its own constants
            if trips := back_to(self.joint, part, part):
                places, trip = [index[node] for node in part], trips[0]
                paths = Paths(part, self.joint.nodes[min(places) : max(places) + 1])
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
        forward = {n for n in self.specs if n not in self.joint.backward}
        inside = lambda nodes: (n for n in nodes if n in forward)
        before = lambda node: (n for n in inside(node.all_input_nodes) if not ops.is_constant(n))
        return set(walk_once(walk_once([seed], before), lambda node: inside(node.users)))


# ---- paths ---------------------------------------------------------------------------------------
class Paths:
    """The paths among the members of one phase, some of which leave and come back.

    Args:
        part: the members.
        nodes: all nodes of the graph from the first member to the last one, in order.
    """

    def __init__(self, part: Set[fx.Node], nodes: Sequence[fx.Node]):
        self.part, self.nodes = part, nodes

    def after(self, core: Collection[fx.Node]) -> set[fx.Node]:
        """The members to which a path leads from the core by way of a node outside."""
        return self._by_way_of_others(core, self.nodes, lambda node: node.all_input_nodes)

    def to_leave_out(self, core: Collection[fx.Node]) -> set[fx.Node]:
        """The members without which no path from the core, or to it, leaves and comes back.

        These are all before and after the core by way of nodes outside, what is computed from the
        former alone, and the operands of the latter that are not computed from the core.
        """
        before = self._by_way_of_others(core, self.nodes[::-1], lambda node: node.users)
        after = self.after(core)
        members = lambda node: (user for user in node.users if user in self.part)
        from_core = set(walk_once(core, members))
        shared = {n for node in after for n in node.all_input_nodes if n in self.part - from_core}
        for node in self.nodes:
            operands = node.all_input_nodes
            if node in self.part - from_core and operands and before.issuperset(operands):
                before.add(node)
        return before | after | shared

    def _by_way_of_others(
        self, core: Collection[fx.Node], order: Sequence[fx.Node], previous: Neighbors
    ) -> set[fx.Node]:
        inside, by_others = set(core), set[fx.Node]()
        for node in order:
            if any(n in by_others for n in previous(node)):
                by_others.add(node)
            if any(n in inside for n in previous(node)):
                (inside if node in self.part else by_others).add(node)
        return by_others & self.part
