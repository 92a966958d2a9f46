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
from collections.abc import Iterable, Sequence

from torch import fx

from mstpass.graph import intervals, ops
from mstpass.graph.axes import FEATURES
from mstpass.graph.heads import HeadDim, operand_heads, result_heads, summed_heads
from mstpass.graph.joint import numel, value_of
from mstpass.graph.sizes import Size, is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec
from mstpass.loops.body.products import have_equals
from mstpass.loops.region_facts import RegionFacts
from mstpass.plans import LoopInput, LoopOutput, LoopPlan
from mstpass.regions.sums_of_sums import sums_of_sums


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
        growth = _Growth(facts, _features(facts), fused)
        growth.grow()
    except CannotTake as refusal:
        return Refusal(f"{refusal.node.name}: {refusal.reason}")
    return growth.sections()


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
    features.follow(widest, HeadDim(dims[0]))
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
            sizes += itertools.chain.from_iterable(intervals.part_sizes(node, d) for d in dims)
    return math.gcd(*sizes)


def _dims_of_size(shape: Sequence[Size], width: int, spec: Spec) -> list[int]:
    """The dims of this size that are no token dims; a symbolic size is never that of features."""
    return [
        d
        for d, size in enumerate(shape)
        if isinstance(size, int) and size == width and d not in spec
    ]


class _Features:
    """The dims of features, followed through a region and its inputs from a value that has one.

    Attributes:
        held: where members hold the features, and inputs such as weights.
    """

    def __init__(self, facts: RegionFacts, count: int):
        self.facts, self.count = facts, count
        self.held: dict[fx.Node, HeadDim] = {}

    def follow(self, start: fx.Node, dim: HeadDim) -> None:
        """Find the dims of all values that are computed from the first one, or it from them."""
        stack = self._put({start: dim})
        while stack:
            node = stack.pop()
            dim = self.held[node]
            if self.may_hold(node):
                needs = operand_heads(node, dim, self.count)
                stack += [] if isinstance(needs, Refusal) else self._put(needs)
            for user in node.users:
                if not self.may_hold(user):
                    continue
                result = result_heads(user, node, dim, self.count)
                if isinstance(result, HeadDim):
                    stack += self._put({user: result})
                elif result == SUM:
                    stack += self._put(summed_heads(user, node, dim))

    def may_hold(self, node: fx.Node) -> bool:
        """Whether the node holds features that others hold too; constants may serve several."""
        return node in self.facts.specs and not ops.is_constant(node)

    def _put(self, dims: OperandSpecs) -> list[fx.Node]:
        """Record the dims; returns the nodes that are new."""
        new = []
        for node, dim in dims.items():
            if not isinstance(dim, HeadDim) or ops.is_constant(node):
                continue
            if node not in self.held:
                self.held[node] = dim
                new.append(node)
            elif self.held[node] != dim and self.may_hold(node):
                raise CannotTake(node, "holds the features in two dims")
        return new


# ---- what a section is computed from -------------------------------------------------------------
class _Growth:
    """Finds what the gradients of a section are computed from, from the gradients backwards."""

    def __init__(self, facts: RegionFacts, features: _Features, fused: bool):
        self.facts, self.features, self.fused = facts, features, fused
        self.outputs: dict[fx.Node, HeadDim | None] = {}
        self.held: dict[fx.Node, HeadDim | None] = {}  # None: a sum over the features
        self.inputs: set[tuple[fx.Node, Spec]] = set()
        self.per_token: set[fx.Node] = set()

    def grow(self) -> None:
        """Add the gradients with features, and those that are sums over them.

        Raises:
            CannotTake: a section needs a wide value of all features.
        """
        facts, features = self.facts, self.features
        leaving = [n for n in facts.outputs if n in facts.backward]
        # a gradient with tokens and features is wide
        self.outputs = {n: features.held[n] for n in leaving if n in features.held}
        self.outputs = {n: dim for n, dim in self.outputs.items() if facts.specs[n] is None}
        if not self.outputs:
            first = next(iter(facts.specs))
            raise CannotTake(first, "no gradient of a weight holds features")
        self.held = dict(self.outputs)
        self._pull(self.outputs)
        if self.fused:
            return
        for node in leaving:
            if node not in self.outputs:
                self._provide(node, sums=True)
        self._join_sums()

    def _pull(self, nodes: Iterable[fx.Node]) -> None:
        """Add what these members are computed from."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            for operand, needed in self._needs(node).items():
                if not isinstance(needed, HeadDim):
                    self._read_whole(operand)
                elif not self._computes(operand, needed):
                    self.inputs.add((operand, needed))
                elif operand not in self.held:
                    self.held[operand] = needed
                    stack.append(operand)
                elif self.held[operand] != needed:
                    raise CannotTake(operand, "is read along several dims")
            self.inputs.update((size, WHOLE) for size in node.all_input_nodes if is_size(size))

    def _computes(self, node: fx.Node, needed: HeadDim) -> bool:
        """Whether the loop computes a value; constants that differ by place are cut, as inputs."""
        if not ops.is_constant(node):
            return self.features.may_hold(node)
        known = self.held.get(node, needed) == needed
        made = operand_heads(node, needed, self.features.count)
        return node in self.facts.specs and known and not isinstance(made, Refusal)

    def _needs(self, node: fx.Node) -> OperandSpecs:
        held = self.held[node]
        if held is None:
            return self._summed(node)
        needs = operand_heads(node, held, self.features.count)
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason.replace("heads", "features"))
        return needs

    def _summed(self, node: fx.Node) -> OperandSpecs:
        """Where the operands of a sum over the features hold them.

        Raises:
            CannotTake: it is no such sum.
        """
        for operand in node.all_input_nodes:
            dim = self.features.held.get(operand)
            if dim is not None:
                result = result_heads(node, operand, dim, self.features.count)
                if result == SUM:
                    return summed_heads(node, operand, dim)
        raise CannotTake(node, "a section needs it, and it needs all features")

    def _read_whole(self, node: fx.Node) -> None:
        """A value without features that a section reads."""
        if self._is_wide(node):
            raise CannotTake(node, "every section needs all of it")
        self.inputs.add((node, WHOLE))
        self._provide(node, sums=False)

    def _provide(self, node: fx.Node, sums: bool) -> None:
        """A value that is computed outside of loops, from what these return.

        Args:
            sums: the loop over sections may return a part of it, as a sum over the features.
        """
        stack = [node]
        while stack:
            other = stack.pop()
            if other not in self.facts.specs or other in self.per_token or other in self.held:
                continue
            operands = other.all_input_nodes
            if other.target is operator.getitem:  # of an op with several results, such as max
                operands = operands[0].all_input_nodes
            if not any(map(self._is_wide, operands)):
                stack += operands
            elif self.fused or other not in self.facts.backward:
                self.per_token.add(other)
            elif sums:
                self.held[other] = self.outputs[other] = None
                self._pull([other])
            else:
                raise CannotTake(other, "is a sum over all features that every section needs")

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether the value is too large to exist for all tokens and all features."""
        if node not in self.facts.specs:
            return False
        return node in self.features.held or self.facts.is_widest(node)

    def _join_sums(self) -> None:
        """Add up what adds up several sums, so that the loop returns one of them."""
        sums = {node for node, dim in self.outputs.items() if dim is None}
        self.held.update(dict.fromkeys(sums_of_sums(self.facts.joint, sums, self.held.keys())))
        for node in [n for n, dim in self.held.items() if dim is None]:
            if any(user not in self.held for user in node.users):
                self.outputs[node] = None
            else:
                self.outputs.pop(node, None)

    # ---- the loop ------------------------------------------------------------------------------
    def sections(self) -> Sections:
        joint = self.facts.joint
        members = joint.sorted(self.held)
        outputs = joint.sorted(self.outputs)
        inputs = sorted(self.inputs, key=lambda pair: (joint.index[pair[0]], pair[1]))
        loop = LoopPlan(
            phase="backward",
            members=tuple(node.name for node in members),
            specs=tuple(self.held[node] for node in members),
            inputs=tuple(LoopInput(node.name, spec) for node, spec in inputs),
            outputs=tuple(LoopOutput(node.name, self.outputs[node]) for node in outputs),
        )
        per_token = tuple(joint.sorted(self.per_token))
        return Sections(loop, tuple(outputs), per_token, self.features.count)
