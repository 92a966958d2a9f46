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

Records the graphs that a compiled step gives to Inductor, and lints them pair by pair.

The graphs are copied in Inductor's hook ``post_grad_custom_pre_pass``, which sees forward and
backward before Inductor's own rewrites. Every backend that ends in Inductor calls this hook,
``mst`` among them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from mstpass.graph.joint import ancestors, is_tangent, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.narrow_offsets import NarrowCall, narrow_calls
from mstpass.graph.node_cost import flops, total_flops
from mstpass.graph.sizes import hint
from mstpass.graph.source_location import source_of
from mstpass.linter.report import (
    BOUNDARY,
    DEAD,
    DUPLICATE,
    NARROW,
    SAVED,
    Finding,
    LintError,
    LintReport,
)
from mstpass.report.store import reports
from mstpass.torch_internals.graphs import HigherOrderOperator, OpOverload, graph_module, schema_of
from mstpass.torch_internals.inductor import CustomGraphPass
from mstpass.torch_internals.settings import inductor_graphs_given_to, inductor_setting
from mstpass.walk import walk_once

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

        def is_gradient(value: fx.Node) -> bool:
            return self.number_of[value] not in self._forward_of

        def readers(value: fx.Node) -> Iterable[fx.Node]:
            return () if is_gradient(value) or self._leaves_block(value) else value.users

        reached = set(walk_once([node], readers))
        if any(map(is_gradient, reached)):
            return set()
        return {value.name for value in reached if self._leaves_block(value)}

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


# ---- compiled graphs -----------------------------------------------------------------------------
def read_compiled(step: Callable[[Callable[[], bool]], None]) -> LintReport:
    """Run a step and report on what it compiles.

    Args:
        step: gets a function that tells whether a backward has been compiled.

    Raises:
        LintError: no graph was compiled, or none with a backward.
    """
    record = Record(inductor_setting("post_grad_custom_pre_pass"))
    earlier = set(map(id, reports()))
    torch.compiler.reset()
    try:
        with inductor_graphs_given_to(record):
            step(lambda: record.has_backward)
    finally:
        torch.compiler.reset()  # the code compiled here refers to the hook
    if not record.graphs:
        raise LintError(
            "Inductor compiled nothing in this step: call a function that "
            "torch.compile(..., backend='mst') or backend='inductor' returned"
        )
    if not record.has_backward:
        raise LintError(
            "no backward was compiled: call backward on a loss that a compiled function computes"
        )
    plans = [r.outcome.save_plan for r in reports() if id(r) not in earlier]
    nested = any(plan is not None and plan.nested for plan in plans)
    return _merge([read_graphs(*pair) for pair in _pairs(record.graphs)], nested)


class Record(CustomGraphPass):
    """A pass of Inductor's that copies each graph. A pass that the user has set still runs."""

    def __init__(self, users_pass: Any):
        self.graphs: list[fx.GraphModule] = []
        self._users_pass = users_pass

    def __call__(self, graph: fx.Graph) -> None:
        owner = graph.owning_module
        assert owner is not None, "the owner is known"
        # the bodies of loops and branches have come before the graph that contains them: drop them
        inner = set(owner.modules())
        self.graphs = [graph for graph in self.graphs if graph.meta["copy_of"] not in inner]
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        module = graph_module(owner, copy)
        module.meta["copy_of"] = owner
        self.graphs.append(module)
        if self._users_pass is not None:
            self._users_pass(graph)

    @property
    def has_backward(self) -> bool:
        return any(map(_is_backward, self.graphs))

    def uuid(self) -> None:
        return None


def _is_backward(module: fx.GraphModule) -> bool:
    return any(map(is_tangent, module.graph.nodes))


def _pairs(modules: list[fx.GraphModule]) -> list[tuple[fx.GraphModule, ...]]:
    """Each backward with the forward that shares most of its saved values."""
    forwards = [module for module in modules if not _is_backward(module)]
    pairs: list[tuple[fx.GraphModule, ...]] = []
    for backward in filter(_is_backward, modules):
        match = max(forwards, key=lambda forward: _shared(forward, backward), default=None)
        if match is None:
            pairs.append((backward,))
            continue
        forwards.remove(match)
        pairs.append((match, backward))
    return pairs + [(forward,) for forward in forwards]


def _shared(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """The number of saved values that have the name and shape of a forward value."""
    shapes = {node.name: _shape(node) for node in forward.graph.nodes}
    saved = (n for n in backward.graph.nodes if n.op == "placeholder" and not is_tangent(n))
    return sum(shapes.get(node.name, ()) == _shape(node) for node in saved)


def _shape(node: fx.Node) -> tuple[str, ...] | None:
    value = value_of(node)
    return None if value is None else tuple(map(str, value.shape))


def _merge(found: list[LintReport], nested: bool) -> LintReport:
    """One report of several; under a plan with ``nested`` recomputation, its repeats are a note."""
    step_flops = sum(report.step_flops for report in found)
    findings = [f for report in found for f in report.findings]
    notes = [f"{len(found)} compiled graph{'s' if len(found) > 1 else ''} read"]
    planned = [f for f in findings if nested and _runs_twice_in_backward(f)]
    if planned:
        wasted_share = LintReport.of(planned, step_flops).wasted_share
        notes.append(
            f"{len(planned)} matmuls run twice in backward ({100 * wasted_share:.1f}% of the "
            "step): under this memory_budget mst recomputes at two levels; a larger budget needs "
            "fewer recomputations"
        )
        findings = [f for f in findings if f not in planned]
    return LintReport.of(findings, step_flops, notes=tuple(notes))


def _runs_twice_in_backward(finding: Finding) -> bool:
    return finding.kind == DUPLICATE and finding.forward_runs > 0 and finding.recompute_runs > 1
