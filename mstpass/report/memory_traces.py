"""Memory over time as a trace for https://ui.perfetto.dev, in the Trace Event Format.

Bytes are simulated, and names are those of the joint graph's nodes. The time axis counts moments:
each moment is one op or one loop. The axis shows the order of events, not how long they take. Only
copies to the host and back, and the computation beside them, have estimated times.

Source: the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.

Memory over time as a snapshot for PyTorch's memory viewer, https://pytorch.org/memory_viz.

Bytes are simulated, and names are those of the joint graph's nodes. Each moment is one op or one
loop; the time axis counts moments.

Source: the snapshots of ``torch.cuda.memory._dump_snapshot``, as the viewer reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.plans import Outcome
from mstpass.report.data import PhaseTimes, phase_times
from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline, is_loop, node_name

MOMENT_US = 1000  # of the time axis for one moment: viewers do not zoom below a microsecond
_PHASES, _OPS = 1, 2  # thread ids within a process of the trace
_DEVICE, _TO_HOST, _FROM_HOST = 1, 2, 3  # the same of the process of copies
_COPY_THREADS = {_DEVICE: "device", _TO_HOST: "to the host", _FROM_HOST: "from the host"}
_LEAST_FRACTION, _MOST_TENSORS = 0.01, 200  # tensors that are drawn: by share of the peak, number


def perfetto_trace(outcome: Outcome, details: Details) -> dict[str, Any]:
    """The trace as plain data.

    Each timeline is a process with a counter of the bytes in use, with slices for forward and
    backward, and with slices for the ops and loops that run. The large tensors of a timeline are
    asynchronous slices in a process of their own, because a viewer gives each of them a row. Copies
    to the host and back are one more process.
    """
    nodes = {node.name: node for node in details.nodes}
    events: list[dict[str, Any]] = []
    timelines = details.timelines()
    threads = {_PHASES: "phases", _OPS: "ops and loops"}
    for pid, (title, timeline) in enumerate(timelines, 1):
        events += _process(pid, f"{title}, peak {bytes_text(timeline.peak_bytes)}", threads)
        events += _counter(pid, timeline)
        events += _slices(pid, timeline, outcome, nodes)
    for pid, (title, timeline) in enumerate(timelines, len(timelines) + 1):
        events += _process(pid, f"{title}, large tensors", {})
        events += _tensors(pid, timeline, nodes)
    about = {
        "axis": f"each moment (an op or a loop) takes {MOMENT_US} us on this axis, whatever time "
        "it needs; bytes are simulated"
    }
    phases = phase_times(outcome.save_plan) if outcome.save_plan else ()
    if phases:
        pid = 2 * len(timelines) + 1
        events += _process(pid, "copies beside computation (estimated time)", _COPY_THREADS)
        events += _copies(pid, phases, nodes)
        about["axis of copies"] = "microseconds of the step, estimated by the cost model"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


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
    def at(start: int, end: int) -> tuple[int, int]:
        return start * MOMENT_US, end * MOMENT_US

    first, last = timeline.first_backward, len(timeline.moments)
    for phase, start, end in (("forward", 0, first), ("backward", first, last)):
        if start < end:
            yield _slice(pid, _PHASES, at(start, end), phase, {})
    for moment, name in enumerate(timeline.moments):
        args = _node_facts(name, nodes)
        node = nodes.get(node_name(name))
        if is_loop(name) and node is not None and node.region >= 0:
            region = outcome.regions[node.region]
            args |= {
                "loop": f"{region.kind}, {region.mode}",
                "chunks": region.chunks_in(node.phase).count,
            }
        args["bytes in use"] = timeline.bytes[moment]
        yield _slice(pid, _OPS, at(moment, moment + 1), name, args)


def _slice(
    pid: int, tid: int, times_us: tuple[float, float], name: str, args: dict[str, Any]
) -> dict[str, Any]:
    start_us, end_us = times_us
    place = {"ph": "X", "pid": pid, "tid": tid, "ts": start_us, "dur": end_us - start_us}
    return {**place, "name": name, "cat": "step", "args": args}


def _tensors(
    pid: int, timeline: MemoryTimeline, nodes: dict[str, DrawnNode]
) -> Iterable[dict[str, Any]]:
    """The largest tensors, in the order in which they are allocated."""
    least = timeline.peak_bytes * _LEAST_FRACTION
    large = sorted((l for l in timeline.lives if l.bytes >= least), key=lambda l: -l.bytes)
    for number, life in enumerate(sorted(large[:_MOST_TENSORS], key=lambda l: (l.start, l.end))):
        name = f"{life.node} (inside)" if life.transient else life.node
        # The id is local to the process: slices with a global id would leave their processes.
        tensor = {"pid": pid, "tid": 0, "cat": "tensor", "id2": {"local": hex(number)}}
        tensor |= {"name": name}
        args = {"bytes": life.bytes, "size": bytes_text(life.bytes)}
        args |= _node_facts(life.node, nodes)
        yield {**tensor, "ph": "b", "ts": life.start * MOMENT_US, "args": args}
        yield {**tensor, "ph": "e", "ts": life.end * MOMENT_US, "args": {}}


def _copies(
    pid: int, phases: Iterable[PhaseTimes], nodes: dict[str, DrawnNode]
) -> Iterable[dict[str, Any]]:
    """Forward and backward on the device, with its waits inside of them, and the copies beside."""
    begin_us = 0.0  # of the phase
    for phase in phases:
        yield _slice(pid, _DEVICE, (begin_us, begin_us + phase.end_us), phase.phase, {})
        for copy in phase.copies:
            start_us, end_us = begin_us + copy.start_us, begin_us + copy.end_us
            args = {"bytes": copy.bytes, "size": bytes_text(copy.bytes), "wait_us": copy.stall_us}
            args |= _node_facts(copy.node, nodes)
            tid = _TO_HOST if copy.to_host else _FROM_HOST
            yield _slice(pid, tid, (start_us, end_us), copy.node, args)
            if copy.stall_us:
                name = f"wait for the copy of {copy.node}"
                yield _slice(pid, _DEVICE, (end_us - copy.stall_us, end_us), name, args)
        begin_us += phase.end_us


def _node_facts(name: str, nodes: dict[str, DrawnNode]) -> dict[str, Any]:
    """What is known of a node, or of the one that a loop or a copy is named after."""
    node = nodes.get(node_name(name))
    if node is None:
        return {}
    shape = f"{node.dtype}{list(node.shape)}"
    known = {"op": node.op, "result": shape, "module": node.module, "source": node.source}
    return {key: value for key, value in {**known, "fate": node.fate}.items() if value}


# ---- memory viz ----------------------------------------------------------------------------------
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
