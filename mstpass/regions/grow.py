"""Grow a region from seeds, along an axis: its members, each with its cut, and what joins them.

Pseudo-code::

    add(seed)
    until nothing changes, of each member:
        add its operands that belong to the region
        add its users, if they belong

What belongs is said by a class for each kind of region: all that touches wide values, of tokens or
features (wide_growth.py), what is computed head by head (head_growth.py), the parts of a mask
(attention.py), and what lies between two ends (blocks.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import NARROW_EXCHANGE, OTHER_REGION, RETURN_SUM, ROWWISE, SEPARATE_DIMS
from mstpass.graph.axes import Axis
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import tensor_inputs
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Reduced, Refusal, Spec, has_tokens
from mstpass.plans import Region, Rejection
from mstpass.walk import walk_once

ANOTHER = OTHER_REGION("already belongs to another region")
COMPLETE = ROWWISE("what is reduced over all tokens is complete only after the loop")


def found_regions(
    seeds: Iterable[fx.Node], region_of: Callable[[fx.Node], Region]
) -> tuple[list[Region], list[Rejection]]:
    """The region of each seed, or why there is none."""
    regions: list[Region] = []
    rejections: list[Rejection] = []
    for seed in seeds:
        try:
            regions.append(region_of(seed))
        except CannotTake as refusal:
            rejections.append(rejection_of(seed, refusal))
    return regions, rejections


def rejection_of(seed: fx.Node, refusal: CannotTake) -> Rejection:
    """No region grows from the seed, for the reason of the refusal."""
    return Rejection("detect", refusal.node.name, refusal.reason, source_of(seed), nbytes(seed))


def _known_specs(joint: JointGraph) -> dict[tuple[Axis, fx.Node, Spec], OperandSpecs | Refusal]:
    """What nodes need of their operands, as far as a growth has asked: others ask again."""
    return {}


class Growth:
    """A region while it grows: its members and their specs.

    Args:
        axis: what the region's loops run over.
        taken: the members of other regions.

    Attributes:
        of_collectives: why no collective joins.
        of_two_specs: why a value joins in one role alone; filled in are two specs.
    """

    of_collectives = NARROW_EXCHANGE(
        "a collective runs once on all tokens, in step with the other ranks"
    )
    of_two_specs = SEPARATE_DIMS("its users need different token dims: {} and {}")

    def __init__(self, joint: JointGraph, axis: Axis, taken: Set[fx.Node] = frozenset()):
        self.joint, self.axis, self.taken = joint, axis, taken
        self.specs: dict[fx.Node, Spec | Reduced] = {}
        self._known = joint.cached(_known_specs)
        self.queue: deque[fx.Node] = deque()

    # ---- what an axis says of nodes ------------------------------------------------------------
    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        """What a node needs of its operands; no loop runs collectives (graph/collectives.py)."""
        if is_collective(node) or is_wait(node):
            return Refusal(self.of_collectives)
        key = self.axis, node, spec
        if key not in self._known:
            self._known[key] = self.axis.operand_specs(node, spec)
        return self._known[key]

    def required_specs(self, member: fx.Node) -> OperandSpecs:
        """The spec that a member requires of each operand.

        Raises:
            CannotTake: the op of the member has no rule for its spec.
        """
        return self._needs_of(member, self.specs[member])

    def reads(
        self, members: Iterable[fx.Node] | None = None
    ) -> Iterator[tuple[fx.Node, fx.Node, Spec]]:
        """Each member, or some, and each of its operands with the spec that the member requires."""
        for member in self.specs if members is None else members:
            for operand, spec in self.required_specs(member).items():
                yield member, operand, spec

    def has_operands(self, node: fx.Node, is_available: Callable[[fx.Node, Spec], bool]) -> bool:
        """Whether each operand of a member is one in the spec that is required, or available."""
        try:
            required = self.required_specs(node)
        except CannotTake:
            return False
        return all(
            self.specs[n] == spec if n in self.specs else is_available(n, spec)
            for n, spec in required.items()
        )

    def _needs_of(self, node: fx.Node, spec: Spec | Reduced) -> OperandSpecs:
        found = self.needs_for(node, spec)
        if isinstance(found, Refusal):
            raise CannotTake(node, found.reason)
        return found

    def needs_for(self, member: fx.Node, spec: Spec | Reduced) -> OperandSpecs | Refusal:
        if not isinstance(spec, Reduced):
            return self.operand_specs(member, spec)
        for operand in member.all_input_nodes:
            if held := self.held(operand):
                return self.axis.sum_operands(member, operand, held)
        if all(self.specs.get(operand) == SUM for operand in tensor_inputs(member)):
            return {}  # a sum of sums
        return Refusal(ROWWISE("no operand that it sums has tokens in the region"))

    def held(self, operand: fx.Node) -> Spec | None:
        """How members read a value chunk by chunk; None if they do not."""
        spec = self.specs.get(operand)
        return None if isinstance(spec, Reduced) else spec

    def spec_of_user(self, user: fx.Node, operand: fx.Node) -> Spec | Reduced | Refusal:
        """The spec that a user of a member would have, or why the user cannot join."""
        spec = self.specs[operand]
        if isinstance(spec, Reduced):
            return Refusal(COMPLETE)
        if user.op == "output":
            return Refusal(RETURN_SUM("is an output of the graph"))
        return self.result(user, operand, spec)

    def result(self, user: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        """The spec of a node that reads ``operand`` in ``spec``, if it can be computed so."""
        result = self.axis.result_spec(user, operand, spec)
        if isinstance(result, tuple):
            required = self.operand_specs(user, result)
            if isinstance(required, Refusal):
                return required
        return result

    # ---- growing -------------------------------------------------------------------------------
    def add(self, node: fx.Node, spec: Spec | Reduced) -> None:
        """Make ``node`` a member, and all nodes that must or should join because of it.

        Raises:
            CannotTake: two members need different dims of a value, or a node that must cannot join.
        """
        self._put(node, spec)
        while self.queue:
            member = self.queue.popleft()
            for operand, needed in self.required_specs(member).items():
                self._pull(operand, needed)
            own = self.specs[member]
            if has_tokens(own) and not ops.is_constant(member) and self._pushes(member):
                self._push_users(member)

    def _put(self, node: fx.Node, spec: Spec | Reduced) -> None:
        known = self.specs.get(node)
        if known is None:
            if node in self.taken and spec != WHOLE:
                raise CannotTake(node, ANOTHER)
            self.specs[node] = spec
            self.queue.append(node)
        elif known != spec:
            raise CannotTake(node, self.of_two_specs.of(known, spec))

    def _push_users(self, member: fx.Node) -> None:
        for user in self.joint.users(member):
            if user in self.specs:
                continue
            if user.op == "output":
                self._returns(member)
                continue
            result = self.spec_of_user(user, member)
            if isinstance(result, Refusal):
                self._refuses(user, result.reason)
            else:
                self._put(user, result)

    # ---- what belongs --------------------------------------------------------------------------
    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        """Add an operand of a member, which needs it in ``spec``, if it belongs."""

    def _pushes(self, member: fx.Node) -> bool:
        """Whether the users of a member belong."""
        return True

    def _returns(self, member: fx.Node) -> None:
        """A member whose users belong is an output of the graph."""

    def _refuses(self, user: fx.Node, reason: str) -> None:
        """A user that belongs cannot join."""
        raise CannotTake(user, reason)

    # ---- on trial ------------------------------------------------------------------------------
    def spread(self, starts: Iterable[fx.Node], up: bool = False) -> Iterator[fx.Node]:
        """The users of the starts, and of each of these that has become a member when the next one
        is asked for: operands first, each no member yet.

        Args:
            up: operands in place of users, readers first.
        """
        sign = -1 if up else 1
        near = lambda node: node.all_input_nodes if up else node.users
        queue = [sign * self.joint.index[n] for node in starts for n in near(node)]
        heapq.heapify(queue)
        while queue:
            node = self.joint.nodes[sign * heapq.heappop(queue)]
            if node not in self.specs:
                yield node
                for other in near(node) if node in self.specs else ():
                    heapq.heappush(queue, sign * self.joint.index[other])

    # ---- sums ----------------------------------------------------------------------------------
    def join_sums(self, sums: Set[fx.Node]) -> None:
        """Add the nodes that add up several of these sums, or views of them, so that the loop
        returns one of them.

        They read nothing else, and no other node outside of the region reads what they read.
        """
        every, added = set(sums), list[fx.Node]()
        for node in self.spread(sums):
            read = {n for n in node.all_input_nodes if n in every}
            if node.op != "output" and self._adds_up(node, read):
                self.specs[node] = SUM
                every.add(node)
                added.append(node)
        for node in reversed(added):  # a view that leads to no such sum stays outside
            several = sum(not is_size(n) for n in node.all_input_nodes) > 1
            if not several and not any(user in self.specs for user in node.users):
                del self.specs[node]

    def _adds_up(self, node: fx.Node, sums: set[fx.Node]) -> bool:
        """Whether a node adds sums of its phase, or only views or casts one, and alone reads them.

        Such a node can be applied to the parts of each chunk, and the results added up.
        """
        value = value_of(node)
        alone = all(user is node or user in self.specs for n in sums for user in n.users)
        same_phase = len({n in self.joint.backward for n in (node, *sums)}) == 1
        read = set(tensor_inputs(node))
        if value is None or not (alone and same_phase and read <= sums):
            return False
        narrows = any(value.itemsize < value_of(n).itemsize for n in read)  # type: ignore[union-attr]
        return not narrows and ops.row(node).is_linear(node, read)

    # ---- the region ----------------------------------------------------------------------------
    def leaving(self) -> list[fx.Node]:
        """The members that nodes outside read; these make constants themselves."""
        return [
            node
            for node in self.joint.sorted(self.specs)
            if any(user not in self.specs for user in node.users) and not ops.is_constant(node)
        ]

    def region(self, outputs: Iterable[fx.Node], **how: Any) -> Region:
        """The members and outputs as plain data; the other fields of a region are given."""
        specs = {n: self.specs[n] for n in self.joint.sorted(self.specs)}
        return Region(
            members=tuple(
                (n.name, None if isinstance(s, Reduced) else s) for n, s in specs.items()
            ),
            outputs=tuple(n.name for n in outputs),
            backward=frozenset(n.name for n in specs if n in self.joint.backward),
            **how,
        )


# ---- paths between nodes -------------------------------------------------------------------------
def between(joint: JointGraph, first: fx.Node | None, last: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward that are computed from ``first`` and lead to the last ones."""
    lowest = -1 if first is None else joint.index[first]
    above = lambda nodes: (node for node in nodes if joint.index[node] > lowest)
    before = set(walk_once(above(last), lambda node: above(node.all_input_nodes)))
    if first is None:
        return before
    inside = lambda node: (user for user in node.users if user in before)
    return set(walk_once([first], inside)) - {first}


def back_to(
    joint: JointGraph, part: Set[fx.Node], sources: Set[fx.Node], ignored: fx.Node | None = None
) -> list[fx.Node]:
    """The nodes on paths from sources in the part back to it, in the graph's order.

    Args:
        ignored: a node that no path leads through.
    """
    first = min(map(joint.index.__getitem__, sources), default=len(joint.index))
    after = lambda nodes: (n for n in nodes if joint.index[n] > first and n is not ignored)
    before = set(walk_once(part, lambda node: after(node.all_input_nodes))) - part
    outside = lambda node: (user for user in node.users if user in before)
    return joint.sorted(set(walk_once(sources, outside)) & before)
