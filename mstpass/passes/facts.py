"""What may hold of a graph, and how it is checked: plain data, which passes name.

A fact is checked of a graph and the one before it. What was wrong before is not found again: the
tracer's and Inductor's own passes leave wrong values behind (docs/pytorch-internals.md). Only nodes
that have changed are looked at, so that a check costs as much as the pass changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.input_writes import BEFORE_WRITE
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.renew_values import order_of_copy
from mstpass.passes.values import body_differences, difference, layout_difference, signature
from mstpass.walk import walk

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Fault:
    """A node of which a fact does not hold, and why."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} {self.reason}"


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something that may hold of a graph.

    Attributes:
        faults: the nodes of the second graph of which it does not hold; the first graph is the one
            before the pass.
    """

    name: str
    faults: Callable[[JointGraph, JointGraph], Iterator[Fault]]


def _inexact(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    # A copy under another name has the recorded value itself.
    original = {id(node.meta["val"]): node for node in before.nodes if "val" in node.meta}
    for node in after.nodes:
        old = before.by_name.get(node.name) or original.get(id(node.meta.get("val")))
        if old is not None and (node is old or signature(node) == signature(old)):
            continue
        found = difference(node)
        if found and (old is None or difference(old) != found):
            yield Fault(node.name, found)


def _changed_results(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    (recorded,), (results,) = before.output.args, after.output.args
    assert isinstance(recorded, tuple | list), "the recorded results are a list"
    assert isinstance(results, tuple | list), "the results are a list"
    if len(recorded) != len(results):
        yield Fault("output", f"has {len(results)} results in place of {len(recorded)}")
        return
    for old, new in zip(recorded, results, strict=True):
        if not isinstance(old, fx.Node) or not isinstance(new, fx.Node):
            if old is not new and (isinstance(old, fx.Node) or isinstance(new, fx.Node)):
                yield Fault("output", f"has {new} in place of {old}")
            continue
        traced, value = value_of(old), value_of(new)
        # What is no copy, such as an expanded value, may become one.
        if traced is not None and value is not None and order_of_copy(traced) is not None:
            if found := layout_difference(traced, value):
                yield Fault(new.name, f"is a result of the step: {found}")


def _wrong_phases(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    known = {  # a copy has the recorded value itself; by their names alone nodes may be mistaken
        (node.name, id(node.meta["val"]))
        for node in before.nodes
        if "val" in node.meta and node not in before.backward
    }
    late = {node.name for node in before.forward_outputs if node in before.backward}
    for node in after.forward_outputs:
        if node in after.backward and node.name not in late:
            yield Fault(node.name, "is a result of the forward, but depends on a tangent")
    for node in after.nodes:
        if node in after.backward and (node.name, id(node.meta.get("val"))) in known:
            yield Fault(node.name, "belongs to the forward, but depends on a tangent")


def _too_early(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """Nodes before what they read, and nodes behind a write that must come before it."""
    for node in after.nodes:
        late = [n for n in node.all_input_nodes if after.index.get(n, -1) >= after.index[node]]
        if late:
            yield Fault(node.name, f"reads {late[0].name} before it is written")
    changed = dict(_readers_behind_writes(before))
    for name, written in _readers_behind_writes(after):
        if changed.get(name) != written:
            yield Fault(name, f"reads {written} after it was overwritten")


def _readers_behind_writes(joint: JointGraph) -> Iterator[tuple[str, str]]:
    """Nodes that read an input behind the write that replaces it, and the input."""
    for write in joint.nodes:
        if write.target is not aten.copy_.default:
            continue
        written = write.args[0]
        assert isinstance(written, fx.Node), "what is written is a node"
        for reader in _readers(written):
            behind = joint.index[reader] > joint.index[write]
            if behind and reader.op != "output" and reader.target is not BEFORE_WRITE:
                yield reader.name, written.name


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    reached = walk(node.users, lambda user: user.users if ops.shares_storage(user) else ())
    return (reader for reader in reached if not ops.shares_storage(reader))


def _loops(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    for node in after.nodes:
        if node.target is mst_loop:
            yield Fault(node.name, "is a loop")


def _impure_loops(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    for node in after.nodes:
        if node.target is not mst_loop:
            continue
        old = before.by_name.get(node.name)
        if old is not None and signature(old) == signature(node):
            continue
        body = getattr(after.module, str(node.args[0].target))  # type: ignore[union-attr]
        for found in body_differences(node, body.graph):
            yield Fault(node.name, found)


EXACT_VALUES = Fact("recorded values are those of the ops", _inexact)
SAME_RESULTS = Fact("results have the layouts that were traced", _changed_results)
PHASES = Fact("no node of the forward depends on a tangent", _wrong_phases)
ORDER = Fact("nothing is read before it is written", _too_early)
NO_LOOPS = Fact("there are no loops", _loops)
PURE_LOOPS = Fact("bodies of loops are pure and fit their operands", _impure_loops)

ALWAYS = (EXACT_VALUES, SAME_RESULTS, PHASES, ORDER)  # of a joint graph
FINISHED = (EXACT_VALUES, ORDER)  # of a forward or a backward graph
