"""Grow a region of tokens, or of features, from an anchor: to all that touches its wide values.

A value is *wide* if it has many more elements per token than the input of the anchor. No wide value
may leave the region, so all users of a wide member join, and a user that is not token-parallel ends
the growth with a refusal.

Pseudo-code::

    add(anchor)
    until nothing changes:
        of a member with a wide value, add all users
        of every member, add the operands that are wide or only views

Some values belong to no single region (``may_repeat``): masks and one-hot rows that cheap ops make
from narrow values. Every region computes them for itself, so that two heads with the same labels
do not become one loop. A narrow value that a region reads in two roles, such as the labels in
``t[:, None] == t[None, :]``, is computed in one of them and read as an input in the other.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import OWN_VALUES, RETURN_SUM, SEPARATE_DIMS
from mstpass.graph.axes import FEATURES, TOKEN_AXIS, axis_of
from mstpass.graph.collectives import is_collective
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.sizes import generic_shape, hint_shape
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec, token_count
from mstpass.regions.anchors import weights_and_gradients, wide_numel
from mstpass.regions.grow import COMPLETE, Growth, back_to
from mstpass.walk import needed_first, walk_once

OUTSIDE = OWN_VALUES("lies on a path that leaves the region and comes back")
_FEW_ROWS = 2  # a value with at least so many rows of all features is wide


def upstream_matmuls(joint: JointGraph) -> dict[fx.Node, int]:
    """For every node, the matmuls that it depends on or is, as bits: bit i stands for node i."""
    upstream: dict[fx.Node, int] = {}
    for i, node in enumerate(joint.nodes):
        bits = 1 << i if ops.is_matmul(node) else 0
        for operand in node.all_input_nodes:
            bits |= upstream[operand]
        upstream[node] = bits
    return upstream


class WideGrowth(Growth):
    """All that touches wide values.

    Args:
        anchor: what it grows from.
        held: where that holds its tokens, or its features.
        count: how many of them there are, for features.

    Attributes:
        wide_numel: from how many elements on a value is wide.
        never_wide: values that are large whatever the tokens: weights and their gradients, where
            the region's loops run over features.
        count: the number of tokens, or features, in the traced batch.
    """

    def __init__(
        self,
        joint: JointGraph,
        anchor: fx.Node,
        held: Spec,
        taken: Set[fx.Node],
        count: int | None = None,
    ):
        self.of_tokens, self.anchor, self.held_by_anchor = count is None, anchor, held
        super().__init__(joint, TOKEN_AXIS if count is None else axis_of(FEATURES, count), taken)
        if count is None:
            shape = generic_shape(anchor.meta["val"])
            self.wide_numel, self.generic_count = wide_numel(anchor, held), token_count(shape, held)
            self.count = token_count(hint_shape(anchor.meta["val"]), held)
            self.never_wide: Set[fx.Node] = frozenset()
        else:
            self.wide_numel, self.generic_count, self.count = _FEW_ROWS * count, count, count
            self.never_wide = joint.cached(weights_and_gradients)
        self.upstream = joint.cached(upstream_matmuls)
        self.returned: set[fx.Node] = set()  # wide members that the step returns
        self.reenters = False  # a path leaves the region's loops and comes back to later ones
        self.made_from_narrow: dict[fx.Node, bool] = {}  # what was found so far

    def copy(self) -> WideGrowth:
        other = copy.copy(self)
        other.specs, other.returned = dict(self.specs), set(self.returned)
        other.queue = deque()
        return other

    def adopt(self, other: WideGrowth) -> None:
        """Replace the members by those of a copy that has grown further."""
        self.specs, self.returned, self.reenters = other.specs, other.returned, other.reenters

    def try_add(self, node: fx.Node, spec: Spec) -> bool:
        """Add the node if that is possible, else change nothing. Returns whether it was added."""
        trial = self.copy()
        try:
            trial.add(node, spec)
        except CannotTake:
            return False
        self.adopt(trial)
        return True

    def wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel and node not in self.never_wide

    def may_repeat(self, node: fx.Node) -> bool:
        """Whether several regions may compute the node.

        So they may narrow masks from labels, constants, rows gathered from a table, and wide values
        that are made from narrow ones, with the sums and maxima of their rows.
        """
        if ops.is_constant(node) or ops.gathers_rows(node):
            return True
        if self.wide(node):
            return node.op != "placeholder" and self._is_made_from_narrow(node)
        value = value_of(node)
        if value is not None and not value.is_floating_point():
            return True
        operands = self._wide_operands(node)
        return ops.is_reduction(node) and all(map(self._is_made_from_narrow, operands))

    def _is_made_from_narrow(self, node: fx.Node) -> bool:
        """Whether cheap ops make the wide value from narrow ones, as a one-hot row from a label.

        A gradient that a product reads is not among them: it belongs with the product.
        """
        known = self.made_from_narrow
        for one in needed_first(node, self._wide_operands, known):
            if one.op == "placeholder":  # masks may be repeated
                value = value_of(one)
                known[one] = value is not None and not value.is_floating_point()
                continue
            cheap = ops.is_pointwise(one) or ops.is_cheap_view(one)
            cheap = cheap and not any(map(ops.is_matmul, ops.readers_through_views(one)))
            made = cheap and all(known[operand] for operand in self._wide_operands(one))
            known[one] = made or ops.is_constant(one)
        return known[node]

    def _wide_operands(self, node: fx.Node) -> list[fx.Node]:
        return [operand for operand in node.all_input_nodes if self.wide(operand)]

    def wide_matmuls(self) -> int:
        """The members that are matmuls with a wide result, as bits as in ``upstream_matmuls``."""
        return sum(1 << self.joint.index[node] for node in self.specs if self._is_wide_matmul(node))

    def _is_wide_matmul(self, node: fx.Node) -> bool:
        return ops.is_matmul(node) and self.wide(node)

    def depends_on(self, node: fx.Node, matmuls: int) -> bool:
        """Whether a node outside of the region depends on one of these matmuls."""
        return node not in self.specs and bool(self.upstream[node] & matmuls)

    def computed(self) -> set[fx.Node]:
        """The members that are or depend on wide matmuls of the region.

        Nodes outside that read another member compute it themselves.
        """
        members = lambda node: (user for user in node.users if user in self.specs)
        return set(walk_once(filter(self._is_wide_matmul, self.specs), members))

    # ---- what belongs --------------------------------------------------------------------------
    def _pushes(self, member: fx.Node) -> bool:
        if value_of(member) is None:
            return True
        return self.wide(member) and not self.may_repeat(member)

    def _returns(self, member: fx.Node) -> None:
        if member in self.joint.backward:
            raise CannotTake(member, RETURN_SUM("is an output of the graph"))
        self.returned.add(member)

    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        if operand in self.specs:
            self._check_role(operand, spec)
        elif self._worth_pulling(operand, spec) and self._can_pull(operand, spec):
            self._put(operand, spec)
        elif value_of(operand) is None:
            reason = SEPARATE_DIMS("it returns several tensors but cannot join the region")
            raise CannotTake(operand, reason)

    def _may_be_read(self, member: fx.Node, spec: Spec) -> bool:
        """Whether a loop may read the value of a member in other dims than it computes it in.

        It may if the value exists before the loop: it is small, and no product of the region, nor
        the gradient that enters it, leads to it. What is reduced over all tokens may be read as a
        whole: the loop that reads it follows the one that computes it (loops/region_facts.py).
        """
        if isinstance(self.specs[member], Reduced):
            return spec == WHOLE
        if self.wide(member) or value_of(member) is None or member in self.joint.backward:
            return False
        return not self.upstream[member] & self.wide_matmuls()

    def check_roles(self) -> None:
        """Check, once all members are known, that the values read in two roles may be.

        Raises:
            CannotTake: the region itself computes such a value.
        """
        for _, operand, spec in self.reads():
            self._check_role(operand, spec)

    def _check_role(self, operand: fx.Node, spec: Spec) -> None:
        known = self.specs.get(operand, spec)
        if known != spec and not self._may_be_read(operand, spec):
            raise CannotTake(operand, self.of_two_specs.of(known, spec))

    def _worth_pulling(self, operand: fx.Node, spec: Spec) -> bool:
        if operand.op != "call_function":
            return False
        if ops.is_cheap_view(operand) or ops.is_constant(operand):
            return True
        if spec == WHOLE:
            return False
        value = value_of(operand)
        if value is None:
            return True  # no tuple can enter a loop, so its producer joins with its items
        # To compute masks and indices from labels again is cheaper than to read them; to read rows
        # of a table than rows of a copy that is larger than the table.
        labels = not value.is_floating_point() and ops.is_pointwise(operand)
        return self.wide(operand) or labels or ops.gathers_rows(operand)

    def _can_pull(self, operand: fx.Node, spec: Spec) -> bool:
        required = self.operand_specs(operand, spec)
        if isinstance(required, Refusal):
            return False
        for n, s in required.items():
            if self.specs.get(n, s) != s and not self._may_be_read(n, s):
                return False
        # An item of a tuple joins only together with the op that returns the tuple.
        tuples = [n for n in required if value_of(n) is None and n not in self.specs]
        return all(self._can_pull(n, required[n]) for n in tuples)

    def part(self, in_backward: bool) -> set[fx.Node]:
        """The members of one phase that are no whole values."""
        return {
            node
            for node, spec in self.specs.items()
            if spec != WHOLE and (node in self.joint.backward) == in_backward
        }

    # ---- closing a part: no path may leave it and come back -----------------------------------
    def close(self, part: set[fx.Node], ignored: fx.Node | None = None) -> None:
        """Add all nodes on paths that leave ``part`` and come back to it.

        Paths through ``ignored``, the scalar of a fused region, do not count. Neither do paths
        through a collective or a value that is reduced over all tokens, if the same phase of the
        region reads what they lead to: then it is several loops (loops/region_facts.py).

        Raises:
            CannotTake: such a node cannot join.
        """
        while True:
            between = back_to(self.joint, part, part & self.computed(), ignored)
            after = self._after_loops(part, between)
            if after and not self._phase_reads(part, after):
                first = next(n for n in between if n in after)
                raise CannotTake(first, self.of_collectives if is_collective(first) else COMPLETE)
            self.reenters |= bool(after)
            inside = [node for node in between if node not in after]
            if not inside:
                return
            for node in inside:
                self._join(node)
            part = part | set(inside)

    def _after_loops(self, part: set[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
        """Those of the nodes, in the graph's order, that can be computed only after a loop.

        They read what a collective makes of the part's values, or what these are reduced to. The
        backward of a fused region is one loop.
        """
        fused = len({node in self.joint.backward for node in part}) == 2
        found: set[fx.Node] = set()
        for node in nodes:
            in_backward = node in self.joint.backward
            if in_backward and fused:
                continue
            waits = is_collective(node) and not in_backward
            waits |= any(isinstance(self.specs.get(n), Reduced) for n in node.all_input_nodes)
            if waits or any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _phase_reads(self, part: set[fx.Node], values: set[fx.Node]) -> bool:
        """Whether nodes of the part read values of their own phase."""
        return any(
            operand in values
            for node in part
            for operand in node.all_input_nodes
            if (operand in self.joint.backward) == (node in self.joint.backward)
        )

    def waits_for_reductions(self) -> list[tuple[fx.Node, fx.Node]]:
        """Members, and what they read that a loop over all tokens has to complete first."""
        return [
            (member, operand)
            for member, operand, spec in self.reads()
            if spec == WHOLE and isinstance(self.specs.get(operand), Reduced)
        ]

    def _join(self, node: fx.Node) -> None:
        if node in self.specs:
            return
        for operand in node.all_input_nodes:
            spec = self.specs.get(operand, WHOLE)
            if spec != WHOLE and not isinstance(spec, Reduced):
                result = self.spec_of_user(node, operand)
                if isinstance(result, Refusal):
                    raise CannotTake(node, result.reason)
                self.add(node, result)
                return
        waits = any(isinstance(self.specs.get(n), Reduced) for n in node.all_input_nodes)
        reason = COMPLETE if waits else OUTSIDE
        raise CannotTake(node, reason)
