"""Records the graphs that a compiled step gives to Inductor, and lints them pair by pair.

The graphs are copied in Inductor's hook ``post_grad_custom_pre_pass``, which sees forward and
backward before Inductor's own rewrites. Every backend that ends in Inductor calls this hook,
``mst`` among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import is_tangent, value_of
from mstpass.linter.graph_findings import read_graphs
from mstpass.linter.report import DUPLICATE, Finding, LintError, LintReport
from mstpass.report.store import reports
from mstpass.torch_internals.graphs import graph_module
from mstpass.torch_internals.inductor import CustomGraphPass
from mstpass.torch_internals.settings import inductor_graphs_given_to, inductor_setting


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
