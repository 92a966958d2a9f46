"""Writes to the inputs of a step, such as the update of a buffer: ``aten.copy_`` at its end.

AOTAutograd traces a step that writes to an input as one that computes the new value, and copies it
to the input after everything else. Such a write can be split and planned like any other op: it runs
once, in the forward, and is never recomputed. It takes no memory, and what it copies is computed
where it is written.

A partitioner that saves an input and recomputes from it in the backward reads the new value there.
So everything but the write reads the old value through ``BEFORE_WRITE``
(normalize/plain_values.py). That op is pinned: backward cannot repeat it.

``unproven_write`` names the first write that has another form. torch's own partitioner splits its
graph:

- the backward writes: a second call of it would find other values than the first;
- an op other than ``copy_``, as FSDP's graphs have them, or one that writes to a value of the
  graph;
- an op after the write reads the input, or the result of the write: its place in the order counts.

Source: ``create_functionalized_fn`` in torch/_functorch/_aot_autograd/graph_capture_wrappers.py.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, is_tangent
from mstpass.torch_internals.graphs import own_op
from mstpass.walk import walk

BEFORE_WRITE = own_op("before_write(Tensor x) -> Tensor", torch.clone, torch.clone)


def is_input_write(node: fx.Node) -> bool:
    """Whether the op copies a value to an input of the graph."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    written = node.args[0]
    return isinstance(written, fx.Node) and written.op == "placeholder"


def unproven_write(joint: JointGraph) -> str:
    """Why a write of the graph is left to torch's partitioner; empty if there is none such."""
    return joint.cached(_unproven_write)


def _unproven_write(joint: JointGraph) -> str:
    if joint.backward_writes:
        return f"the backward writes to an input ({joint.backward_writes[0].name})"
    for write in joint.forward_writes:
        if not is_input_write(write):
            return f"{write.name} writes to its operands"
        (written, *_) = write.all_input_nodes
        if is_tangent(written) or write in joint.backward:
            return f"{write.name} writes what the backward computes"
        through_views = lambda node: node.users if ops.shares_storage(node) else ()
        for reader in (*walk(written.users, through_views), *write.users):
            if reader is not joint.output and joint.index[reader] > joint.index[write]:
                return f"{reader.name} reads {written.name} after {write.name} has written to it"
    return ""
