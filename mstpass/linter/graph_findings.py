"""What a compiled step computes twice: values of the forward and backward graphs, numbered.

Two nodes get one number when they are the same op on operands of the same numbers; a backward
placeholder gets the number of the forward value that it was saved from. A backward node whose
number the forward has is *recomputed*. Of matmuls and attention we report

- duplicates: two nodes of one graph with one number;
- what is recomputed though its value was saved;
- what is recomputed only for the output of a checkpointed block that later code reads: eager keeps
  that output, as an input of what comes next, while torch's partitioner recomputes it;
- what nothing reads.

Saved and copied values carry their forward node's name into backward; ``ac_graph_id`` tells the
checkpointed blocks apart (torch/_functorch/partitioners.py; checked with torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from mstpass.graph.joint import ancestors
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.node_cost import flops, total_flops
from mstpass.graph.sizes import hint
from mstpass.graph.source_location import source_of
from mstpass.linter.report import BOUNDARY, DEAD, DUPLICATE, SAVED, Finding, LintReport
from mstpass.torch_internals.op_types import HigherOrderOperator, OpOverload, schema_of

Number = int
GraphLike = fx.Graph | fx.GraphModule


def read_graphs(forward: GraphLike, backward: GraphLike | None = None) -> LintReport:
    """See `mstpass.linter.lint_graphs`."""
    pair = [g.graph if isinstance(g, fx.GraphModule) else g for g in (forward, backward) if g]
    step_flops = sum(map(graph_flops, pair))
    found = _Reader(pair, step_flops).findings()
    return LintReport(tuple(sorted(found, key=lambda f: -f.wasted_flops)), step_flops)


def graph_flops(graph: fx.Graph) -> int:
    """Of matmuls and attention, those in mstpass's loops included."""
    return total_flops(graph.nodes) + sum(
        _loop_flops(node) for node in graph.nodes if node.target is mst_loop
    )


def _loop_flops(node: fx.Node) -> int:
    arguments: Any = node.args[:4]
    body, num_chunks, chunk_tokens, num_tokens = arguments
    owner = node.graph.owning_module
    if owner is None or not isinstance(body, fx.Node):
        return 0
    rows = num_tokens.meta["val"] if isinstance(num_tokens, fx.Node) else num_tokens
    chunks = num_chunks if num_chunks is not None else -(-hint(rows) // chunk_tokens)
    loop: Any = owner.get_submodule(str(body.target))
    return chunks * total_flops(loop.graph.nodes)


class _Reader:
    """The numbers of one pair of graphs, and what they show."""

    def __init__(self, pair: list[fx.Graph], step_flops: int):
        self.pair = pair
        self._share = 1 / step_flops if step_flops else 0.0
        self._numbers: dict[Hashable, Number] = {}
        self.number_of: dict[fx.Node, Number] = {}
        self._forward_by_name = {node.name: node for node in pair[0].nodes}
        for graph in pair:
            for node in graph.nodes:
                self.number_of[node] = self._number(node)
        self._forward_of = {self.number_of[n]: n for n in reversed(pair[0].nodes)}

    def _number(self, node: fx.Node) -> Number:
        """Structural; behind ops that are not repeatable the copy's name tells what it copies."""
        original = self._forward_by_name.get(node.name, node)
        copied = original is not node and original in self.number_of
        if copied and node.op == "placeholder":
            return self.number_of[original]
        key: Hashable = node
        if node.op == "call_function" and _repeatable(node):
            arguments = map_aggregate((node.args, node.kwargs), self._argument)
            key = (node.target, _hashable(arguments))
        if copied and key not in self._numbers and node.target == original.target:
            self._numbers[key] = self.number_of[original]
        return self._numbers.setdefault(key, len(self.number_of))

    def _argument(self, value: Any) -> Any:
        return ("node", self.number_of[value]) if isinstance(value, fx.Node) else value

    def findings(self) -> list[Finding]:
        found = [f for graph in self.pair for f in self._of_one_graph(graph)]
        return found + (self._recomputed(self.pair[1]) if len(self.pair) > 1 else [])

    def _of_one_graph(self, graph: fx.Graph) -> Iterator[Finding]:
        """Dead ops and duplicates."""
        alive = ancestors([_output(graph)])
        first: dict[Number, fx.Node] = {}
        for node in graph.nodes:
            if not flops(node):
                continue
            if node not in alive:
                yield self._finding(
                    DEAD, node, "nothing reads its result", "call eliminate_dead_code()"
                )
                continue
            twin = first.setdefault(self.number_of[node], node)
            if twin is not node:
                yield self._finding(
                    DUPLICATE,
                    node,
                    f"the same op on the same operands as {twin.name}",
                    f"read {twin.name} in its place (a CSE pass does that)",
                )

    def _recomputed(self, backward: fx.Graph) -> list[Finding]:
        alive = ancestors([_output(backward)])
        saved = {self.number_of[n]: n for n in backward.nodes if n.op == "placeholder"}
        found = []
        for node in backward.nodes:
            number = self.number_of[node]
            if not flops(node) or node not in alive or number not in self._forward_of:
                continue
            blocks = self._only_for(node)
            if number in saved:
                cause = f"its value is there: saved as {saved[number].name}"
                found.append(self._finding(SAVED, node, cause, f"read {saved[number].name}"))
            elif blocks:
                cause = (
                    f"recomputed only for {', '.join(sorted(blocks))}, what a checkpointed block "
                    "hands on; eager checkpointing keeps that"
                )
                fix = "save its result: create_selective_checkpoint_contexts with MUST_SAVE for it"
                found.append(self._finding(BOUNDARY, node, cause, fix))
        return found

    def _only_for(self, node: fx.Node) -> set[str]:
        """The block outputs through which alone gradients read the node; empty if not so."""
        blocks: set[str] = set()
        stack, seen = [node], {node}
        while stack:
            value = stack.pop()
            if self._leaves_block(value):
                blocks.add(value.name)
                continue
            for user in value.users:
                if self.number_of[user] not in self._forward_of:
                    return set()  # a gradient reads it
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
        return blocks

    def _leaves_block(self, node: fx.Node) -> bool:
        """Whether the forward reads the value outside of the checkpoint that computes it."""
        original = self._forward_of[self.number_of[node]]
        block = _block(original)
        # higher-order ops that torch inserts around random ones belong to no block
        ops = (user for user in original.users if isinstance(user.target, OpOverload))
        return block is not None and any(_block(user) != block for user in ops)

    def _finding(self, kind: str, node: fx.Node, cause: str, fix: str) -> Finding:
        waste, number = flops(node), self.number_of[node]
        runs = [sum(self.number_of[n] == number for n in g.nodes if flops(n)) for g in self.pair]
        return Finding(
            kind=kind,
            module=node.name,
            forward_runs=runs[0],
            recompute_runs=runs[1] if len(runs) > 1 else 0,
            wasted_flops=waste,
            wasted_share=waste * self._share,
            cause=cause,
            fix=fix,
            source=source_of(node),
        )


def _output(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def _block(node: fx.Node) -> Any:
    return node.meta.get("ac_graph_id")


def _repeatable(node: fx.Node) -> bool:
    """Whether the op gives the same result twice: no random numbers, and nothing is written."""
    target = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)
    return not schema_of(target).is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _hashable(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", *map(_hashable, (value.start, value.stop, value.step)))
    return (type(value).__name__, value)
