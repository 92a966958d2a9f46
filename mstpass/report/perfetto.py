"""Memory over time as a trace for https://ui.perfetto.dev, in the Trace Event Format.

Bytes are simulated, and names are those of the joint graph's nodes. The time axis counts moments:
each moment is one op or one loop. The axis shows the order of events, not how long they take. Only
copies to the host and back, and the computation beside them, have estimated times.

Source: the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.plans import Outcome
from mstpass.problem.problem import is_loop
from mstpass.report.copy_times import PhaseTimes, phase_times
from mstpass.report.details import Details, DrawnNode, MemoryTimeline
from mstpass.report.timeline_names import node_name

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
