"""The backward of a region in a loop over sections of its features: those of an MLP, or the words
of a vocabulary.

A loop over tokens sums the gradients of weights, in float32: with few tokens these sums take as
much memory as the region's wide values. A row of such a gradient belongs to one feature, so a loop
over sections of the features writes each row once, by one product over all tokens::

    forward, over tokens       the results; and per token what the gradients need of the whole row,
                               such as the maximum and the sum of exponentials of its logits
    backward, over sections    the section's wide values again -> their gradients -> rows of the
                               weights' gradients

Of a fused region, the loop over tokens computes all other gradients as well. Of other regions, the
gradient of the tokens is a sum over sections::

    dh = dy @ W_down^T              [N, section]
    dW_down = dy^T @ h              rows of one section, written once
    dx += dh' @ W_up^T              [N, d], the one sum

What the loop over sections reads that holds no features is computed outside of loops, from what the
loop over tokens returns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import Reason
from mstpass.graph.axes import FEATURES
from mstpass.graph.heads import HeadAxis, HeadDim, part_sizes
from mstpass.graph.joint import numel, value_of
from mstpass.graph.sizes import Size, is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Reduced, Refusal, Spec, has_tokens
from mstpass.loops.body.products import have_equals
from mstpass.loops.region_facts import RegionFacts, loop_plan
from mstpass.plans import LoopOutput, LoopPlan
from mstpass.regions.grow import Growth
from mstpass.walk import walk_once


@dataclasses.dataclass(frozen=True)
class Sections:
    """The loop over sections, and what the loop over tokens computes for it.

    Attributes:
        gradients: the outputs of the loop over sections.
        per_token: members that the loop over tokens returns besides its other outputs.
        count: the features that the sections divide.
    """

    loop: LoopPlan
    gradients: tuple[fx.Node, ...]
    per_token: tuple[fx.Node, ...]
    count: int


def sections_of(facts: RegionFacts, fused: bool) -> Sections | Refusal:
    """The loop over sections of a region's features, or why there is none.

    Args:
        fused: the loop over tokens computes all gradients that have no features.
    """
    if facts.region.axis == FEATURES:
        return Refusal("all of its loops run over features")
    if not fused and not facts.early.isdisjoint(facts.backward):
        return Refusal("its backward is several loops over tokens")
    if facts.region.returned:
        return Refusal("the step returns a wide value, so it exists in full")
    if have_equals(filter(ops.is_matmul, facts.specs)):
        return Refusal("its values are compared with a maximum of theirs, computed in other chunks")
    try:
        return _Section(facts, _features(facts), fused).sections()
    except CannotTake as refusal:
        return Refusal(f"{refusal.node.name}: {refusal.reason}")


# ---- where values hold their features ------------------------------------------------------------
def _features(facts: RegionFacts) -> _Features:
    """The features of the region's widest product, in all members that hold them.

    Raises:
        CannotTake: a member holds them in two dims.
    """
    products = [n for n in facts.specs if ops.is_matmul(n) and n not in facts.backward]
    widest, width = max(products, key=numel), facts.region.width
    spec = facts.specs[widest] or ()
    shape = widest.meta["val"].shape
    dims = _dims_of_size(shape, width, spec)
    if len(dims) != 1:
        raise CannotTake(widest, "holds its features in no dim of their own")
    features = _Features(facts, _features_of_parts(facts, width))
    features.add(widest, HeadDim(dims[0]))
    return features


def _features_of_parts(facts: RegionFacts, width: int) -> int:
    """The features of one part, where members of this width consist of equal parts.

    Such are a gate and an up projection in one product.
    """
    sizes = [width]
    for node, spec in facts.specs.items():
        if not spec:
            continue
        for operand in node.all_input_nodes:
            value = value_of(operand)
            dims = [] if value is None else _dims_of_size(value.shape, width, spec)
            sizes += itertools.chain.from_iterable(part_sizes(node, d) for d in dims)
    return math.gcd(*sizes)


def _dims_of_size(shape: Sequence[Size], width: int, spec: Spec) -> list[int]:
    """The dims of this size that are no token dims; a symbolic size is never that of features."""
    return [
        d
        for d, size in enumerate(shape)
        if isinstance(size, int) and size == width and d not in spec
    ]


class _Features(Growth):
    """Where a region's members hold features, and inputs such as weights, from one that does.

    A user that sums over the features is a member as well.
    """

    of_two_specs = Reason("holds the features in two dims")

    def __init__(self, facts: RegionFacts, count: int):
        super().__init__(facts.joint, HeadAxis(count))
        self.count, self.of_region = count, facts.specs

    def may_hold(self, node: fx.Node) -> bool:
        """Whether the node holds features that others hold too; constants may serve several."""
        return node in self.of_region and not ops.is_constant(node)

    def holds(self, node: fx.Node) -> bool:
        return has_tokens(self.specs.get(node, WHOLE))

    def needs_for(self, member: fx.Node, spec: Spec | Reduced) -> OperandSpecs | Refusal:
        needs = super().needs_for(member, spec) if self.may_hold(member) else {}
        return {} if isinstance(needs, Refusal) else needs

    def spec_of_user(self, user: fx.Node, operand: fx.Node) -> Spec | Reduced | Refusal:
        held = self.held(operand) if self.may_hold(user) else None
        if not held:
            return Refusal("holds its features in no dim of their own")
        return self.axis.result_spec(user, operand, held)

    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        is_new = operand not in self.specs or self.may_hold(operand)
        if spec and is_new and not ops.is_constant(operand):
            self._put(operand, spec)

    def _refuses(self, user: fx.Node, reason: str) -> None:
        pass


# ---- what a section is computed from -------------------------------------------------------------
class _Section:
    """What the gradients of a section are computed from, from the gradients backwards.

    Args:
        fused: as of ``sections_of``.

    Attributes:
        specs: what the loop computes.
        sums: members of the region that are sums over the features, for its other gradients.
    """

    def __init__(self, facts: RegionFacts, features: _Features, fused: bool):
        self.facts, self.features, self.fused = facts, features, fused
        self.specs: dict[fx.Node, Spec | Reduced] = {}
        self.inputs: set[tuple[fx.Node, Spec]] = set()
        self.sums: set[fx.Node] = set()
        self.per_token: set[fx.Node] = set()

    def sections(self) -> Sections:
        """The loop of the gradients with features, and of those that are sums over them.

        Raises:
            CannotTake: a section needs a wide value of all features.
        """
        facts, joint, known = self.facts, self.facts.joint, self.features.specs
        leaving = [n for n in facts.outputs if n in facts.backward]
        # a gradient with tokens and features is wide
        outputs = {n for n in leaving if self.features.holds(n) and facts.specs[n] is None}
        if not outputs:
            first = next(iter(facts.specs))
            raise CannotTake(first, "no gradient of a weight holds features")
        for node in leaving if not self.fused else ():
            if node not in outputs:
                self._provide(node, sums=True)
        before = set(known)
        self.features.join_sums(self.sums)  # so that the loop returns one of several
        sums = self.sums | (known.keys() - before)
        self._compute(joint.sorted(outputs | sums))
        outputs |= {n for n in sums if any(user not in self.specs for user in n.users)}
        specs = {n: None if isinstance(s, Reduced) else s for n, s in self.specs.items()}
        gradients, per_token = map(joint.sorted, (outputs, self.per_token))
        returned = (LoopOutput(n.name, specs[n]) for n in gradients)
        loop = loop_plan(joint, "backward", specs, self.inputs, returned)
        return Sections(loop, tuple(gradients), tuple(per_token), self.features.count)

    def _compute(self, nodes: list[fx.Node]) -> None:
        """Have the loop compute these, and what of the region they are computed from by section."""
        self.specs = {node: self.features.specs[node] for node in nodes}
        for node in nodes:  # it grows
            self.inputs.update((size, WHOLE) for size in node.all_input_nodes if is_size(size))
            for operand, spec in self._needs(node).items():
                if not self._computes(operand, spec):
                    self.inputs.add((operand, spec))
                    if not spec:
                        self._provide(operand, sums=False)
                elif operand not in self.specs:
                    self.specs[operand] = spec
                    nodes.append(operand)

    def _needs(self, node: fx.Node) -> OperandSpecs:
        spec = self.specs[node]
        if isinstance(spec, Reduced):
            return self.features.required_specs(node)
        needs = self.features.operand_specs(node, spec)
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason.replace("heads", "features"))
        return needs

    def _computes(self, node: fx.Node, spec: Spec) -> bool:
        """Whether the loop computes a value; constants that differ by place are cut, as inputs."""
        if not spec or not ops.is_constant(node):
            return bool(spec) and self.features.may_hold(node)
        known = self.specs.get(node, spec) == spec
        made = self.features.operand_specs(node, spec)
        return node in self.facts.specs and known and not isinstance(made, Refusal)

    def _provide(self, node: fx.Node, sums: bool) -> None:
        """A value that is computed outside of loops, from what these return.

        Args:
            sums: the loop over sections may return a part of it, as a sum over the features.
        """
        if not sums and self._is_wide(node):
            raise CannotTake(node, "every section needs all of it")

        def operands(other: fx.Node) -> list[fx.Node]:
            is_item = other.target is operator.getitem  # of an op with several results, such as max
            return (other.all_input_nodes[0] if is_item else other).all_input_nodes

        inside = lambda other: other in self.facts.specs
        reduces = lambda other: any(map(self._is_wide, operands(other)))
        further = lambda other: () if reduces(other) else filter(inside, operands(other))
        for other in filter(reduces, walk_once(filter(inside, [node]), further)):
            if self.fused or other not in self.facts.backward:
                self.per_token.add(other)
            elif sums and self.features.specs.get(other) == SUM:
                self.sums.add(other)
            else:
                raise CannotTake(other, "is a sum over all features that every section needs")

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether the value is too large to exist for all tokens and all features."""
        if node not in self.facts.specs:
            return False
        return self.features.holds(node) or self.facts.is_widest(node)
