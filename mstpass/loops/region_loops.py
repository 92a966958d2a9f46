"""The loops of a region in one mode: what each computes, reads and returns, for any chunk length.

    fused:      one loop computes all outputs, gradients included
    mixed:      the forward loops of one of the others, without what backward needs, and a backward
                loop over sections of the features (sections.py)
    recompute:  a forward loop, and a backward loop that computes the forward again from its inputs
    save:       the same, but the forward loop also returns the values of loops/region_loops.py,
                stacked over chunks, and the backward loop reads them

Where a value needs what is complete only after a loop, its phase is several loops: *rounds*
(region_facts.py).

A loop's members are found from its outputs backwards: an operand in the same token dims is computed
in the loop as well, every other operand is an input of the loop.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention, is_attention_item, is_product
from mstpass.graph.axes import QUERIES, TOKENS
from mstpass.graph.joint import nbytes, numel, value_of
from mstpass.graph.recompute_rules import tag_of
from mstpass.graph.sizes import same_shape
from mstpass.graph.tokens import WHOLE, Spec
from mstpass.loops.operand_layout import is_copied
from mstpass.loops.region_facts import RegionFacts, loop_plan
from mstpass.loops.sections import Sections
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.plans import LoopInput, LoopOutput, LoopPlan
from mstpass.problem.problem import (
    FUSED,
    MIXED,
    MUST_SAVE,
    RECOMPUTE,
    RECOMPUTED,
    SAVE,
    CutProblem,
    Value,
)


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
        loops = _loops(facts, "forward", facts.outputs)
    elif mode == MIXED:
        assert sections is not None, "the sections are known"
        apart = sections.gradients if facts.region.fused else facts.backward
        others = [node for node in facts.outputs if node not in apart]
        loops = _loops(facts, "forward", _unique(others, sections.per_token))
    else:
        every = frozenset(node.name for node in facts.specs)
        saved = values_to_save(facts, may_recompute if mode == SAVE else every)
        mode = SAVE if saved else RECOMPUTE
        forward = [node for node in facts.outputs if node not in facts.backward]
        gradients = [node for node in facts.outputs if node in facts.backward]
        loops = _loops(facts, "forward", _unique(forward, saved))
        loops += _loops(facts, "backward", gradients, saved)
        if facts.region.axis == QUERIES:
            loops = with_results_over_operands(facts, loops)
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


def _loops(
    facts: RegionFacts, phase: str, outputs: Iterable[fx.Node], saved: Iterable[fx.Node] = ()
) -> list[LoopPlan]:
    """The rounds of a phase that compute these outputs; each reads what those before return for it.

    The last one of the forward has gradients, of a fused region.
    """
    region, in_backward, round_of = facts.region, phase == "backward", facts.rounds
    early: Set[fx.Node] = facts.early | facts.handed_on
    if in_backward:
        outputs = _unique(outputs, facts.joint.sorted(facts.handed_on))
    else:
        early = _with_free_outputs(facts, facts.early - facts.backward)
    computed = (n for n in round_of if region.fused or (n in facts.backward) == in_backward)
    last = max(map(round_of.__getitem__, computed), default=0)
    by_round: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in outputs:
        by_round[round_of[node] if node in early else last].append(node)
    loops = []
    for number, of_round in sorted(by_round.items()):
        before = {n for n in facts.handed_on if in_backward and round_of[n] < number}
        unit = (region.unit, region.prelude) if number == max(by_round) else ()
        loops.append(_loop(facts, phase, of_round, {*saved, *before}, *unit))
    return loops


def _unique(outputs: Iterable[fx.Node], more: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys((*outputs, *more)))


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
    members, inputs = _members_and_inputs(facts, outputs, saved, unit)
    specs = {node: facts.specs[node] for node in members}
    returned = (_output(facts, node, unit) for node in facts.joint.sorted(outputs))
    return loop_plan(facts.joint, phase, specs, inputs, returned, unit=unit, prelude=prelude)


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


# ---- values to save ----------------------------------------------------------------------------
# Which values of a region's forward its backward loop reads from memory: a minimum s-t cut.
#
# From the saved values and the region's inputs, the backward must be able to compute every forward
# value that it reads, without a product other than those that it may compute again. Of all sets of
# values that allow this, the cut is the one of the fewest bytes.
def values_to_save(facts: RegionFacts, may_recompute: Set[str]) -> list[fx.Node]:
    """The values to save, in the graph's order.

    Args:
        may_recompute: names of the products that the backward may compute again. The user's
            checkpointing comes first: what it recomputes is never saved, what it saves is never
            recomputed.
    """
    forward = [node for node in facts.joint.sorted(facts.specs) if node not in facts.backward]
    names = {node.name for node in forward}
    values = [_value(facts, node, names, may_recompute) for node in forward]
    saved = min_cut(CutProblem(tuple(values)))
    return [node for node in forward if node.name in saved]


def _value(facts: RegionFacts, node: fx.Node, names: Set[str], may_recompute: Set[str]) -> Value:
    tag = tag_of(node)
    is_result = is_attention_item(node) or not ops.is_view(node)
    has_storage = is_result and value_of(node) is not None
    is_sliced = bool(facts.specs[node]) and has_storage
    return Value(
        name=node.name,
        bytes=0 if node.name in facts.region.returned else nbytes(node),
        inputs=tuple(i.name for i in node.all_input_nodes if i.name in names),
        heavy=is_product(node) and node.name not in may_recompute,
        pinned=is_sliced and tag == MUST_SAVE,
        savable=is_sliced and tag not in RECOMPUTED,
        needed=any(user in facts.backward for user in node.users),
        tag=tag if is_sliced or tag != MUST_SAVE else "",
    )


# ---- results over operands ---------------------------------------------------------------------
# Which results of a loop are written over one of its operands (graph/loop_op.py).
#
# In the backward of a block the loop over queries reads the gradient of the block's output, and
# returns that of its input as far as it is known then; the next loop reads this, and returns the
# whole one (normalize/for_heads.py). All three have the same rows, and each has one
# reader.
def with_results_over_operands(facts: RegionFacts, loops: Sequence[LoopPlan]) -> list[LoopPlan]:
    """The loops, with the operands that stacked results of the backward are written over."""
    readers = Counter(n for loop in loops for n in {item.node for item in loop.inputs})
    return [
        _over(facts, loop, [i for i in loop.inputs if i.spec and readers[i.node] == 1])
        if loop.phase == "backward"
        else loop
        for loop in loops
    ]


def _over(facts: RegionFacts, loop: LoopPlan, alone: Iterable[LoopInput]) -> LoopPlan:
    """The loop, with results over what no other loop reads."""
    free = [item for item in alone if _is_read_inside(facts, item)]
    outputs: list[LoopOutput] = []
    for output in loop.outputs:
        operand = next((item for item in free if _are_alike(facts, item, output)), None)
        if operand is not None:
            free.remove(operand)
            output = dataclasses.replace(output, over=operand.node)
        outputs.append(output)
    outputs.sort(key=lambda output: bool(output.over))  # they are written last
    return dataclasses.replace(loop, outputs=tuple(outputs))


def _is_read_inside(facts: RegionFacts, item: LoopInput) -> bool:
    """Whether nothing but the region reads a value of the backward, whose rows need no copy."""
    node = facts.joint.by_name[item.node]
    base, value = ops.base_of(node), value_of(node)
    return (
        node in facts.joint.backward
        and base.op == "call_function"
        and value is not None
        and numel(base) == numel(node)
        and not is_copied(value, item.spec)
        and all(reader in facts.specs for reader in ops.readers_through_views(base))
    )


def _are_alike(facts: RegionFacts, item: LoopInput, output: LoopOutput) -> bool:
    operand, result = (facts.joint.by_name[n].meta["val"] for n in (item.node, output.node))
    of_one_dtype = output.spec == item.spec and operand.dtype == result.dtype
    return of_one_dtype and same_shape(operand.shape, result.shape)
