"""The order in which a compiled step allocates and frees, from its simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from mstpass.memory.timeline import HELD, StepMemory, Timeline
from mstpass.planner.allocator_replay import Event
from mstpass.problem.op import INPUT


def step_events(memory: StepMemory) -> tuple[Event, ...]:
    """Of the kernels, one after the other; what crosses to the backward stays where it is."""
    inputs = {name for name in memory.backward.lives if memory.backward.ops[name].kind == INPUT}
    held = {name.removesuffix(HELD): name for name in inputs if name.endswith(HELD)}
    forward = list(_graph_events(memory.forward, held))
    alive = {event.key for event in forward if event.bytes is not None}
    alive -= {event.key for event in forward if event.bytes is None}
    unused = [Event(key, None) for key in alive - inputs]
    return (*forward, *unused, *_graph_events(memory.backward, {}, there=alive & inputs))


def _graph_events(
    timeline: Timeline, held: Mapping[str, str], there: Set[object] = frozenset()
) -> Iterator[Event]:
    """One graph's; ``held``: names under which the backward knows its results."""
    born: dict[int, list[Event]] = {}
    freed: dict[int, list[Event]] = {}
    for name, size, start, end in timeline.buffers():
        key = held.get(name, name)
        if key not in there:
            born.setdefault(start, []).append(Event(key, size))
        freed.setdefault(end, []).append(Event(key, None))
    for i, moment in enumerate(timeline.moments):
        yield from freed.get(i, ())
        yield from born.get(i, ())
        if inner_bytes := timeline.ops[moment.node].inner_bytes:
            yield Event(f"{moment.node} (workspace)", inner_bytes)
            yield Event(f"{moment.node} (workspace)", None)
