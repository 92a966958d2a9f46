"""Findings on a compiled step, by value numbering of its forward and backward graphs.

Two nodes get the same number if they are the same op on operands with the same numbers. A
placeholder of the backward gets the number of the forward value that it holds. A backward node is
*recomputed* if the forward has its number. For matmuls and attention the linter reports

- duplicates: two nodes of one graph with one number;
- nodes that are recomputed although their value is saved;
- nodes that are recomputed only for an output of a checkpointed block that later code reads (eager
  keeps that output, because it is an input of the later code; torch's partitioner recomputes it);
- nodes whose result nothing reads.

It also reports calls on tensors that are too large for their kernels (graph/narrow_offsets.py).

In the backward, saved values and copies of forward nodes have the names of their forward nodes.
``meta["ac_graph_id"]`` tells checkpointed blocks apart (torch/_functorch/partitioners.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from mstpass.graph.joint import ancestors
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.narrow_offsets import NarrowCall, narrow_calls
from mstpass.graph.node_cost import flops, total_flops
from mstpass.graph.sizes import hint
from mstpass.graph.source_location import source_of
from mstpass.linter.report import BOUNDARY, DEAD, DUPLICATE, NARROW, SAVED, Finding, LintReport
from mstpass.torch_internals.graphs import HigherOrderOperator, OpOverload, schema_of

Number = int
GraphLike = fx.Graph | fx.GraphModule


def read_graphs(forward: GraphLike, backward: GraphLike | None = None) -> LintReport:
    """The report on a forward and backward graph, or on a joint graph: see `lint_graphs`."""
    pair = [g.graph if isinstance(g, fx.GraphModule) else g for g in (forward, backward) if g]
    findings = (*_ValueNumbering(pair).findings(), *map(_narrow, narrow_calls(pair)))
    return LintReport.of(findings, sum(map(graph_flops, pair)))


def _narrow(call: NarrowCall) -> Finding:
    return Finding(NARROW, call.node, 0, 0, 0, 0.0, call.why, call.fix, call.source)


def graph_flops(graph: fx.Graph) -> int:
    """Flops of the matmuls and attention of a graph, including those in mstpass's loops."""
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


class _ValueNumbering:
    """The value numbers of a pair of graphs (or of one joint graph), and the findings on them."""

    def __init__(self, pair: list[fx.Graph]):
        self.pair = pair
        self._numbers: dict[Hashable, Number] = {}
        self.number_of: dict[fx.Node, Number] = {}
        self._forward_by_name = {node.name: node for node in pair[0].nodes}
        for graph in pair:
            for node in graph.nodes:
                self.number_of[node] = self._number(node)
        self._forward_of = {self.number_of[n]: n for n in reversed(pair[0].nodes)}

    def _number(self, node: fx.Node) -> Number:
        """The number of a node whose operands have theirs.

        A recomputed random op is another op by structure; its name tells which node it copies.
        """
        original = self._forward_by_name.get(node.name, node)
        copied = original is not node and original in self.number_of
        if copied and node.op == "placeholder":
            return self.number_of[original]
        key: Hashable = node
        if node.op == "call_function" and _is_repeatable(node):
            arguments = map_aggregate((node.args, node.kwargs), self._argument)
            key = (node.target, _hashable(arguments))
        if copied and key not in self._numbers and node.target == original.target:
            self._numbers[key] = self.number_of[original]
        return self._numbers.setdefault(key, len(self.number_of))

    def _argument(self, value: Any) -> Any:
        return ("node", self.number_of[value]) if isinstance(value, fx.Node) else value

    def findings(self) -> list[Finding]:
        found = [f for graph in self.pair for f in self._of_one_graph(graph)]
        return found + [f for graph in self.pair[1:] for f in self._recomputed(graph)]

    def _of_one_graph(self, graph: fx.Graph) -> Iterator[Finding]:
        """Dead nodes and duplicates."""
        alive = ancestors([graph.output_node()])
        first: dict[Number, fx.Node] = {}
        for node in graph.nodes:
            if not flops(node):
                continue
            if node not in alive:
                fix = "call graph.eliminate_dead_code()"
                yield self._finding(DEAD, node, "nothing reads its result", fix)
                continue
            earlier = first.setdefault(self.number_of[node], node)
            if earlier is not node:
                cause = f"it is the same op on the same operands as {earlier.name}"
                fix = f"read {earlier.name} instead: eliminate common subexpressions"
                yield self._finding(DUPLICATE, node, cause, fix)

    def _recomputed(self, backward: fx.Graph) -> Iterator[Finding]:
        alive = ancestors([backward.output_node()])
        saved = {self.number_of[n]: n for n in backward.nodes if n.op == "placeholder"}
        for node in backward.nodes:
            number = self.number_of[node]
            if not flops(node) or node not in alive or number not in self._forward_of:
                continue
            blocks = self._block_outputs(node)
            if number in saved:
                name = saved[number].name
                cause = f"its value is saved already, as {name}"
                yield self._finding(SAVED, node, cause, f"read {name} instead")
            elif blocks:
                cause = (
                    f"it is recomputed only for {', '.join(sorted(blocks))}, an output of a "
                    "checkpointed block; eager checkpointing keeps that output"
                )
                fix = (
                    "save its result: pass create_selective_checkpoint_contexts with MUST_SAVE "
                    "for this op to checkpoint()"
                )
                yield self._finding(BOUNDARY, node, cause, fix)

    def _block_outputs(self, node: fx.Node) -> set[str]:
        """The outputs of checkpointed blocks through which gradients read the node.

        Empty if a gradient also reads it on another way.
        """
        blocks: set[str] = set()
        stack, seen = [node], {node}
        while stack:
            value = stack.pop()
            if self._leaves_block(value):
                blocks.add(value.name)
                continue
            for user in value.users:
                if self.number_of[user] not in self._forward_of:
                    return set()  # a gradient reads the value itself
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
        return blocks

    def _leaves_block(self, node: fx.Node) -> bool:
        """Whether the forward reads the value outside of the checkpointed block."""
        original = self._forward_of[self.number_of[node]]
        block = _block(original)
        # torch inserts higher-order ops around random ops; these belong to no block
        ops = (user for user in original.users if isinstance(user.target, OpOverload))
        return block is not None and any(_block(user) != block for user in ops)

    def _finding(self, kind: str, node: fx.Node, cause: str, fix: str) -> Finding:
        number = self.number_of[node]
        runs = [sum(self.number_of[n] == number for n in g.nodes if flops(n)) for g in self.pair]
        return Finding(
            kind=kind,
            module=node.name,
            forward_runs=runs[0],
            recompute_runs=runs[1] if len(runs) > 1 else 0,
            wasted_flops=flops(node),
            wasted_share=0.0,
            cause=cause,
            fix=fix,
            source=source_of(node),
        )


def _block(node: fx.Node) -> Any:
    return node.meta.get("ac_graph_id")


def _is_repeatable(node: fx.Node) -> bool:
    """Whether the op gives the same result each time: it draws and writes nothing."""
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
