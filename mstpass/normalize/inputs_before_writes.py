"""Backward reads an input that the step overwrites as it was before: ``mstpass::before_write``.

A step may write to its inputs, as a model does to its buffers: AOTAutograd traces it without writes
and puts them after everything else. Some are ``aten.copy_`` at the end of the forward graph, others
are new values that the forward returns and that are copied when it has run. In both cases the
input's old value is gone in backward. A partitioner that saves the input, and recomputes from it
what the forward read, does so from the new value: gradients are silently wrong, or autograd refuses
the saved input, as its version is not the one that was saved. torch's own partitioner does not mind
this (pytorch/pytorch#197039 and #185876, both open in November 2026).

So everything but the write reads the input through an op that a partitioner cannot repeat and that
no loop takes in. It becomes a copy, which Inductor leaves out unless backward needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mstpass.graph.input_writes import BEFORE_WRITE
from mstpass.graph.joint import JointGraph, Modules, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import is_size
from mstpass.walk import walk_once

aten = torch.ops.aten


def inputs_before_writes(joint: JointGraph) -> Rewritten:
    """A copy of the graph that has the ops, of which none counts as changed; the graph itself if it
    needs none."""
    names = overwritten_inputs(joint)
    if not names:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    new = rewriting.joint
    first_call = next(node for node in new.nodes if node.op != "placeholder")
    for name in names:
        node = new.by_name[name]
        readers = _early_readers(node, new)
        with rewriting.graph.inserting_before(first_call):
            before = rewriting.builder.call(BEFORE_WRITE, node)
        rewriting.replace(node, before, readers)
    return rewriting.finished(), frozenset()


def overwritten_inputs(joint: JointGraph) -> list[str]:
    """The names of the inputs that need an op: without them gradients may be wrong."""
    return [node.name for node in _overwritten(joint) if _backward_depends_on(node, joint)]


def as_copies(modules: Modules) -> None:
    """Replace the ops by copies, in the forward and the backward graph."""
    for module in modules:
        found = module.graph.find_nodes(op="call_function", target=BEFORE_WRITE)
        for node in found:
            node.target = aten.clone.default
        if found:
            module.recompile()


def _overwritten(joint: JointGraph) -> Iterator[fx.Node]:
    """The inputs that are written after all other ops of the forward, and never before."""
    returned = set(_overwritten_by_returned_values(joint))
    for node in joint.nodes:
        if node.op != "placeholder" or node in joint.backward or value_of(node) is None:
            continue
        writes = [user for user in node.users if _writes(user, node)]
        reads = [joint.index[n] for n in _readers(node) if n not in joint.backward]
        at_end = bool(writes) and joint.index[writes[0]] > max(reads, default=0)
        if at_end or (not writes and getattr(node.meta.get("desc"), "idx", None) in returned):
            yield node


def _overwritten_by_returned_values(joint: JointGraph) -> Iterator[int]:
    """The positions, among the step's inputs, of those whose new values the forward returns.

    Source: ``InputMutationAOTOutput`` in torch/_functorch/_aot_autograd/descriptors.py. A
    graph without descriptions has no such input as far as this can tell.
    """
    for description in (joint.output.meta.get("desc") or ())[: joint.num_fwd_outputs]:
        position = getattr(getattr(description, "mutated_input", None), "idx", None)
        if position is not None:
            yield position


def _writes(node: fx.Node, value: fx.Node) -> bool:
    return node.target is aten.copy_.default and node.args[0] is value


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read the value; those that read its sizes alone are none."""
    return [user for user in node.users if not _writes(user, node) and not is_size(user)]


def _early_readers(node: fx.Node, joint: JointGraph) -> list[fx.Node]:
    """The ops that read the value before the first write to it.

    An op of the backward reads what is there when it runs, if only the backward writes: after two
    forwards, the second of their backwards reads what the first has written.
    """
    writes = [user for user in node.users if _writes(user, node)]
    if not writes or any(write in joint.forward_writes for write in writes):
        return _readers(node)
    return [reader for reader in _readers(node) if reader in joint.forward]


def _backward_depends_on(node: fx.Node, joint: JointGraph) -> bool:
    later = walk_once(_early_readers(node, joint), lambda reader: reader.users)
    return any(reader in joint.backward for reader in later)
