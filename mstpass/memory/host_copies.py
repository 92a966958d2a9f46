"""Where a graph copies values to the host and back, and when the copies run.

Copies run one after the other on a stream of their own, beside the ops of the graph. ::

    forward     copy begins as soon as the value is computed and the stream is free
                the value's memory is freed at the first op behind the copy's end

    backward    the copies are ordered by the first use of their values
                copy begins so early that it and all later ones end before these uses
                the value's memory is allocated when the copy begins

Only at the end of forward, and in the beginning of backward, do ops have to wait for copies: there
is nothing left to compute meanwhile. Times of ops are estimates, so backward begins a copy earlier
than need be (``_MARGIN``). The two functions ``offload_copies`` and ``reload_copies`` know nothing
of graphs, so that a plan is simulated as its graphs are written (schedule/offload_saved_values.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence, Set

from mstpass.problem.host_memory import Host
from mstpass.problem.op import CALL, INPUT, VIEW
from mstpass.problem.problem import Value

_MARGIN = 1.25  # of a reload's time: it begins that much earlier than the estimate asks for


@dataclasses.dataclass(frozen=True)
class Moved:
    """A value to be copied: its position is that of its first use or, in a forward, of its op."""

    name: str
    bytes: int
    position: int


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One copy between the device and the host.

    Attributes:
        begun: the copy begins in front of the op of this position.
        awaited: the op of this position is the first one that runs behind the copy.
        start_us: when the copy runs, by the estimated times of the graph's ops.
        end_us: when it ends.
        stall_us: how long the device waits for it.
    """

    name: str
    bytes: int
    begun: int
    awaited: int
    start_us: float
    end_us: float
    stall_us: float = 0.0


def offload_copies(
    times_us: Sequence[float], values: Sequence[Moved], bytes_per_us: float
) -> list[HostCopy]:
    """The copies of a forward to the host.

    Args:
        times_us: the time of each op of the graph, in order.
    """
    clock = _clock(times_us)
    copies: list[HostCopy] = []
    free_us = 0.0  # when the stream has done all copies before
    waited_us = clock[-1]
    for value in sorted(values, key=lambda value: value.position):
        begun = value.position + 1
        start_us = max(clock[begun], free_us)
        free_us = start_us + value.bytes / bytes_per_us
        awaited = max(begun, bisect.bisect_left(clock, free_us))
        stall_us = max(0.0, free_us - waited_us)
        waited_us = max(waited_us, free_us)
        awaited = min(awaited, len(times_us))
        copies.append(
            HostCopy(value.name, value.bytes, begun, awaited, start_us, free_us, stall_us)
        )
    return copies


def reload_copies(
    times_us: Sequence[float], values: Sequence[Moved], bytes_per_us: float
) -> list[HostCopy]:
    """The copies of a backward from the host; arguments as of ``offload_copies``."""
    clock = _clock(times_us)
    begun: list[int] = []
    latest_us = clock[-1]
    ordered = sorted(values, key=lambda value: value.position)
    for value in reversed(ordered):
        latest_us = min(latest_us, clock[value.position]) - _MARGIN * value.bytes / bytes_per_us
        begun.append(max(0, bisect.bisect_right(clock, latest_us) - 1))
    copies: list[HostCopy] = []
    free_us = stalled_us = 0.0
    stalls: list[tuple[int, float]] = []  # position of an op that waits, and how long all had to
    for value, first in zip(ordered, reversed(begun), strict=True):
        before_us = max((us for position, us in stalls if position <= first), default=0.0)
        start_us = max(clock[first] + before_us, free_us)
        free_us = start_us + value.bytes / bytes_per_us
        stall_us = max(0.0, free_us - clock[value.position] - stalled_us)
        if stall_us:
            stalled_us += stall_us
            stalls.append((value.position, stalled_us))
        copies.append(
            HostCopy(value.name, value.bytes, first, value.position, start_us, free_us, stall_us)
        )
    return copies


def _clock(times_us: Sequence[float]) -> list[float]:
    """When each op begins, and when the last one ends."""
    return [0.0, *itertools.accumulate(times_us)]


# ---- ops of a simulated step ---------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class OpsWithCopies:
    """The ops of a graph, those of its copies among them.

    Copies of a value ``v`` are ops of their own: ``v:offload``, and ``v:offloaded``, which waits
    for it; in a backward ``v:host`` is the value on the host, ``v:reload`` the copy, and ``v`` a
    view of it.
    """

    ops: tuple[Value, ...]
    copies: tuple[HostCopy, ...] = ()

    @property
    def stall_us(self) -> float:
        """The time that the device waits for copies."""
        return sum(copy.stall_us for copy in self.copies)


def offloaded_name(name: str) -> str:
    """The name of the op that waits until a value is on the host."""
    return f"{name}:offloaded"


def with_offloads(ops: Sequence[Value], names: Set[str], host: Host) -> OpsWithCopies:
    """The ops of a forward that copies these values to the host."""
    values = [Moved(op.name, op.bytes, i) for i, op in enumerate(ops) if op.name in names]
    copies = offload_copies([op.us for op in ops], values, host.offload_bytes_per_us)
    added: dict[int, list[Value]] = {}
    for copy in copies:
        begin = f"{copy.name}:offload"
        added.setdefault(copy.begun, []).append(_copy_op(begin, (copy.name,)))
        wait = _copy_op(offloaded_name(copy.name), (copy.name, begin))
        added.setdefault(copy.awaited, []).append(wait)
    return OpsWithCopies(_inserted(ops, added), tuple(copies))


def with_reloads(ops: Sequence[Value], names: Set[str], host: Host) -> OpsWithCopies:
    """The ops of a backward that copies these values back; among the ops they are inputs."""
    last = len(ops)
    first_use = dict.fromkeys(names, last)
    for i in range(last - 1, -1, -1):
        for name in ops[i].inputs:
            if name in first_use:
                first_use[name] = i
    given = {op.name: op for op in ops if op.name in names}
    values = [Moved(name, op.bytes, first_use[name]) for name, op in given.items()]
    copies = reload_copies([op.us for op in ops], values, host.reload_bytes_per_us)
    first_op = next((i for i, op in enumerate(ops) if op.kind != INPUT), last)
    added: dict[int, list[Value]] = {}
    for copy in copies:
        reload = f"{copy.name}:reload"
        begun = max(copy.begun, first_op)
        begin = _copy_op(reload, (_host_name(copy.name),), copy.bytes)
        added.setdefault(begun, []).append(begin)
        wait = dataclasses.replace(_copy_op(copy.name, (reload,), copy.bytes), kind=VIEW)
        added.setdefault(max(copy.awaited, begun), []).append(wait)
    on_host = [
        dataclasses.replace(op, name=_host_name(op.name), bytes=0) if op.name in names else op
        for op in ops
    ]
    return OpsWithCopies(_inserted(on_host, added), tuple(copies))


def _host_name(name: str) -> str:
    return f"{name}:host"


def _copy_op(name: str, inputs: tuple[str, ...], size: int = 0) -> Value:
    return Value(name, size, inputs, CALL, pinned=True, savable=False)


def _inserted(ops: Sequence[Value], added: dict[int, list[Value]]) -> tuple[Value, ...]:
    """The ops, with others in front of those of given positions."""
    found: list[Value] = []
    for i, op in enumerate(ops):
        found += added.get(i, ())
        found.append(op)
    return (*found, *added.get(len(ops), ()))
