"""A compiled step's allocations and frees in order, from its simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from mstpass.memory.timeline import HELD, StepMemory, Timeline
from mstpass.planner.allocator_replay import Event
from mstpass.problem.op import INPUT


def step_events(memory: StepMemory) -> tuple[Event, ...]:
    """The events of the step's kernels, one after the other.

    Values that cross to the backward keep their memory.
    """
    inputs = {name for name in memory.backward.lives if memory.backward.ops[name].kind == INPUT}
    held = {name.removesuffix(HELD): name for name in inputs if name.endswith(HELD)}
    forward = list(_graph_events(memory.forward, held))
    alive = {event.key for event in forward if event.bytes is not None}
    alive -= {event.key for event in forward if event.bytes is None}
    unused = [Event(key, None) for key in alive - inputs]
    return (*forward, *unused, *_graph_events(memory.backward, {}, allocated=alive & inputs))


def _graph_events(
    timeline: Timeline, held: Mapping[str, str], allocated: Set[object] = frozenset()
) -> Iterator[Event]:
    """The events of one graph.

    Args:
        held: the names that the backward has for results of this graph, by their name here.
        allocated: keys whose memory the forward has allocated already.
    """
    allocations: dict[int, list[Event]] = {}
    frees: dict[int, list[Event]] = {}
    for name, size, start, end in timeline.buffers():
        key = held.get(name, name)
        if key not in allocated:
            allocations.setdefault(start, []).append(Event(key, size))
        frees.setdefault(end, []).append(Event(key, None))
    for i, moment in enumerate(timeline.moments):
        yield from frees.get(i, ())
        yield from allocations.get(i, ())
        if inner_bytes := timeline.ops[moment.node].inner_bytes:
            yield Event(f"{moment.node} (workspace)", inner_bytes)
            yield Event(f"{moment.node} (workspace)", None)
