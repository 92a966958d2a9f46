"""The gradient of a head's weight, in a loop over sections of the vocabulary.

A loop over tokens sums the weight's gradient, often in float32: with few tokens that takes as
much memory as the logits. The gradient's rows belong to the words of the vocabulary, so a loop
over sections of it writes each row once, by one product over all tokens::

    forward, over tokens       loss, the gradient of the hidden states, and per token what the
                               gradient needs of the whole row: its maximum, its sum of exponentials
    backward, over sections    the section's logits again -> their gradient -> rows of the weight's

It is four products in place of three, and no sum over chunks. What the loop over sections reads
that holds no words is computed outside of loops, from what the loop over tokens returns.
"""

from __future__ import annotations

import dataclasses
import math
import operator

from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import FEATURES
from mstpass.graph.heads import HeadDim, operand_heads
from mstpass.graph.joint import value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.loops.region_facts import RegionFacts
from mstpass.plans import Chunks, LoopInput, LoopOutput, LoopPlan

_SECTIONS = 32  # at least, if they are no shorter than a block
_BLOCK, _LONGEST = 128, 4096  # words


@dataclasses.dataclass(frozen=True)
class Sections:
    """The loop over sections, and what the loop over tokens computes for it.

    Attributes:
        gradients: the outputs of the region that the loop over sections computes.
        per_token: members that the loop over tokens returns besides its other outputs.
    """

    loop: LoopPlan
    gradients: tuple[fx.Node, ...]
    per_token: tuple[fx.Node, ...]


def sections_of(facts: RegionFacts) -> Sections | Refusal:
    """The loop over sections of a head's vocabulary, or why there is none."""
    region = facts.region
    if not region.fused or any(facts.rounds.values()):
        return Refusal("only a loss that one loop over tokens computes has sections")
    seeds = {node: dim for node in facts.outputs if (dim := _words_dim(facts, node)) is not None}
    if not seeds:
        return Refusal("no gradient has a dim of words")
    growth = _Growth(facts, seeds)
    refusal = growth.grow()
    if refusal is not None:
        return refusal
    return Sections(growth.loop(), tuple(seeds), tuple(facts.joint.sorted(growth.per_token)))


def _words_dim(facts: RegionFacts, node: fx.Node) -> HeadDim | None:
    """The dim of the words in a sum over tokens, such as the gradient of a weight or of a bias."""
    value = value_of(node)
    if facts.specs[node] is not None or node not in facts.backward or value is None:
        return None
    dims = [d for d, size in enumerate(value.shape) if size == facts.region.width]
    return HeadDim(dims[0]) if len(dims) == 1 else None


class _Growth:
    """Finds what the gradients of a section are computed from, from the gradients backwards."""

    def __init__(self, facts: RegionFacts, seeds: dict[fx.Node, HeadDim]):
        self.facts, self.seeds = facts, seeds
        self.held: dict[fx.Node, HeadDim] = dict(seeds)
        self.inputs: set[tuple[fx.Node, Spec]] = set()
        self.per_token: set[fx.Node] = set()

    def grow(self) -> Refusal | None:
        stack = list(self.seeds)
        while stack:
            node = stack.pop()
            needs = operand_heads(node, self.held[node], self.facts.region.width)
            if isinstance(needs, Refusal):
                return Refusal(f"{node.name}: {needs.reason.replace('heads', 'words')}")
            for operand, needed in needs.items():
                if not isinstance(needed, HeadDim):
                    refusal = self._read_whole(operand)
                    if refusal is not None:
                        return refusal
                elif not self._is_member(operand):
                    self.inputs.add((operand, needed))
                elif self.held.setdefault(operand, needed) != needed:
                    return Refusal(f"{operand.name} holds the words in two dims")
                else:
                    stack.append(operand)
            self.inputs.update((size, WHOLE) for size in node.all_input_nodes if is_size(size))
        return None

    def _is_member(self, node: fx.Node) -> bool:
        """Whether the loop computes the node; constants of all words are cut, as inputs are."""
        return node in self.facts.specs and not ops.is_constant(node)

    def _read_whole(self, node: fx.Node) -> Refusal | None:
        """A value without words: it is computed outside of loops, from what these return."""
        if self._is_wide(node):
            return Refusal(f"a section needs all of {node.name}")
        self.inputs.add((node, WHOLE))
        stack = [node]
        while stack:
            other = stack.pop()
            if other not in self.facts.specs or other in self.per_token:
                continue
            operands = other.all_input_nodes
            if other.target is operator.getitem:  # of an op with several results, such as max
                operands = operands[0].all_input_nodes
            if any(map(self._is_wide, operands)):
                self.per_token.add(other)
            else:
                stack += operands
        return None

    def _is_wide(self, node: fx.Node) -> bool:
        return node in self.facts.specs and self.facts.is_wide(node)

    def loop(self) -> LoopPlan:
        joint, words = self.facts.joint, self.facts.region.width
        members = joint.sorted(self.held)
        inputs = sorted(self.inputs, key=lambda pair: (joint.index[pair[0]], pair[1]))
        return LoopPlan(
            phase="backward",
            members=tuple(node.name for node in members),
            specs=tuple(self.held[node] for node in members),
            inputs=tuple(LoopInput(node.name, spec) for node, spec in inputs),
            outputs=tuple(
                LoopOutput(node.name, self.seeds[node]) for node in joint.sorted(self.seeds)
            ),
            chunks=_sections(words),
        )


def _sections(words: int) -> Chunks:
    """Sections of whole blocks of words; the last one may overlap the one before it."""
    blocks = math.ceil(words / _SECTIONS / _BLOCK)
    length = min(words, blocks * _BLOCK, _LONGEST)
    return Chunks(FEATURES, words, length, -(-words // length))
