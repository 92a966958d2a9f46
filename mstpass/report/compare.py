"""A measured step beside the simulated one: their peaks, their curves, and what is alive.

The two have no clock in common: a moment of the plan is one op, and a measured one is one block.
So they are aligned by the share of all bytes that have been allocated so far, in order. Blocks and
the plan's buffers are matched by their sizes, which the CUDA allocator rounds up to 512 bytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.report.details import BACKWARD, FORWARD, Details, Life, MemoryTimeline
from mstpass.report.measured_memory import Event, Measured, read_measured
from mstpass.report.timeline_names import is_on_host, node_name

_POINTS = 50  # of the curves
_NAMED = 3  # differences of the curves that are named
_ROUNDED = 512  # bytes to which allocators round a block up
_LEAST = 0.01  # of a peak: blocks below this are not listed one by one


@dataclasses.dataclass(frozen=True)
class Point:
    """Both levels once the same share of all bytes has been allocated: the highest of the interval.

    Attributes:
        share: from 0 to 1, where the interval ends.
        node: what runs in the plan where it is highest.
    """

    share: float
    measured_bytes: int
    simulated_bytes: int
    node: str
    phase: str

    @property
    def difference(self) -> int:
        return self.measured_bytes - self.simulated_bytes


@dataclasses.dataclass(frozen=True)
class Block:
    """Blocks of one size that are alive at the measured peak, or buffers at that of the plan.

    Attributes:
        source: a line of Python; of a buffer of the plan, its line in the user's code.
        node: the plan's buffer of this size; empty if it has none at its peak.
    """

    bytes: int
    count: int
    source: str = ""
    node: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured step and its plan; ``str`` is a text.

    Attributes:
        curve: both levels over the step, from its beginning to its end.
        blocks: the largest blocks at the measured peak.
        not_in_plan: those of them with a size that no buffer has at the plan's peak.
        not_measured: buffers at the plan's peak with a size that no block has.
    """

    measured_peak_bytes: int
    simulated_peak_bytes: int
    curve: tuple[Point, ...]
    blocks: tuple[Block, ...]
    not_in_plan: tuple[Block, ...]
    not_measured: tuple[Block, ...]

    @property
    def largest_differences(self) -> tuple[Point, ...]:
        """The points at which the two curves are furthest from each other."""
        furthest = sorted(self.curve, key=lambda point: -abs(point.difference))[:_NAMED]
        return tuple(sorted(furthest, key=lambda point: point.share))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        measured, simulated = self.measured_peak_bytes, self.simulated_peak_bytes
        part = f" ({measured / simulated - 1:+.1%})" if simulated else ""
        lines = [
            "the step as measured, and as planned",
            f"  peak memory: {bytes_text(measured)} measured, {bytes_text(simulated)} simulated"
            + part,
            "  the largest differences, at the same share of all bytes that are allocated:",
        ]
        lines += [
            f"    at {p.share:4.0%}  {bytes_text(p.measured_bytes):>10} measured, "
            f"{bytes_text(p.simulated_bytes):>10} simulated, in {p.phase} at {p.node}"
            for p in self.largest_differences
        ]
        for title, blocks in (
            ("in memory at the measured peak", self.blocks),
            ("of these not in the plan at its peak", self.not_in_plan),
            ("in the plan at its peak, but not measured", self.not_measured),
        ):
            lines += [f"  {title}:", *(_line(block) for block in blocks)]
            if not blocks:
                lines[-1] += " nothing large"
        return "\n".join(lines)


def _line(block: Block) -> str:
    times = f" x {block.count}" if block.count > 1 else ""
    words = "  ".join(filter(None, (block.node, block.source)))
    return f"    {bytes_text(block.bytes):>10}{times:<6}  {words}".rstrip()


def compare(details: Details, snapshot: Any, largest: int) -> Comparison:
    """Lay what was measured over the plan.

    Args:
        snapshot: as of ``read_measured``.
        largest: how many blocks are listed.

    Raises:
        SnapshotError: it holds no allocations.
        ValueError: the plan has no timeline, because a size depends on data.
    """
    plan = details.after
    if plan is None or not plan.bytes:
        raise ValueError("the plan has no memory over time, because a size depends on data")
    found = read_measured(snapshot)
    lives = [x for x in _at_peak(plan) if x.bytes and not is_on_host(x.node)]
    matched, left = _matched(found.alive, lives)
    sources = {node.name: node.source for node in details.nodes}
    blocks = _grouped([(event, matched.get(id(event), "")) for event in found.alive])
    least = _LEAST * found.peak_bytes
    unmeasured = Counter((x.bytes, _name(x), sources.get(node_name(x.node), "")) for x in left)
    return Comparison(
        found.peak_bytes,
        plan.peak_bytes,
        _curve(found, plan),
        tuple(blocks[:largest]),
        tuple(b for b in blocks if not b.node and b.bytes >= least)[:largest],
        tuple(
            Block(size, count, source, node)
            for (size, node, source), count in sorted(unmeasured.items(), reverse=True)
            if size >= _LEAST * plan.peak_bytes
        )[:largest],
    )


def _name(life: Life) -> str:
    """What is inside of a loop or of a kernel is one buffer of the plan, and may be many blocks."""
    return f"inside {life.node}" if life.transient else life.node


def _at_peak(plan: MemoryTimeline) -> tuple[Life, ...]:
    return plan.alive_at(plan.bytes.index(plan.peak_bytes))


def _matched(alive: Sequence[Event], lives: Sequence[Life]) -> tuple[dict[int, str], list[Life]]:
    """The name of the buffer for each block (by its id) of the same size, and the other buffers."""
    names: dict[int, str] = {}
    left = sorted(lives, key=lambda life: -life.bytes)
    for event in sorted(alive, key=lambda event: -event.bytes):
        for life in left:
            if life.bytes <= event.bytes < life.bytes + _ROUNDED:
                names[id(event)] = _name(life)
                left.remove(life)
                break
    return names, left


def _grouped(named: Sequence[tuple[Event, str]]) -> list[Block]:
    """Blocks of one size and source as one, the largest sum first."""
    groups: dict[tuple[int, str, bool], list[str]] = {}
    for event, node in named:
        groups.setdefault((event.bytes, event.source, bool(node)), []).append(node)
    blocks = [
        Block(size, len(nodes), source, ", ".join(filter(None, nodes[:2])))
        for (size, source, _), nodes in groups.items()
    ]
    return sorted(blocks, key=lambda block: -block.bytes * block.count)


# ---- curves --------------------------------------------------------------------------------------
def _curve(found: Measured, plan: MemoryTimeline) -> tuple[Point, ...]:
    begun = [0] * len(plan.moments)  # bytes that begin to live at each moment
    for life in plan.lives:
        if not is_on_host(life.node):
            begun[life.start] += life.bytes
    measured = _highest(found.sizes, found.levels)
    simulated = _highest(begun, plan.bytes)
    return tuple(
        Point(
            (number + 1) / _POINTS,
            found.levels[there],
            plan.bytes[here],
            plan.moments[here],
            FORWARD if here < plan.first_backward else BACKWARD,
        )
        for number, (there, here) in enumerate(zip(measured, simulated, strict=True))
    )


def _highest(sizes: Sequence[int], levels: Sequence[int]) -> list[int]:
    """For each interval of the bytes that are allocated, where its level is highest."""
    total, so_far = max(1, sum(sizes)), 0
    best: list[int | None] = [None] * _POINTS
    for index, (size, level) in enumerate(zip(sizes, levels, strict=True)):
        first = min(_POINTS - 1, so_far * _POINTS // total)
        so_far += size
        last = min(_POINTS - 1, max(first, (so_far * _POINTS - 1) // total))
        for number in range(first, last + 1):
            known = best[number]
            if known is None or level > levels[known]:
                best[number] = index
    filled: list[int] = []
    for here in best:
        filled.append(here if here is not None else filled[-1] if filled else 0)
    return filled
