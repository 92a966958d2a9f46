"""Partition problems for tests.

``forwards`` draws random forwards, and ``steps`` random whole steps with regions; both are small
enough to try every plan. ``residual_stream`` is a deep step by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from mstpass.memory.simulate_plan import step_memory, step_us
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, INPUT, POINTWISE, REDUCTION, SCATTER, VIEW
from mstpass.problem.problem import (
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    Loop,
    LoopResult,
    Mode,
    Plan,
    RegionModes,
    Value,
    with_needs,
)
from mstpass.problem.saved_set import InvalidPlan, verify

KINDS = st.sampled_from([POINTWISE, POINTWISE, POINTWISE, REDUCTION, SCATTER, CALL, CALL])
TAGS = st.sampled_from(["", "", "", "", MUST_SAVE, *RECOMPUTED])
SIZES = st.integers(1, 20)
TIMES = st.integers(0, 9).map(float)


@st.composite
def forwards(draw: st.DrawFn) -> CutProblem:
    """Forward values that backward reads, without a backward."""
    values: list[Value] = []
    for i in range(draw(st.integers(2, 9))):
        inputs = (
            draw(st.lists(st.sampled_from([v.name for v in values]), max_size=3, unique=True))
            if values
            else []
        )
        values.append(
            Value(
                name=f"v{i}",
                bytes=draw(st.integers(1, 20)),
                inputs=tuple(inputs),
                free=not inputs and draw(st.booleans()),
                heavy=draw(st.booleans()),
                pinned=draw(st.booleans()),
                forward=draw(st.booleans()),
                savable=draw(st.booleans()) or not inputs,
                needed=draw(st.booleans()),
            )
        )
    return CutProblem(tuple(values), recompute_heavy=draw(st.booleans()))


@st.composite
def steps(draw: st.DrawFn, forward: int = 7, backward: int = 7, regions: int = 2) -> CutProblem:
    """A forward, a backward that reads it, and regions with loops in both."""
    values = [Value("x", draw(SIZES), kind=INPUT, free=True)]
    for i in range(draw(st.integers(2, forward))):
        values.append(_forward_value(draw, f"v{i}", values))
    ops = [Value("t", draw(SIZES), kind=INPUT)]
    for i in range(draw(st.integers(1, backward))):
        ops.append(_backward_op(draw, f"g{i}", values, ops))
    outputs = _some(draw, [v.name for v in values[1:]], least=1)
    gradients = _some(draw, [op.name for op in ops[1:]], least=1)
    count = draw(st.integers(0, regions))
    chosen = tuple(_region(draw, f"r{i}", i, count, values, ops, outputs) for i in range(count))
    return CutProblem(
        with_needs(values, ops, gradients),
        backward=tuple(ops),
        outputs=tuple(outputs),
        gradients=tuple(gradients),
        regions=tuple(region for region in chosen if region is not None),
    )


def _some(draw: st.DrawFn, names: list[str], least: int = 0, most: int = 3) -> list[str]:
    return draw(st.lists(st.sampled_from(names), min_size=least, max_size=most, unique=True))


def _forward_value(draw: st.DrawFn, name: str, values: list[Value]) -> Value:
    size = draw(SIZES)
    if draw(st.integers(0, 4)) == 0:
        base = draw(st.sampled_from(values))
        return Value(name, base.bytes, (base.name,), VIEW, savable=False)
    kind = draw(KINDS)
    tag = draw(TAGS)
    return Value(
        name,
        size,
        tuple(_some(draw, [v.name for v in values], least=draw(st.integers(0, 1)))),
        kind,
        inner_bytes=draw(st.integers(0, 5)) if kind == CALL else 0,
        slow=draw(st.booleans()),
        us=draw(TIMES),
        heavy=kind == CALL,
        pinned=tag == MUST_SAVE or (tag not in RECOMPUTED and draw(st.integers(0, 5)) == 0),
        savable=tag not in RECOMPUTED,
        forward=True,
        tag=tag,
    )


def _backward_op(draw: st.DrawFn, name: str, values: list[Value], ops: list[Value]) -> Value:
    first = draw(st.sampled_from(ops))
    if draw(st.integers(0, 5)) == 0:
        return Value(name, first.bytes, (first.name,), VIEW, savable=False)
    kind = draw(KINDS)
    others = _some(draw, [v.name for v in (*values, *ops) if v is not first], most=2)
    return Value(name, draw(SIZES), (first.name, *others), kind, slow=draw(st.booleans()), us=2.0)


def _region(
    draw: st.DrawFn,
    name: str,
    number: int,
    count: int,
    values: list[Value],
    ops: list[Value],
    outputs: list[str],
) -> RegionModes | None:
    """A region over the ``number``-th part of the forward and of the backward, or None."""
    parts = []
    for line in (values[1:], ops[1:]):
        low, high = len(line) * number // count, len(line) * (number + 1) // count
        start = draw(st.integers(low, high))
        parts.append(line[start : draw(st.integers(start, high))])
    modes = []
    for label in _some(draw, ["recompute", "save", "fused"], least=1):
        loops = [
            _loop(draw, f"{label}:{name}:{i}", part, values, label == "fused" and i == 1)
            for i, part in enumerate(parts)
            if part
        ]
        if loops:
            modes.append(Mode(label, tuple(loops)))
    if not modes:
        return None
    return RegionModes(name, (*modes, Mode("whole")) if draw(st.booleans()) else tuple(modes))


def _loop(
    draw: st.DrawFn,
    name: str,
    part: list[Value],
    values: list[Value],
    scaled: bool,
) -> Loop:
    """A loop in the place of consecutive ops; ``scaled``: its results are, by the tangent."""
    members = [v.name for v in part]
    needs = dict.fromkeys(n for v in part for n in v.inputs if n not in members)
    if scaled:
        needs = dict.fromkeys(n for n in needs if n in {v.name for v in values})
    results = _some(draw, members, least=1, most=len(members))
    return Loop(
        name,
        tuple(members),
        tuple(needs),
        tuple(LoopResult(n, draw(SIZES), "t" if scaled else "") for n in results),
        inner_bytes=draw(st.integers(0, 10)),
        us=draw(TIMES),
    )


def every_plan(problem: CutProblem) -> Iterator[tuple[Plan, int, float]]:
    """Each valid plan with its simulated peak and its time."""
    choices = [[(r.region, mode.name) for mode in r.modes] for r in problem.regions]
    for chosen in itertools.product(*choices):
        closed = with_modes(problem, dict(chosen)).allowing(recompute_heavy=True)
        savable = [v.name for v in closed.values if v.savable and not v.free]
        for size in range(len(savable) + 1):
            for names in itertools.combinations(savable, size):
                saved = frozenset(names)
                try:
                    verify(closed, saved)
                except InvalidPlan:
                    continue
                peak_bytes = step_memory(closed, saved).peak_bytes
                yield Plan(saved, dict(chosen)), peak_bytes, step_us(closed, saved)


def repeated_regions(count: int, inner_bytes: int = 0) -> CutProblem:
    """Equal regions in a row, each of which makes 10 bytes that backward reads.

    In its loops a region keeps its input in their place, a byte, and computes them again; a chunk
    needs ``inner_bytes``.
    """
    values, gradients = [Value("x0", 1, kind=INPUT)], [Value("g0", 1, kind=INPUT)]
    regions = []
    for i in range(count):
        wide, x, y = f"wide{i}", f"x{i}", f"x{i + 1}"
        values.append(Value(wide, 10, (x,), CALL, us=40.0, heavy=True))
        values.append(Value(y, 1, (wide,), CALL, us=1.0, heavy=True))
        before, g = f"g{count - 1 - i}", f"g{count - i}"
        forward = Loop(f"mst_loop_{y}", (wide, y), (x,), (LoopResult(y, 1),), inner_bytes, 41.0)
        again, result = (wide, g), (LoopResult(g, 1),)
        backward = Loop(f"mst_loop_{g}", again, (x, before), result, inner_bytes, 15.0)
        modes = (Mode("whole"), Mode("recompute", (forward, backward)))
        regions.append(RegionModes(f"r{i}", modes))
    for i in range(count):
        inputs = (f"g{i}", f"wide{count - 1 - i}")
        gradients.append(Value(f"g{i + 1}", 1, inputs, CALL, us=5.0))
    return CutProblem(
        with_needs(values, gradients, (f"g{count}",)),
        backward=tuple(gradients),
        outputs=(f"x{count}",),
        gradients=(f"g{count}",),
        regions=tuple(regions),
    )


def residual_stream(blocks: int, inner: int) -> CutProblem:
    """A residual stream x0, x1, ... through blocks of ``inner`` heavy values each, all of 10 bytes.

    Backward reads each value once, from the last to the first.
    """
    values = [Value("x0", 10, (), CALL)]
    gradients = [Value("g", 10, (), INPUT)]
    for b in range(blocks):
        name = f"x{b}"
        for i in range(inner):
            values.append(Value(f"h{b}_{i}", 10, (name,), CALL, heavy=True, needed=True))
            name = f"h{b}_{i}"
        values.append(Value(f"x{b + 1}", 10, (f"x{b}", name), CALL, needed=True))
    for value in reversed(values[1:]):
        gradients.append(Value(f"g_{value.name}", 10, (gradients[-1].name, value.name), CALL))
    return CutProblem(
        tuple(values),
        recompute_heavy=True,
        backward=tuple(gradients),
        outputs=(values[-1].name,),
        gradients=(gradients[-1].name,),
    )
