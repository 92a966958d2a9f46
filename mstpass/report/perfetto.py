"""Memory over time as a trace for https://ui.perfetto.dev, in the Trace Event Format.

Bytes are simulated, and names are those of the joint graph's nodes. The time axis counts moments:
each moment is one op or one loop. The axis shows the order of events, not how long they take.

Source: the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.plans import Outcome
from mstpass.problem.problem import LOOP, is_loop
from mstpass.report.details import Details, DrawnNode, MemoryTimeline

MOMENT_US = 1000  # of the time axis for one moment: viewers do not zoom below a microsecond
_PHASES, _OPS = 1, 2  # thread ids within a process of the trace
_LEAST_FRACTION, _MOST_TENSORS = 0.01, 200  # tensors that are drawn: by share of the peak, number


def perfetto_trace(outcome: Outcome, details: Details) -> dict[str, Any]:
    """The trace as plain data.

    Each timeline is a process with a counter of the bytes in use, with slices for forward and
    backward, and with slices for the ops and loops that run. The large tensors of a timeline are
    asynchronous slices in a process of their own, because a viewer gives each of them a row.
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
    axis = (
        f"each moment (an op or a loop) takes {MOMENT_US} us on this axis, whatever time it needs; "
        "bytes are simulated"
    )
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
    def slice_event(
        tid: int, start: int, end: int, name: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        ts, duration = start * MOMENT_US, (end - start) * MOMENT_US
        place = {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": duration}
        return {**place, "name": name, "cat": "step", "args": args}

    first, last = timeline.first_backward, len(timeline.moments)
    for phase, start, end in (("forward", 0, first), ("backward", first, last)):
        if start < end:
            yield slice_event(_PHASES, start, end, phase, {})
    for moment, name in enumerate(timeline.moments):
        args = _node_facts(name, nodes)
        node = nodes.get(name.removeprefix(LOOP))
        if is_loop(name) and node is not None and node.region >= 0:
            region = outcome.regions[node.region]
            args |= {"loop": f"{region.kind}, {region.mode}", "chunks": region.num_chunks}
        args["bytes in use"] = timeline.bytes[moment]
        yield slice_event(_OPS, moment, moment + 1, name, args)


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


def _node_facts(name: str, nodes: dict[str, DrawnNode]) -> dict[str, Any]:
    """What is known of a node, or of the first node that a loop returns."""
    node = nodes.get(name.removeprefix(LOOP))
    if node is None:
        return {}
    shape = f"{node.dtype}{list(node.shape)}"
    known = {"op": node.op, "result": shape, "module": node.module, "source": node.source}
    return {key: value for key, value in {**known, "fate": node.fate}.items() if value}
