"""The loops of a region in one mode: what each computes, reads and returns, for any chunk length.

    fused:      one loop computes all outputs, gradients included
    mixed:      the forward loops of one of the others, without what backward needs, and a backward
                loop over sections of the features (sections.py)
    recompute:  a forward loop, and a backward loop that computes the forward again from its inputs
    save:       the same, but the forward loop also returns the values of loops/values_to_save.py,
                stacked over chunks, and the backward loop reads them

Where a value needs what is complete only after a loop, its phase is several loops (rounds.py).

A loop's members are found from its outputs backwards: an operand in the same token dims is computed
in the loop as well, every other operand is an input of the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.axes import QUERIES, TOKENS
from mstpass.graph.joint import nbytes
from mstpass.graph.tokens import WHOLE, Spec
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.results_over_operands import with_results_over_operands
from mstpass.loops.rounds import outputs_by_round
from mstpass.loops.sections import Sections
from mstpass.loops.values_to_save import values_to_save
from mstpass.plans import LoopInput, LoopOutput, LoopPlan
from mstpass.problem.problem import FUSED, MIXED, RECOMPUTE, SAVE


@dataclasses.dataclass(frozen=True)
class RegionLoops:
    """The loops of a region in one mode.

    Attributes:
        saved: the values that the forward loop stacks for the backward loop.
        buffered_bytes: size of a loop's buffered values at full length (loops/region_facts.py), of
            the loop with the most.
        stacked_bytes: size of a loop's sliced inputs and its outputs, of the loop with the most.
            They exist at full length whatever the chunk length.
    """

    mode: str
    saved: tuple[fx.Node, ...]
    loops: tuple[LoopPlan, ...]
    buffered_bytes: int
    stacked_bytes: int

    def summing(self, accumulate: str) -> RegionLoops:
        """The same loops with their sums over chunks in another dtype."""
        loops = (dataclasses.replace(loop, accumulate=accumulate) for loop in self.loops)
        return dataclasses.replace(self, loops=tuple(loops))


def region_loops(
    facts: RegionFacts,
    mode: str,
    may_recompute: frozenset[str],
    sections: Sections | None = None,
) -> RegionLoops:
    """The loops of a region in a mode.

    Args:
        may_recompute: names of matmuls that backward may compute again in save mode. If no value
            is left to save, the mode becomes recompute. In recompute mode backward may compute all
            of them again; if the user's checkpointing saves one, the mode becomes save.
        sections: the backward loop of mixed mode. It is none of the result's loops, which run
            over tokens.
    """
    saved: list[fx.Node] = []
    if mode == FUSED:
        loops = _fused_loops(facts)
    elif mode == MIXED:
        assert sections is not None, "the sections are known"
        loops = _forward_loops_of_mixed(facts, sections)
    else:
        every = frozenset(node.name for node in facts.specs)
        saved = values_to_save(facts, may_recompute if mode == SAVE else every)
        mode = SAVE if saved else RECOMPUTE
        loops = _forward_and_backward_loop(facts, saved)
    buffered_bytes = max(
        sum(nbytes(node) for node in facts.buffered if node.name in loop.members) for loop in loops
    )
    stacked_bytes = max(_stacked_bytes(facts, loop) for loop in loops)
    return RegionLoops(mode, tuple(saved), tuple(loops), buffered_bytes, stacked_bytes)


def _stacked_bytes(facts: RegionFacts, loop: LoopPlan) -> int:
    names = [item.node for item in loop.outputs]
    names += [item.node for item in loop.inputs if item.spec]
    nodes = map(facts.joint.by_name.__getitem__, names)
    # Wide values that the step itself returns are no measure for what a chunk may hold.
    returns_wide = bool(facts.region.returned)
    return sum(0 if returns_wide and facts.is_wide(node) else nbytes(node) for node in nodes)


def _fused_loops(facts: RegionFacts) -> list[LoopPlan]:
    return _loops_in_forward(facts, facts.outputs)


def _forward_loops_of_mixed(facts: RegionFacts, sections: Sections) -> list[LoopPlan]:
    apart = sections.gradients if facts.region.fused else facts.backward
    others = [node for node in facts.outputs if node not in apart]
    return _loops_in_forward(facts, _unique(others, sections.per_token))


def _loops_in_forward(facts: RegionFacts, outputs: list[fx.Node]) -> list[LoopPlan]:
    """The rounds that compute these outputs; the last one has gradients, of a fused region."""
    region = facts.region
    early = _with_free_outputs(facts, facts.early - facts.backward)
    numbers = {n: k for n, k in facts.rounds.items() if region.fused or n not in facts.backward}
    *earlier, last = outputs_by_round(numbers, outputs, early)
    return [
        *(_loop(facts, "forward", of_round, set()) for of_round in earlier),
        _loop(facts, "forward", last, set(), region.unit, region.prelude),
    ]


def _unique(outputs: Iterable[fx.Node], more: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys((*outputs, *more)))


def _forward_and_backward_loop(facts: RegionFacts, saved: list[fx.Node]) -> list[LoopPlan]:
    forward = [node for node in facts.outputs if node not in facts.backward]
    backward = [node for node in facts.outputs if node in facts.backward]
    more = [node for node in saved if node not in forward]
    of_forward = {n: k for n, k in facts.rounds.items() if n not in facts.backward}
    of_backward = {n: k for n, k in facts.rounds.items() if n in facts.backward}
    early = _with_free_outputs(facts, facts.early) | facts.handed_on
    returned = _unique(backward, facts.joint.sorted(facts.handed_on))
    loops = [
        *(
            _loop(facts, "forward", outputs, set())
            for outputs in outputs_by_round(of_forward, [*forward, *more], early)
        ),
        *(
            _loop(facts, "backward", outputs, {*saved, *_handed_on_to(facts, outputs)})
            for outputs in outputs_by_round(of_backward, returned, early)
        ),
    ]
    return with_results_over_operands(facts, loops) if facts.region.axis == QUERIES else loops


def _handed_on_to(facts: RegionFacts, outputs: list[fx.Node]) -> set[fx.Node]:
    """What earlier loops of the backward return for the loop of these outputs."""
    number = max(facts.rounds[node] for node in outputs)
    return {node for node in facts.handed_on if facts.rounds[node] < number}


def _with_free_outputs(facts: RegionFacts, early: Set[fx.Node]) -> Set[fx.Node]:
    """The early outputs, and sums that the loops of these find without another pass over tokens.

    Such a loop computes all products and reductions that the sum is made of. The label's logit of a
    column, for example, is found beside the column's maximum.
    """
    free: set[fx.Node] = set()
    for number in {facts.rounds[node] for node in facts.outputs if node in early}:
        of_round = [node for node in facts.outputs if facts.rounds[node] == number]
        known, _ = _members_and_inputs(facts, [n for n in of_round if n in early], set(), None)
        for node in of_round:
            if facts.specs[node] is None and node not in early | facts.backward:
                added = _members_and_inputs(facts, [node], set(), None)[0] - known - {node}
                if not any(ops.is_reduction(n) or ops.is_matmul(n) for n in added):
                    free.add(node)
    return early | free


def _loop(
    facts: RegionFacts,
    phase: str,
    outputs: list[fx.Node],
    saved: Set[fx.Node],
    unit: str | None = None,
    prelude: tuple[str, ...] = (),
) -> LoopPlan:
    """The loop that computes these outputs; it reads saved values instead of computing them."""
    joint, specs = facts.joint, facts.specs
    members, inputs = _members_and_inputs(facts, outputs, saved, unit)
    ordered = sorted(inputs, key=lambda pair: (joint.index[pair[0]], pair[1]))
    in_order = joint.sorted(members)
    return LoopPlan(
        phase=phase,
        members=tuple(node.name for node in in_order),
        specs=tuple(specs[node] for node in in_order),
        inputs=tuple(LoopInput(node.name, spec) for node, spec in ordered),
        outputs=tuple(_output(facts, node, unit) for node in joint.sorted(outputs)),
        unit=unit,
        prelude=prelude,
    )


def _output(facts: RegionFacts, node: fx.Node, unit: str | None) -> LoopOutput:
    relative = facts.exponentials.get(node)
    return LoopOutput(
        node.name,
        facts.specs[node],
        scaled=unit is not None and node in facts.backward,
        combine="sum" if facts.specs[node] else ops.row(node).combine,
        relative_to=relative.maximum.name if relative else "",
    )


def _members_and_inputs(
    facts: RegionFacts, outputs: list[fx.Node], saved: Set[fx.Node], unit: str | None
) -> tuple[set[fx.Node], set[tuple[fx.Node, Spec]]]:
    members: set[fx.Node] = set()
    inputs: set[tuple[fx.Node, Spec]] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in members:
            continue
        members.add(node)
        for operand, spec in facts.operand_specs(node).items():
            if operand.name == unit:
                continue
            # Other dims than the operand has as a member: a constant that is read both whole and in
            # slices.
            if operand in facts.specs and facts.specs[operand] == spec and operand not in saved:
                stack.append(operand)
            else:
                inputs.add((operand, spec or WHOLE))
        inputs.update((size, WHOLE) for size in facts.axis.size_operands(node))
    if facts.region.axis != TOKENS:  # of tokens, only a chunk's length may be symbolic
        crossing = {operand for operand, _ in inputs}.union(outputs)
        if facts.region.axis == QUERIES:  # but attention reads keys and values of all tokens
            crossing = {n for a in members if is_attention(a) for n in (a, *a.all_input_nodes)}
        inputs.update((size, WHOLE) for size in facts.joint.inputs_with_symbols_of(crossing))
    return members, inputs
