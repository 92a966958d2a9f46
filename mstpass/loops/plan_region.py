"""From a region to its loops: the mode, the values to keep, and the chunk length.

Chunk length: the longest for which one chunk's intermediates stay below what the region must hold
anyway (its gradients, inputs and stacked outputs), but never so short that matrix products lose
efficiency. Chunks are made equal; the last overlaps the one before it where the tokens do not
divide, its repeated rows are masked out of every sum. A symbolic token count has chunks that the
loop makes equal for each batch; the length chosen here is the most they may hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.checkpoint_tags import tag_of
from mstpass.graph.cost import total_flops
from mstpass.graph.device_costs import GOOD, TOLERABLE, ChunkCosts, costs_of
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of, value_of
from mstpass.graph.sizes import generic_shape
from mstpass.graph.tokens import WHOLE, Refusal, Spec, Sum, token_count
from mstpass.options import Options
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.plans import (
    FUSED,
    RECOMPUTE,
    SAVE,
    ChunkPlan,
    LoopInput,
    LoopOutput,
    LoopPlan,
    Region,
    Rejection,
)
from mstpass.problem.problem import MUST_SAVE, RECOMPUTED, CutProblem, Value

_TRANSIENT_SHARE = 0.5
# Time of a loop whose last chunk overlaps: masks leave repeated rows out of its sums. A head of
# d=256, V=32000, N=2048 took 1.08 times Inductor's time in 6 chunks of 342 rows, 1.04 in 8 of 256
# and in 4 of 512 (medians of 15 rounds, 2 CPU cores, 2026-11-21).
_OVERLAP = 0.05


def plan_region(
    facts: Facts,
    options: Options,
    mode: str,
    repeat: frozenset[str] = frozenset(),
    short: bool = False,
) -> ChunkPlan | Rejection:
    """The loops of a region in a mode, or why it stays as it is.

    Args:
        short: chunks as short as products bear, for the least memory.
        repeat: matmuls that backward may redo in save mode. With nothing left to save the mode
            becomes recompute; with something that the user's checkpointing must save, save.
    """
    region = facts.region
    found = facts.loops(mode, repeat)
    kept = {*found.saved, *(facts.joint.by_name[name] for name in region.returned)}
    chunk_tokens = _chunk_tokens(facts, options, found, short)
    if isinstance(chunk_tokens, Refusal):
        return Rejection("plan", region.name, chunk_tokens.reason, region.source, facts.before)
    num_chunks = math.ceil(region.num_tokens / chunk_tokens)
    share = min(1.0, chunk_tokens / region.num_tokens)
    after = sum(map(nbytes, kept)) + int(facts.before * share)
    if not region.symbolic and options.chunk_tokens is None and after >= facts.before:
        reason = f"{num_chunks} chunks would hold as much memory as the whole"
        if region.returned:
            reason = f"{region.note.partition(';')[0]}: {reason}"
        return Rejection("plan", region.name, reason, region.source, facts.before)
    return ChunkPlan(
        kind=region.kind,
        mode=found.mode,
        source=region.source,
        num_tokens=region.num_tokens,
        chunk_tokens=chunk_tokens,
        num_chunks=num_chunks,
        bytes_before=facts.before,
        bytes_after=after,
        loops=found.loops,
        saved=tuple(n.name for n in found.saved),
        members=region.members,
        note=region.note,
        symbolic=region.symbolic,
    )


@dataclasses.dataclass(frozen=True)
class _Loops:
    """A region's loops, whatever their chunks.

    Attributes:
        transient_bytes: of the large intermediates at full length.
        held_bytes: what is held in any case.
    """

    mode: str
    saved: tuple[fx.Node, ...]
    loops: tuple[LoopPlan, ...]
    transient_bytes: int
    held_bytes: int


class Facts:
    """What all plans of a region share, looked up once."""

    def __init__(self, joint: JointGraph, region: Region):
        self.joint, self.region = joint, region
        self.specs: dict[fx.Node, Spec | None] = {
            joint.by_name[name]: spec for name, spec in region.members
        }
        self.outputs = [joint.by_name[name] for name in region.outputs]
        self.backward = {joint.by_name[name] for name in region.backward}
        self.generic_tokens = next(
            token_count(generic_shape(value), spec)
            for node, spec in self.specs.items()
            if spec
            for value in tensors_of(node.meta["val"])
        )
        self.large = [n for n in self.specs if self._materialized(n)]
        self.products = [n for n in self.large if op_table.is_matmul(n)]
        # Inductor writes a product's gradient over it, unless the step returns the product.
        self.before = sum(map(nbytes, self.large if region.returned else self.products))
        self.flops_per_row = total_flops(self.specs) / region.num_tokens
        self._needs: dict[fx.Node, dict[fx.Node, Spec]] = {}
        self._loops: dict[tuple[str, frozenset[str]], _Loops] = {}

    def _materialized(self, node: fx.Node) -> bool:
        """Large values that an unfused kernel reads or writes, once per storage."""
        spec = self.specs[node]
        if not spec or op_table.is_view(node) or not self._is_wide(node):
            return False
        return op_table.is_matmul(node) or any(map(op_table.is_matmul, op_table.readers(node)))

    def _is_wide(self, node: fx.Node) -> bool:
        return numel(node) * 4 >= self.region.width * self.generic_tokens

    def held_bytes(self, node: fx.Node) -> int:
        """Bytes that a chunk may be measured by; logits that are returned are no such measure."""
        return 0 if self.region.returned and self._is_wide(node) else nbytes(node)

    def loops(self, mode: str, repeat: frozenset[str]) -> _Loops:
        """The loops in a mode; ``repeat`` as in ``plan_region``."""
        if (mode, repeat) not in self._loops:
            self._loops[mode, repeat] = self._make_loops(mode, repeat)
        return self._loops[mode, repeat]

    def _make_loops(self, mode: str, repeat: frozenset[str]) -> _Loops:
        saved: list[fx.Node] = []
        if mode == FUSED:
            unit, prelude = self.region.unit, self.region.prelude
            loops = [_loop(self, "forward", self.outputs, set(), unit, prelude)]
        else:
            every = frozenset(node.name for node in self.specs)
            saved = _saved(self, repeat if mode == SAVE else every)
            mode = SAVE if saved else RECOMPUTE
            loops = _two_loops(self, saved)
        return _Loops(mode, tuple(saved), tuple(loops), *_footprint(self, loops))

    def needs(self, node: fx.Node) -> dict[fx.Node, Spec]:
        """The spec that a member needs of each operand."""
        if node not in self._needs:
            self._needs[node] = self._make_needs(node)
        return self._needs[node]

    def _make_needs(self, node: fx.Node) -> dict[fx.Node, Spec]:
        spec = self.specs[node]
        if spec is None:
            for operand in node.all_input_nodes:
                if self.specs.get(operand):
                    needs = op_table.sum_operands(node, operand, self.specs[operand] or WHOLE)
                    break
        else:
            needs = op_table.operand_specs(node, spec)
        assert not isinstance(needs, Refusal | Sum), (node, needs)
        return needs


def preferred_mode(region: Region, options: Options) -> str:
    """The mode that costs no time, unless the budget asks for the least memory."""
    if region.fused:
        return FUSED
    if region.returned:
        return SAVE  # what the step returns is there anyway
    if region.kind == "lm_head" or options.memory_budget == 0.0:
        return RECOMPUTE
    return SAVE


def _two_loops(facts: Facts, saved: list[fx.Node]) -> list[LoopPlan]:
    forward = [n for n in facts.outputs if n not in facts.backward]
    backward = [n for n in facts.outputs if n in facts.backward]
    loops = [_loop(facts, "forward", [*forward, *(s for s in saved if s not in forward)], set())]
    if backward:
        loops.append(_loop(facts, "backward", backward, set(saved)))
    return loops


def _loop(
    facts: Facts,
    phase: str,
    outputs: list[fx.Node],
    available: set[fx.Node],
    unit: str | None = None,
    prelude: tuple[str, ...] = (),
) -> LoopPlan:
    """The members that the outputs need, down to the available values and the region's inputs."""
    members: set[fx.Node] = set()
    inputs: dict[tuple[fx.Node, Spec], None] = {}
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in members:
            continue
        members.add(node)
        for operand, spec in facts.needs(node).items():
            if operand.name == unit:
                continue
            # of other tokens than the member: a constant that is read whole and in rows
            if facts.specs.get(operand) == spec and operand not in available:
                stack.append(operand)
            else:
                inputs[operand, spec] = None
        inputs |= dict.fromkeys((size, WHOLE) for size in op_table.size_operands(node))
    ordered = sorted(inputs, key=lambda pair: (facts.joint.index[pair[0]], pair[1]))
    return LoopPlan(
        phase=phase,
        members=tuple(n.name for n in facts.joint.sorted(members)),
        inputs=tuple(LoopInput(n.name, spec) for n, spec in ordered),
        outputs=tuple(
            LoopOutput(n.name, facts.specs[n], scaled=unit is not None and n in facts.backward)
            for n in facts.joint.sorted(outputs)
        ),
        unit=unit,
        prelude=prelude,
    )


def _saved(facts: Facts, repeat: Set[str]) -> list[fx.Node]:
    """The least bytes to keep of the forward so that backward redoes no matmul but ``repeat``.

    What the user's checkpointing wants recomputed is not kept, what it saves is not redone.
    """
    forward = [n for n in facts.joint.sorted(facts.specs) if n not in facts.backward]
    names = {n.name for n in forward}
    values = []
    for node in forward:
        spec, tag = facts.specs[node], tag_of(node)
        own = bool(spec) and not op_table.is_view(node) and value_of(node) is not None
        values.append(
            Value(
                name=node.name,
                bytes=0 if node.name in facts.region.returned else nbytes(node),
                inputs=tuple(i.name for i in node.all_input_nodes if i.name in names),
                heavy=op_table.is_matmul(node) and node.name not in repeat,
                pinned=own and tag == MUST_SAVE,
                savable=own and tag not in RECOMPUTED,
                needed=any(u in facts.backward for u in node.users),
                tag=tag if own or tag != MUST_SAVE else "",
            )
        )
    chosen = min_cut(CutProblem(tuple(values)))
    return [n for n in forward if n.name in chosen]


def _footprint(facts: Facts, loops: list[LoopPlan]) -> tuple[int, int]:
    """Bytes of the large intermediates at full length, and bytes that are held in any case."""
    by_name = facts.joint.by_name
    transient = max(sum(nbytes(n) for n in facts.large if n.name in loop.members) for loop in loops)
    held = max(
        sum(map(facts.held_bytes, (by_name[o.node] for o in loop.outputs)))
        + sum(facts.held_bytes(by_name[i.node]) for i in loop.inputs if i.spec)
        for loop in loops
    )
    return transient, held


def _chunk_tokens(facts: Facts, options: Options, loops: _Loops, short: bool) -> int | Refusal:
    region = facts.region
    tokens = region.num_tokens
    if options.chunk_tokens is not None:
        if options.chunk_tokens >= tokens and not region.symbolic:
            return Refusal(
                f"{tokens} tokens fit in one chunk of chunk_tokens={options.chunk_tokens}"
            )
        return options.chunk_tokens
    device = next(tensors_of(facts.joint.by_name[region.name].meta["val"])).device
    costs = costs_of(device)
    least = costs.least_rows(math.inf, TOLERABLE)
    good = max(least, costs.least_rows(facts.flops_per_row, GOOD))
    share = _TRANSIENT_SHARE
    if short:
        good, share = least, share / 2
    if region.symbolic and tokens < 2 * good:
        return good  # nothing to learn from this batch; a later one may be long
    if tokens < 2 * least:
        return Refusal(
            f"{tokens} tokens are fewer than two chunks of {least} rows, below which "
            f"matrix products on {device.type} lose speed"
        )
    wanted = int(tokens * share * loops.held_bytes / max(1, loops.transient_bytes))
    num_chunks = min(math.ceil(tokens / max(1, wanted)), tokens // good)
    num_chunks = max(2, num_chunks)
    if not region.symbolic:
        num_chunks = _divisor(facts, costs, num_chunks, least)
    return math.ceil(tokens / num_chunks)


def _divisor(facts: Facts, costs: ChunkCosts, num_chunks: int, least_rows: int) -> int:
    """A few more chunks where that makes them equal: no overlap, no masks.

    Else the count as it is: the last chunk overlaps the others by less than a row each.
    """
    tokens = facts.region.num_tokens

    def time(count: int) -> float:
        return costs.relative_time(math.ceil(tokens / count), facts.flops_per_row)

    limit = time(num_chunks) + _OVERLAP
    most = min(num_chunks * 4 // 3, tokens // least_rows)
    equal = (n for n in range(num_chunks, most + 1) if tokens % n == 0 and time(n) <= limit)
    return next(equal, num_chunks)
