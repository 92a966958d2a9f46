"""A measured step beside the simulated one: their peaks, their curves, and what is alive.

The two have no clock in common: a moment of the plan is one op, and a measured one is one block.
So they are aligned by the share of all bytes that have been allocated so far, in order. Blocks and
the plan's buffers are matched by their sizes, which the CUDA allocator rounds up to 512 bytes.

Allocations that were measured: of a snapshot of the CUDA allocator, or of a CPU profile.

An *event* is the allocation or the release of one block. Blocks that were there before the first
event do not count, nor do their releases.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    Details,
    Life,
    MemoryTimeline,
    is_on_host,
    node_name,
)

_CPU_EVENT = 0  # c10::DeviceType of host memory in the profiler's events
_FREED = ("free_completed", "free")


class SnapshotError(ValueError):
    """What was given holds no allocations; the message says how to record some."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One block that is allocated, or freed (then ``bytes`` is 0).

    Attributes:
        source: the innermost line of Python that is none of torch's own; empty if not recorded.
    """

    address: int
    bytes: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The memory over a sequence of events.

    Attributes:
        levels: the bytes after each allocation.
        sizes: the bytes of each allocation.
        alive: the blocks at the first moment of the highest level.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    alive: tuple[Event, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.levels, default=0)


def measured(events: Iterable[Event]) -> Measured:
    """The memory over these events."""
    live: dict[int, Event] = {}
    levels: list[int] = []
    sizes: list[int] = []
    alive: tuple[Event, ...] = ()
    level = peak = 0
    for event in events:
        before = live.pop(event.address, None)
        level -= before.bytes if before is not None else 0
        if not event.bytes:
            continue
        live[event.address] = event
        level += event.bytes
        levels.append(level)
        sizes.append(event.bytes)
        if level > peak:
            peak, alive = level, tuple(live.values())
    return Measured(tuple(levels), tuple(sizes), alive)


def read_measured(snapshot: Any) -> Measured:
    """What was measured.

    Args:
        snapshot: ``torch.cuda.memory._snapshot()``, the path of its pickle, or a
            ``torch.profiler.profile`` with ``profile_memory=True``.

    Raises:
        SnapshotError: it holds no allocations.
        OSError: the file cannot be read.
    """
    if isinstance(snapshot, str | os.PathLike):
        snapshot = _unpickled(Path(snapshot))
    if isinstance(snapshot, Mapping):
        each = [measured(map(_event, trace)) for trace in snapshot.get("device_traces", ())]
        found = max(each, key=lambda one: one.peak_bytes, default=Measured((), (), ()))
        how = "record it with torch.cuda.memory._record_memory_history() before the step"
    elif hasattr(snapshot, "export_chrome_trace"):
        found = measured(events_of_profile(snapshot))
        how = "record it with torch.profiler.profile(profile_memory=True) around the step"
    else:
        raise SnapshotError(
            "a snapshot is torch.cuda.memory._snapshot(), the path of its pickle, or a "
            f"torch.profiler.profile with profile_memory=True; this is a {type(snapshot).__name__}"
        )
    if not found.levels:
        raise SnapshotError(f"the snapshot holds no allocations: {how}")
    return found


# ---- CUDA ----------------------------------------------------------------------------------------
class _PlainData(pickle.Unpickler):
    """Reads containers, numbers and text: a file may come from elsewhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"the file holds more than plain data: {module}.{name}")


def _unpickled(path: Path) -> Any:
    try:
        return _PlainData(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError) as error:
        raise SnapshotError(f"{path}: no snapshot of memory: {error}") from None


def _event(entry: Mapping[str, Any]) -> Event:
    action, address = entry.get("action"), int(entry.get("addr", -1))
    if action == "alloc":
        return Event(address, int(entry["size"]), _source(entry.get("frames", ())))
    return Event(address if action in _FREED else -1, 0)


def _source(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "/torch/" not in file:
            return f"{Path(file).name}:{frame.get('line', 0)}"
    return ""


# ---- CPU -----------------------------------------------------------------------------------------
def events_of_profile(profiler: Any) -> list[Event]:
    """The events of a ``torch.profiler.profile`` on the CPU.

    The profiler's own total is not used: it subtracts frees of blocks that it saw in an earlier
    profile, and takes a block that it has not seen for an older one at the same address.
    """
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    events = (e for e in trace["traceEvents"] if e.get("name") == "[memory]")
    on_host = [e for e in events if e["args"]["Device Type"] == _CPU_EVENT]
    return [
        Event(e["args"]["Addr"], max(0, e["args"]["Bytes"]))
        for e in sorted(on_host, key=lambda e: e["ts"])
    ]


# ---- compare -------------------------------------------------------------------------------------
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
