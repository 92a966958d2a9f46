"""Loops of the backward that copy rows from the host.

A value that waits on the host and is copied back whole is in memory all through the backward of its
block. A loop that reads it in rows needs those of one chunk at a time: the step of the loop copies
them itself, on the stream that computes, so that the loop takes longer by that time::

    v:host  ->  v:rows, a view of it  ->  views of that  ->  loop: + a chunk's rows, + the copies

What else reads the value reads a copy of all of it (reloads.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from mstpass.memory.host_copies import host_name
from mstpass.problem.host_memory import Host
from mstpass.problem.op import ROWS_ON_HOST, VIEW
from mstpass.problem.problem import Value
from mstpass.walk import walk


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
