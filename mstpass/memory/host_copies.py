"""Where a graph copies values to the host and back, and when the copies run.

Copies run one after the other on a stream of their own, beside the ops of the graph. ::

    forward     copy begins as soon as the value is computed and the stream is free
                the value's memory is freed at the first op behind the copy's end

    backward    the copies are ordered by the first use of their values
                copy begins so early that it and all later ones end before these uses
                the value's memory is allocated when the copy begins
                a value is copied again for later uses, if a long op lies in between (reloads.py)

So ops have to wait for copies only at the end of forward and in the beginning of backward, where
there is nothing to compute meanwhile; and where the op that a copy would run beside is so long that
the wait is nothing against it (``TOLERABLE_STALL``), but the value's memory would be there for all
that time. Times of ops are estimates, so backward begins a copy earlier than need be (``_MARGIN``).

**Loops of the backward that copy rows from the host.** A value that waits on the host and is copied
back whole is in memory all through the backward of its block. A loop that reads it in rows needs
those of one chunk at a time: the step of the loop copies them itself, on the stream that computes,
so that the loop takes longer by that time::

    v:host  ->  v:rows, a view of it  ->  views of that  ->  loop: + a chunk's rows, + the copies

What else reads the value reads a copy of all of it (reloads.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence, Set

from mstpass.memory.reloads import TOLERABLE_STALL, Reload, reloads
from mstpass.problem.op import (
    AWAIT_OFFLOAD,
    AWAIT_RELOAD,
    CALL,
    INPUT,
    OFFLOAD,
    RELOAD,
    ROWS_ON_HOST,
    VIEW,
)
from mstpass.problem.problem import Host, Value
from mstpass.walk import walk

_MARGIN = 1.25  # of a reload's time: it begins that much earlier than the estimate asks for


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
    times_us: Sequence[float], values: Iterable[tuple[str, int, int]], bytes_per_us: float
) -> list[HostCopy]:
    """The copies of a forward to the host.

    Args:
        times_us: the time of each op of the graph, in order.
        values: of each, in order, its name, its bytes, and the position of its op.
    """
    clock = _clock(times_us)
    copies: list[tuple[str, int, int, int]] = []
    free_us = 0.0  # when the stream has done all copies before
    for name, size, position in values:
        begun = position + 1
        free_us = max(clock[begun], free_us) + size / bytes_per_us
        behind = max(begun, bisect.bisect_left(clock, free_us))
        copies.append((name, size, begun, min(behind, len(times_us))))
    return timed_copies(times_us, copies, bytes_per_us)


def reload_copies(
    times_us: Sequence[float], found: Sequence[Reload], bytes_per_us: float
) -> list[HostCopy]:
    """The copies of a backward from the host, in the order of their first uses.

    Args:
        times_us: as of ``offload_copies``.
        found: the copies, in this order.
    """
    clock = _clock(times_us)
    begun: list[int] = []
    latest_us = clock[-1]
    for reload in reversed(found):
        latest_us = min(latest_us, clock[reload.first_use]) - _MARGIN * reload.bytes / bytes_per_us
        begun.append(min(reload.first_use, _last_beginning(clock, latest_us)))
        latest_us = max(latest_us, clock[begun[-1]])
    pairs = zip(found, reversed(begun), strict=True)
    copies = [(reload.name, reload.bytes, first, reload.first_use) for reload, first in pairs]
    return timed_copies(times_us, copies, bytes_per_us)


def _last_beginning(clock: Sequence[float], latest_us: float) -> int:
    """The op in front of which a copy begins that should begin at this time."""
    before = max(0, bisect.bisect_right(clock, latest_us) - 1)
    behind = min(before + 1, len(clock) - 1)
    late_us, op_us = clock[behind] - max(0.0, latest_us), clock[behind] - clock[before]
    return behind if latest_us > 0 and late_us <= TOLERABLE_STALL * op_us else before


def timed_copies(
    times_us: Sequence[float], copies: Sequence[tuple[str, int, int, int]], bytes_per_us: float
) -> list[HostCopy]:
    """When given copies run, and how long the device waits for each.

    Args:
        times_us: as of ``offload_copies``.
        copies: of each, in the order in which they begin, the name of the value, its bytes, and the
            positions of the ops in front of which it begins and is waited for.
    """
    clock = _clock(times_us)
    found: list[HostCopy] = []
    free_us = 0.0
    stalls: dict[int, float] = {}  # by the position of an op that waits
    for name, size, begun, awaited in copies:
        before_us = sum(us for position, us in stalls.items() if position <= begun)
        start_us = max(clock[begun] + before_us, free_us)
        free_us = start_us + size / bytes_per_us
        there_us = clock[awaited] + sum(us for p, us in stalls.items() if p <= awaited)
        stall_us = max(0.0, free_us - there_us)
        if stall_us:
            stalls[awaited] = stalls.get(awaited, 0.0) + stall_us
        found.append(HostCopy(name, size, begun, awaited, start_us, free_us, stall_us))
    return found


def _clock(times_us: Sequence[float]) -> list[float]:
    """When each op begins, and when the last one ends."""
    return [0.0, *itertools.accumulate(times_us)]


# ---- ops of a simulated step ---------------------------------------------------------------------
# The ops of a graph, those of its copies among them, and the copies. Those of a value ``v`` are ops
# of their own: ``v:offload``, and ``v:offloaded``, which waits for it; in a backward ``v:host`` is
# the value on the host, ``v:reload`` the copy, and ``v`` a view of it.
OpsAndCopies = tuple[tuple[Value, ...], tuple[HostCopy, ...]]


def offloaded_name(name: str) -> str:
    """The name of the op that waits until a value is on the host."""
    return f"{name}:offloaded"


def with_offloads(ops: Sequence[Value], names: Set[str], host: Host) -> OpsAndCopies:
    """The ops of a forward that copies these values to the host."""
    values = ((op.name, op.bytes, i) for i, op in enumerate(ops) if op.name in names)
    copies = offload_copies([op.us for op in ops], values, host.offload_bytes_per_us)
    added: dict[int, list[Value]] = {}
    for copy in copies:
        begin = f"{copy.name}:offload"
        added.setdefault(copy.begun, []).append(_copy_op(begin, (copy.name,), copy.name, OFFLOAD))
        on_host = offloaded_name(copy.name)
        wait = _copy_op(on_host, (copy.name, begin), copy.name, AWAIT_OFFLOAD)
        added.setdefault(copy.awaited, []).append(wait)
    return _inserted(ops, added), tuple(copies)


def with_reloads(
    ops: Sequence[Value], names: Set[str], cheap: Set[str], free: Set[str], host: Host
) -> OpsAndCopies:
    """The ops of a backward that copies these values back; among the ops they are inputs.

    What belongs to a value's second copy ends with ``:2``.

    Args:
        cheap: as of ``reloads``, like ``free``.
    """
    times_us, speed = [op.us for op in ops], host.reload_bytes_per_us
    sizes = {op.name: op.bytes for op in ops if op.name in names}
    found = reloads(ops, times_us, sizes, cheap, free, speed)
    copies = reload_copies(times_us, found.copies, speed)
    first_op = next((i for i, op in enumerate(ops) if op.kind != INPUT), len(ops))
    added: dict[int, list[Value]] = {}
    changed = [
        dataclasses.replace(op, name=host_name(op.name), node=op.name, bytes=0)
        if op.name in names
        else op
        for op in ops
    ]
    count: dict[str, int] = {}
    for reload, copy in zip(found.copies, copies, strict=True):
        name = reload.name
        count[name] = count.get(name, 0) + 1
        number = f":{count[name]}" if count[name] > 1 else ""
        begun, awaited = max(copy.begun, first_op), max(copy.awaited, first_op)
        on_host = (host_name(name),)
        begin = _copy_op(f"{name}:reload{number}", on_host, name, RELOAD, reload.bytes)
        added.setdefault(begun, []).append(begin)
        wait = _copy_op(f"{name}{number}", (begin.name,), name, AWAIT_RELOAD, reload.bytes)
        added.setdefault(awaited, []).append(dataclasses.replace(wait, kind=VIEW))
        if number:
            new = {ops[i].name: f"{ops[i].name}{number}" for i in reload.chain} | {name: wait.name}
            added[awaited] += [ops[i].reading(new, new[ops[i].name]) for i in reload.chain]
            for i in reload.readers:
                changed[i] = changed[i].reading(new, changed[i].name)
    unread = {ops[i].name for i in found.unread}
    inserted = (op for op in _inserted(changed, added) if op.name not in unread)
    return tuple(inserted), tuple(copies)


def host_name(name: str) -> str:
    """The name of the input that a value on the host is in a backward."""
    return f"{name}:host"


def _copy_op(name: str, inputs: tuple[str, ...], node: str, action: str, size: int = 0) -> Value:
    node = "" if node == name else node
    return Value(name, size, inputs, CALL, node=node, action=action, pinned=True, savable=False)


def _inserted(ops: Sequence[Value], added: dict[int, list[Value]]) -> tuple[Value, ...]:
    """The ops, with others in front of those of given positions."""
    found: list[Value] = []
    for i, op in enumerate(ops):
        found += added.get(i, ())
        found.append(op)
    return (*found, *added.get(len(ops), ()))


def with_rows_from_host(ops: Sequence[Value], names: Set[str], host: Host) -> Sequence[Value]:
    """The ops of a backward in which loops copy rows of these values, which are inputs of it."""
    if not names:
        return ops
    views: dict[str, Value] = {}  # the values and views of them
    found: list[Value] = []
    written: set[str] = set()

    def write(name: str) -> str:
        """The value on the host, or the view of it, in place of one on the device."""
        for shown in reversed([*walk([name], lambda n: () if n in names else views[n].inputs[:1])]):
            new, op = f"{shown}:rows", views[shown]
            if new not in written and shown in names:
                rows = Value(new, 0, (host_name(shown),), VIEW, pinned=True, savable=False)
                found.append(dataclasses.replace(rows, node=op.node_name, action=ROWS_ON_HOST))
            elif new not in written:
                found.append(op.reading({op.inputs[0]: f"{op.inputs[0]}:rows"}, new))
            written.add(new)
        return f"{name}:rows"

    for op in ops:
        if op.name in names or (op.kind == VIEW and op.inputs and op.inputs[0] in views):
            views[op.name] = op
        rows = {name: size for name, size in op.in_rows if name in views}
        if rows:
            copied_bytes = sum(views[name].bytes for name in rows)
            op = dataclasses.replace(
                op.reading({name: write(name) for name in rows}, op.name),
                inner_bytes=op.inner_bytes + sum(rows.values()),
                us=op.us + copied_bytes / host.reload_bytes_per_us,
            )
        found.append(op)
    return found
