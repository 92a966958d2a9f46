"""Grow a region from one wide matmul: all that touches its wide values, each with token dims.

Pseudo-code::

    add(anchor)
    for a member with a wide value:  add all its users            # no wide value may escape
    for a member's wide operand, or operand that is a mere view:   add its producer
    until nothing changes

A *wide* value has many more elements a token than the anchor's input. A user of a wide value that
is not token-parallel ends the growth with a refusal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec, Sum


def products_behind(joint: JointGraph) -> dict[fx.Node, int]:
    """Of every node the products that it depends on or is: bit ``i`` for the graph's node ``i``."""
    behind: dict[fx.Node, int] = {}
    for i, node in enumerate(joint.nodes):
        bits = 1 << i if ops.is_matmul(node) else 0
        for operand in node.all_input_nodes:
            bits |= behind[operand]
        behind[node] = bits
    return behind


class Needs:
    """The specs that nodes need of their operands: asked often, found once."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, Spec], dict[fx.Node, Spec] | Refusal] = {}

    def of(self, node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
        if (node, spec) not in self._known:
            self._known[node, spec] = ops.operand_specs(node, spec)
        return self._known[node, spec]


class Growth:
    """A region while it grows: its members and their specs."""

    def __init__(
        self,
        joint: JointGraph,
        wide_numel: int,
        taken: Set[fx.Node],
        behind: Mapping[fx.Node, int],
        known: Needs,
    ):
        self.joint = joint
        self.wide_numel = wide_numel
        self.taken = taken  # members of other regions
        self.behind = behind
        self.known = known
        self.specs: dict[fx.Node, Spec | Sum] = {}
        self.returned: set[fx.Node] = set()  # wide members that the step returns
        self._queue: deque[fx.Node] = deque()

    def copy(self) -> Growth:
        other = Growth(self.joint, self.wide_numel, self.taken, self.behind, self.known)
        other.specs, other.returned = dict(self.specs), set(self.returned)
        return other

    def take(self, other: Growth) -> None:
        self.specs, self.returned = other.specs, other.returned

    def could_add(self, node: fx.Node, spec: Spec) -> bool:
        """Add the node where that is possible; leave everything as it was where it is not."""
        trial = self.copy()
        try:
            trial.add(node, spec)
        except CannotTake:
            return False
        self.take(trial)
        return True

    def wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel

    def matters(self, node: fx.Node) -> bool:
        """Not mere label arithmetic, which several regions may repeat."""
        value = value_of(node)
        return value is None or value.is_floating_point() or self.wide(node)

    def products(self) -> int:
        """The region's wide products, a bit each."""
        return sum(1 << self.joint.index[node] for node in self.specs if self._is_product(node))

    def _is_product(self, node: fx.Node) -> bool:
        return ops.is_matmul(node) and self.wide(node)

    def feeds(self, products: int, node: fx.Node) -> bool:
        """Whether a node outside needs one of these products."""
        return node not in self.specs and bool(self.behind[node] & products)

    def computed(self) -> set[fx.Node]:
        """Members that come from the region's wide products; others are redone where needed."""
        found: set[fx.Node] = set()
        for node in self.joint.sorted(self.specs):
            if self._is_product(node) or any(i in found for i in node.all_input_nodes):
                found.add(node)
        return found

    def add(self, node: fx.Node, spec: Spec | Sum) -> None:
        """Make ``node`` a member and follow wide values and views from it until nothing is new.

        Raises:
            CannotTake: two members disagree on token dims, or a wide value escapes.
        """
        self._put(node, spec)
        while self._queue:
            member = self._queue.popleft()
            self._pull_operands(member)
            carries = self.specs[member] not in (SUM, WHOLE)
            if carries and (self.wide(member) or value_of(member) is None):
                self._push_users(member)

    def needs(self, member: fx.Node) -> dict[fx.Node, Spec]:
        """The spec that a member needs of each operand."""
        spec = self.specs[member]
        if isinstance(spec, Sum):
            needs = self._sum_needs(member)
        else:
            needs = self.known.of(member, spec)
        if isinstance(needs, Refusal):
            raise CannotTake(member, needs.reason)
        return needs

    def _sum_needs(self, member: fx.Node) -> dict[fx.Node, Spec] | Refusal:
        for operand in member.all_input_nodes:
            spec = self.specs.get(operand)
            if isinstance(spec, tuple) and spec != WHOLE:
                return ops.sum_operands(member, operand, spec)
        return Refusal(f"{member.name} sums nothing of the region")

    def try_user(self, user: fx.Node, operand: fx.Node) -> Spec | Sum | Refusal:
        """The spec ``user`` would have; a Refusal where it cannot join."""
        spec = self.specs[operand]
        if isinstance(spec, Sum):
            return Refusal("a sum over tokens is used token by token")
        if user.op == "output":
            return Refusal("is an output of the graph")
        result = ops.result_spec(user, operand, spec)
        if isinstance(result, tuple):
            needs = self.known.of(user, result)
            if isinstance(needs, Refusal):
                return needs
        return result

    def _put(self, node: fx.Node, spec: Spec | Sum) -> None:
        known = self.specs.get(node)
        if known is None:
            if node in self.taken and spec != WHOLE:
                raise CannotTake(node, "belongs to another region already")
            self.specs[node] = spec
            self._queue.append(node)
        elif known != spec:
            raise CannotTake(node, f"token dims {known} and {spec} are both needed")

    def _push_users(self, member: fx.Node) -> None:
        for user in self.joint.users(member):
            if user in self.specs:
                continue
            if user.op == "output":
                if member in self.joint.backward:
                    raise CannotTake(member, "is an output of the graph")
                self.returned.add(member)
                continue
            result = self.try_user(user, member)
            if isinstance(result, Refusal):
                raise CannotTake(user, result.reason)
            self._put(user, result)

    def _pull_operands(self, member: fx.Node) -> None:
        for operand, spec in self.needs(member).items():
            if operand in self.specs:
                if self.specs[operand] != spec:
                    raise CannotTake(
                        operand, f"token dims {self.specs[operand]} and {spec} are both needed"
                    )
            elif self._worth_pulling(operand, spec) and self._can_pull(operand, spec):
                self._put(operand, spec)
            elif value_of(operand) is None:
                raise CannotTake(operand, "an op with several results that cannot join")

    def _worth_pulling(self, operand: fx.Node, spec: Spec) -> bool:
        if operand.op != "call_function":
            return False
        if ops.is_cheap_view(operand) or ops.is_constant(operand):
            return True
        if spec == WHOLE:
            return False
        value = value_of(operand)
        if value is None:
            return True  # a tuple cannot enter a loop: its producer comes along with its items
        # Masks and indices made from labels are cheaper to redo than to read.
        labels = not value.is_floating_point() and ops.is_pointwise(operand)
        return self.wide(operand) or labels

    def _can_pull(self, operand: fx.Node, spec: Spec) -> bool:
        needs = self.known.of(operand, spec)
        if isinstance(needs, Refusal):
            return False
        if not all(self.specs.get(n, s) == s for n, s in needs.items()):
            return False
        # An item joins only with the op that makes the tuple.
        tuples = [n for n in needs if value_of(n) is None and n not in self.specs]
        return all(self._can_pull(n, needs[n]) for n in tuples)

    # ---- closing a part: no path may leave it and come back -----------------------------------
    def close(self, part: set[fx.Node], cut: fx.Node | None = None) -> set[fx.Node]:
        """Add all nodes on paths from ``part`` out and back into it. Returns the closed part.

        ``cut`` is a node through which paths do not count (a fused region's scalar).
        """
        while True:
            between = self._between(part, cut)
            if not between:
                return part
            for node in between:
                self._join(node)
            part = part | set(between)

    def _join(self, node: fx.Node) -> None:
        if node in self.specs:
            return
        for operand in node.all_input_nodes:
            if operand in self.specs and self.specs[operand] != WHOLE:
                result = self.try_user(node, operand)
                if isinstance(result, Refusal):
                    raise CannotTake(node, result.reason)
                self.add(node, result)
                return
        raise CannotTake(node, "lies between two parts of the region")

    def _between(self, part: set[fx.Node], cut: fx.Node | None) -> list[fx.Node]:
        index = self.joint.index
        sources = part & self.computed()
        first = min(map(index.__getitem__, sources), default=len(index))
        before: set[fx.Node] = set()  # what the part needs, no further back than its first source
        stack = list(part)
        while stack:
            for operand in stack.pop().all_input_nodes:
                if index[operand] > first and operand is not cut:
                    if operand not in part and operand not in before:
                        before.add(operand)
                        stack.append(operand)
        between: dict[fx.Node, None] = {}
        for node in self.joint.sorted(before):
            if any(i in sources or i in between for i in node.all_input_nodes):
                between[node] = None
        return list(between)
