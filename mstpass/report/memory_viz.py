"""Memory over time as a snapshot for PyTorch's memory viewer, https://pytorch.org/memory_viz.

Bytes are simulated, and names are those of the joint graph's nodes. Each moment is one op or one
loop; the time axis counts moments.

Source: the snapshots of ``torch.cuda.memory._dump_snapshot``, as the viewer reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline
from mstpass.report.timeline_names import node_name

PICKLE_PROTOCOL = 4  # the newest that the viewer reads
_MOMENT_US = 1000
_BASE_ADDRESS = 1 << 40


def memory_snapshot(details: Details) -> dict[str, Any]:
    """A snapshot with the layout of ``torch.cuda.memory._snapshot()``.

    Device 0 is the step as planned, device 1 that of Inductor alone. The "stack" of a tensor is
    its node, its module and its line in the user's code.
    """
    nodes = {node.name: node for node in details.nodes}
    traces, segments = [], []
    for device, (_, timeline) in enumerate(details.timelines()):
        trace, segment = _device(device, timeline, nodes)
        traces.append(trace)
        segments.append(segment)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}}


def _device(
    device: int, timeline: MemoryTimeline, nodes: dict[str, DrawnNode]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The allocations of one timeline, and the one segment that they lie in."""
    base = _BASE_ADDRESS * (device + 1)
    offsets, extent = _offsets(timeline.lives)
    whole = {"addr": base, "size": extent, "stream": 0, "time_us": 0, "frames": []}
    trace: list[dict[str, Any]] = [{"action": "segment_alloc", **whole}]
    for moment, is_alloc, index in _events(timeline.lives):
        life = timeline.lives[index]
        event = {
            "addr": base + offsets[index],
            "size": life.bytes,
            "stream": 0,
            "time_us": moment * _MOMENT_US,
            "frames": _frames(life, nodes),
        }
        actions = ("alloc",) if is_alloc else ("free_requested", "free_completed")
        trace += [{"action": action, **event} for action in actions]
    return trace, _segment(device, base, extent)


def _segment(device: int, base: int, extent: int) -> dict[str, Any]:
    """All memory of a device at the end of the step, when everything is freed."""
    block = {"address": base, "size": extent, "requested_size": extent, "state": "inactive"}
    return {
        "device": device,
        "address": base,
        "total_size": extent,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [{**block, "frames": []}],
    }


def _events(lives: Sequence[Life]) -> list[tuple[int, bool, int]]:
    """(moment, whether it is an allocation, index of the life); frees come before allocations."""
    starts = [(life.start, True, index) for index, life in enumerate(lives) if life.bytes]
    ends = [(life.end, False, index) for index, life in enumerate(lives) if life.bytes]
    return sorted(starts + ends)


def _offsets(lives: Sequence[Life]) -> tuple[dict[int, int], int]:
    """The lowest free offset for each life when it starts, and the end of the highest one."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # (offset, end, index), in the order of offsets
    extent = 0
    for _, is_alloc, index in _events(lives):
        if not is_alloc:
            taken = [block for block in taken if block[2] != index]
            continue
        offset = 0
        for start, end, _ in taken:
            if start - offset >= lives[index].bytes:
                break
            offset = end
        offsets[index] = offset
        taken = sorted([*taken, (offset, offset + lives[index].bytes, index)])
        extent = max(extent, offset + lives[index].bytes)
    return offsets, extent


def _frames(life: Life, nodes: dict[str, DrawnNode]) -> list[dict[str, Any]]:
    """The "stack" of a life: its node as the innermost frame, then its module."""
    node = nodes.get(node_name(life.node))
    kind = "inside " if life.transient else ""
    if node is None:
        return [{"filename": "mstpass", "line": 0, "name": f"{kind}{life.node}"}]
    file, _, line = node.source.rpartition(":")
    place = {"filename": file or "unknown", "line": int(line) if line.isdecimal() else 0}
    text = " ".join(filter(None, (kind + life.node, node.op, str(list(node.shape)), node.fate)))
    frames = [{**place, "name": text}]
    return [*frames, {**place, "name": node.module}] if node.module else frames
