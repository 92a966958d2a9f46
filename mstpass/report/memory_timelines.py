"""Memory over time in the formats of two viewers: Perfetto's, and PyTorch's memory viewer.

Simulated bytes, by the names of the graph's nodes. The time axis counts moments, of which each is
one op or one loop: it says in which order things happen, not how long they take.

Sources: the Trace Event Format (ui.perfetto.dev and chrome://tracing read it), and the snapshots of
``torch.cuda.memory._dump_snapshot`` as https://pytorch.org/memory_viz reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstpass.plans import Outcome
from mstpass.problem.problem import LOOP, is_loop
from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline
from mstpass.report.units import bytes_text

MOMENT_US = 1000  # of the axis, for one moment: viewers do not zoom below a microsecond
PICKLE_PROTOCOL = 4  # the newest that the memory viewer reads
_PHASES, _OPS = 1, 2  # "threads" of a trace
_SHOWN_FRACTION, _MOST_SHOWN = 0.01, 200  # tensors of that much of the peak, and so many
_BASE_ADDRESS = 1 << 40


def named_timelines(details: Details) -> list[tuple[str, MemoryTimeline]]:
    named = [("mst: the step as planned", details.after), ("without loops", details.before)]
    return [(name, timeline) for name, timeline in named if timeline is not None]


# ---- Perfetto ----------------------------------------------------------------------------------
def perfetto_trace(outcome: Outcome, details: Details) -> dict[str, Any]:
    """A trace in the Trace Event Format, as plain data.

    Each timeline is a process: a counter of bytes in use, slices for forward and backward and for
    what runs, loops among them. Its large tensors are asynchronous slices, of which a viewer makes
    a row each, so they have a process of their own.
    """
    nodes = {node.name: node for node in details.nodes}
    events: list[dict[str, Any]] = []
    timelines = named_timelines(details)
    threads = {_PHASES: "phases", _OPS: "ops and loops"}
    for number, (name, timeline) in enumerate(timelines, 1):
        events += _process(number, f"{name}, peak {bytes_text(timeline.peak_bytes)}", threads)
        events += _counter(number, timeline)
        events += _slices(number, timeline, outcome, nodes)
    for number, (name, timeline) in enumerate(timelines, len(timelines) + 1):
        events += _process(number, f"{name}, its large tensors", {})
        events += _tensors(number, timeline, nodes)
    axis = f"{MOMENT_US} us are one moment (an op or a loop), not a time; bytes are simulated"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"axis": axis}}


def _process(pid: int, name: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    meta = {"ph": "M", "pid": pid, "tid": 0, "ts": 0}
    return [
        {**meta, "name": "process_name", "args": {"name": name}},
        {**meta, "name": "process_sort_index", "args": {"sort_index": pid}},
        *(
            {**meta, "tid": tid, "name": "thread_name", "args": {"name": text}}
            for tid, text in threads.items()
        ),
    ]


def _counter(pid: int, timeline: MemoryTimeline) -> list[dict[str, Any]]:
    counter = {"ph": "C", "pid": pid, "tid": 0, "name": "bytes in use"}
    return [
        {**counter, "ts": moment * MOMENT_US, "args": {"bytes": size}}
        for moment, size in enumerate((*timeline.bytes, 0))
    ]


def _slices(
    pid: int, timeline: MemoryTimeline, outcome: Outcome, nodes: dict[str, DrawnNode]
) -> Iterable[dict[str, Any]]:
    def piece(tid: int, start: int, end: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
        ts, duration = start * MOMENT_US, (end - start) * MOMENT_US
        place = {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": duration}
        return {**place, "name": name, "cat": "step", "args": args}

    first, last = timeline.first_backward, len(timeline.moments)
    for phase, start, end in (("forward", 0, first), ("backward", first, last)):
        if start < end:
            yield piece(_PHASES, start, end, phase, {})
    for moment, name in enumerate(timeline.moments):
        args = _about(name, nodes)
        node = nodes.get(name.removeprefix(LOOP))
        if is_loop(name) and node is not None and node.region >= 0:
            region = outcome.regions[node.region]
            args |= {"loop": f"{region.kind}, {region.mode}", "chunks": region.num_chunks}
        args["bytes in use"] = timeline.bytes[moment]
        yield piece(_OPS, moment, moment + 1, name, args)


def _tensors(
    pid: int, timeline: MemoryTimeline, nodes: dict[str, DrawnNode]
) -> Iterable[dict[str, Any]]:
    """The largest ones, in the order in which they come to be."""
    least = timeline.peak_bytes * _SHOWN_FRACTION
    large = sorted((l for l in timeline.lives if l.bytes >= least), key=lambda l: -l.bytes)
    for number, life in enumerate(sorted(large[:_MOST_SHOWN], key=lambda l: (l.start, l.end))):
        name = f"{life.node} (inside)" if life.transient else life.node
        # A local id: a global one would gather both timelines' tensors outside of their processes.
        tensor = {"pid": pid, "tid": 0, "cat": "tensor", "id2": {"local": hex(number)}}
        tensor |= {"name": name}
        args = {"bytes": life.bytes, "size": bytes_text(life.bytes), **_about(life.node, nodes)}
        yield {**tensor, "ph": "b", "ts": life.start * MOMENT_US, "args": args}
        yield {**tensor, "ph": "e", "ts": life.end * MOMENT_US, "args": {}}


def _about(name: str, nodes: dict[str, DrawnNode]) -> dict[str, Any]:
    node = nodes.get(name.removeprefix(LOOP))
    if node is None:
        return {}
    shape = f"{node.dtype}{list(node.shape)}"
    known = {"op": node.op, "result": shape, "module": node.module, "source": node.source}
    return {key: value for key, value in {**known, "fate": node.fate}.items() if value}


# ---- PyTorch's memory viewer -------------------------------------------------------------------
def memory_snapshot(details: Details) -> dict[str, Any]:
    """A snapshot as ``torch.cuda.memory._snapshot`` gives it: device 0 is the step as planned,
    device 1 the step without loops. A tensor's "stack" is its node, its module and its line.
    """
    nodes = {node.name: node for node in details.nodes}
    traces, segments = [], []
    for device, (_, timeline) in enumerate(named_timelines(details)):
        base = _BASE_ADDRESS * (device + 1)
        placed, extent = _addresses(timeline.lives)
        segment = {"addr": base, "size": extent, "stream": 0, "time_us": 0, "frames": []}
        trace: list[dict[str, Any]] = [{"action": "segment_alloc", **segment}]
        for moment, is_alloc, index in _events(timeline.lives):
            life = timeline.lives[index]
            event = {
                "addr": base + placed[index],
                "size": life.bytes,
                "stream": 0,
                "time_us": moment * MOMENT_US,
                "frames": _frames(life, nodes),
            }
            actions = ("alloc",) if is_alloc else ("free_requested", "free_completed")
            trace += [{"action": action, **event} for action in actions]
        traces.append(trace)
        segments.append(_segment(device, base, extent))
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}}


def _segment(device: int, base: int, extent: int) -> dict[str, Any]:
    """All memory of a device, at the end of the step: empty, its gradients included."""
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


def _events(lives: tuple[Life, ...]) -> list[tuple[int, bool, int]]:
    """(moment, whether it is allocated, index of the life); what ends goes before what starts."""
    starts = [(life.start, True, index) for index, life in enumerate(lives) if life.bytes]
    ends = [(life.end, False, index) for index, life in enumerate(lives) if life.bytes]
    return sorted(starts + ends)


def _addresses(lives: tuple[Life, ...]) -> tuple[dict[int, int], int]:
    """An offset for each life, the lowest that is free at its start, and the end of the highest."""
    placed: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # offset, end, index; by offset
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
        placed[index] = offset
        taken = sorted([*taken, (offset, offset + lives[index].bytes, index)])
        extent = max(extent, offset + lives[index].bytes)
    return placed, extent


def _frames(life: Life, nodes: dict[str, DrawnNode]) -> list[dict[str, Any]]:
    """The node as the innermost "frame", then its module's line."""
    node = nodes.get(life.node.removeprefix(LOOP))
    kind = "inside " if life.transient else ""
    if node is None:
        return [{"filename": "mstpass", "line": 0, "name": f"{kind}{life.node}"}]
    file, _, line = node.source.rpartition(":")
    where = {"filename": file or "unknown", "line": int(line) if line.isdecimal() else 0}
    text = " ".join(filter(None, (kind + life.node, node.op, str(list(node.shape)), node.fate)))
    frames = [{**where, "name": text}]
    return [*frames, {**where, "name": node.module}] if node.module else frames
