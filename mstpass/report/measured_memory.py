"""Allocations that were measured: of a snapshot of the CUDA allocator, or of a CPU profile.

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
