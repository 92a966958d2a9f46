"""Large values at the peak of which neither a loop nor a refusal tells.

Loops are looked for around products that widen tokens. Where something else makes the peak (a
convolution, correlations of features, layers of equal width), nothing was refused, so nothing would
be said of it.

The peaks of one plan for batches of several lengths, in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstpass.byte_sizes import bytes_text
from mstpass.plans import Outcome
from mstpass.report.data import ReportData
from mstpass.report.details import DrawnNode, Life, node_name
from mstpass.report.layer_paths import fold_numbers
from mstpass.walk import walk_once


def by_length_text(outcome: Outcome) -> str:
    """For which batches the plan is made, its peaks there, and for which of them a budget holds."""
    first, *others = outcome.peaks

    def sizes_text(sizes: Sequence[tuple[str, int]]) -> str:
        return " and ".join(f"{size}" for _, size in sizes)

    names = " and ".join(f"{name} up to {size}" for name, size in first.sizes)
    text = f"planned for {names}; simulated peak {bytes_text(first.peak_bytes)}"
    text += "".join(f", {bytes_text(p.peak_bytes)} at {sizes_text(p.sizes)}" for p in others)
    if outcome.budget_holds_for and outcome.budget_holds_for != first.sizes:
        text += f"; the budget holds up to {sizes_text(outcome.budget_holds_for)}"
    return text


# ---- values without loops ------------------------------------------------------------------------
_LEAST = 0.05  # of the peak: one value
_MUCH = 0.5  # of the peak: all of them
_WHY = "no product there widens tokens, by 1.5 times or more, which is where loops are looked for"
_FIX = "compute it for a part of the rows at a time, each part under torch.utils.checkpoint"


def unlooked(report: ReportData) -> list[tuple[str, str]]:
    """Labels and texts about these values, if they are much of the peak; else none."""
    found = _values(report)
    if not found:
        return []
    places = list(dict.fromkeys(fold_numbers(n.module) or n.source or n.name for n in found))
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    count, size = len(found), bytes_text(sum(node.bytes for node in found))
    said = f"{count} value{'s' if count > 1 else ''} at the peak, {size}, of {places[0]}{more}"
    return [("  has no loops: ", said), ("      why: ", _WHY), ("      fix: ", _FIX)]


def _values(report: ReportData) -> list[DrawnNode]:
    """They, the largest first; none if they are little."""
    after = report.details.after if report.details else None
    if report.details is None or after is None or not after.bytes:
        return []
    nodes = {node.name: node for node in report.details.nodes}
    peak, ran = after.peak_bytes, set(map(node_name, after.moments))
    users: dict[str, list[str]] = {}
    for node in report.details.nodes:
        for name in node.inputs:
            users.setdefault(name, []).append(node.name)
    inputs = {node.name: node.inputs for node in report.details.nodes}

    def is_meant(life: Life) -> bool:
        node = nodes.get(node_name(life.node))
        if node is None or node.region >= 0 or node.op == "input" or life.transient:
            return False
        readers = _reached(node.name, users)
        if life.bytes <= _LEAST * peak or ran.isdisjoint(readers - {node.name}):
            return False  # small, or a result of the step, such as the gradient of a weight
        refused = {r.node for r in report.rejections if not r.bytes or 2 * r.bytes >= life.bytes}
        if node.source and node.source in {nodes[name].source for name in refused & nodes.keys()}:
            return False
        return refused.isdisjoint(readers | _reached(node.name, inputs))

    found = [life for life in after.alive_at(after.bytes.index(peak)) if is_meant(life)]
    if sum(life.bytes for life in found) < _MUCH * peak:
        return []
    return [nodes[node_name(life.node)] for life in found]


def _reached(name: str, following: Mapping[str, Sequence[str]]) -> set[str]:
    """A node, and all that is reached from it."""
    return set(walk_once([name], lambda one: following.get(one, ())))
