"""Which scatters wait for their rows (schedule/delay_embedding_gradient.py).

A scatter waits if that frees memory: if its rows are smaller than what they are computed from and
nothing else reads. That depends on what is saved: it is asked of the ops of one graph, by the
simulation of a plan as by the schedule of the finished graphs, so that both have equal peaks.
Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from mstpass.problem.op import CONSTANT, INPUT, POINTWISE, SIZE, VIEW, Op
from mstpass.walk import walk, walk_once


def waits(
    scatter: Op, op: Mapping[str, Op], users: Mapping[str, Sequence[str]], freed: Set[str]
) -> bool:
    """Whether a scatter that may wait for its rows does, in a graph.

    Args:
        op: the ops of the graph, by name.
        users: the names of those that read each.
        freed: the inputs of the graph that are freed after their last use.
    """
    rows = scatter.inputs[-1]
    if rows not in op:
        return False
    in_kernel = lambda name: op[name].kind in (POINTWISE, VIEW)
    operands = lambda name: filter(op.__contains__, op[name].inputs) if in_kernel(name) else ()
    read = [*walk_once([rows], operands)]
    pointwise = set(filter(in_kernel, read))  # computed in the kernel of the rows
    others = (name for name in read if name not in pointwise)
    buffers = (n for n in others if n in freed or op[n].kind not in (INPUT, CONSTANT, SIZE))
    only_here = (b for b in buffers if pointwise.issuperset(_readers(b, op, users)))
    return op[rows].bytes < sum(op[buffer].bytes for buffer in only_here)


def _readers(name: str, op: Mapping[str, Op], users: Mapping[str, Sequence[str]]) -> set[str]:
    """What reads a value, itself or by a view."""
    further = lambda user: users.get(user, ()) if op[user].kind == VIEW else ()
    return {user for user in walk(users.get(name, ()), further) if op[user].kind != VIEW}
