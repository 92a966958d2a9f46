"""A report as text, within one screen however deep the model: equal layers are one line."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from mstpass.plans import ChunkPlan, Rejection
from mstpass.problem.problem import LOOP, is_loop
from mstpass.report.data import ReportData
from mstpass.report.details import (
    BACKWARD,
    RECOMPUTED,
    RECONSTRUCTED,
    SAVED,
    DrawnNode,
    Life,
    MemoryTimeline,
)
from mstpass.report.fold_layers import folded, grouped, layers
from mstpass.report.units import bytes_text

_LINES = 40  # of the whole report
_SHOWN = (7, 6, 5, 4, 3, 2, 1)  # items of each kind: the first with which it fits
_WIDTH = 110
_DEPTH = 3  # parts of a module's path that are told apart


def lines(report: ReportData) -> list[str]:
    nodes = {node.name: node for node in report.details.nodes} if report.details else {}
    found: list[str] = []
    for shown in _SHOWN:
        found = [
            "mstpass report" + (" (graph from the compile cache)" if report.cached else ""),
            *_peak(report),
            *_regions(report, nodes, shown),
            *_rejections(report.rejections, nodes, min(shown, 4)),
            *_crossing(report, nodes, shown),
            *_reconstructed(report),
            *_at_peak(report, nodes, shown),
            *(line for note in report.outcome.notes[:shown] for line in _wrapped("  note: ", note)),
        ]
        if len(found) <= _LINES:
            break
    return found


def _wrapped(label: str, text: str) -> list[str]:
    """What stands in backquotes stays on one line."""
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    rows = textwrap.wrap(kept, _WIDTH - len(label), break_long_words=False, break_on_hyphens=False)
    rows = [row.replace("\0", " ") for row in rows]
    return [(label if i == 0 else " " * len(label)) + row for i, row in enumerate(rows)]


def _peak(report: ReportData) -> list[str]:
    if report.peak_bytes is None:
        return []
    how = "simulated" if report.outcome.scheduled_peak_bytes is None else "scheduled"
    line = f"  {how} peak of forward and backward: {bytes_text(report.peak_bytes)}"
    if report.baseline_peak_bytes is not None and report.extra_time is not None:
        line += (
            f"; without loops {bytes_text(report.baseline_peak_bytes)}; "
            f"estimated extra time {100 * report.extra_time:.1f} %"
        )
    return [line]


# ---- regions and rejections --------------------------------------------------------------------
def _regions(report: ReportData, nodes: dict[str, DrawnNode], shown: int) -> list[str]:
    if not report.regions:
        return ["  nothing was chunked: the graph compiles as Inductor would compile it"]
    groups = grouped(report.regions, lambda r: (_run(r), folded(r.source), r.note))
    lines = ["  in chunks:"]
    for group in groups[:shown]:
        first = group[0]
        lines.append(f"    {_times(first.kind, group)}  {_run(first)}")
        lines.append(f"      {_where((r.source for r in group), _line_of(first, nodes))}")
        if first.note:
            lines += _wrapped("      note: ", first.note)
    return lines + _more(groups, shown)


def _run(region: ChunkPlan) -> str:
    chunks = f"{region.num_chunks} chunks of {region.chunk_tokens} of {region.num_tokens} tokens"
    if region.symbolic:
        chunks = f"chunks of up to {region.chunk_tokens} tokens ({region.num_tokens} when traced)"
    return (
        f"{region.mode:<9}  {chunks}, "
        f"{bytes_text(region.bytes_before)} -> {bytes_text(region.bytes_after)}"
    )


def _line_of(region: ChunkPlan, nodes: dict[str, DrawnNode]) -> str:
    """Of its largest matrix product in the forward."""
    members = [nodes[name] for name, _ in region.members if name in nodes]
    products = [n for n in members if n.phase != BACKWARD and n.op in ("mm", "addmm", "bmm")]
    return max(products, key=lambda node: node.bytes).source if products else ""


def _rejections(
    rejections: Sequence[Rejection], nodes: dict[str, DrawnNode], shown: int
) -> list[str]:
    if not rejections:
        return []
    groups = grouped(rejections, lambda r: (r.reason, r.fix, folded(r.source)))
    groups.sort(key=lambda group: -sum(r.bytes for r in group))
    lines = ["  not in chunks:"]
    for group in groups[:shown]:
        first = group[0]
        line = nodes[first.node].source if first.node in nodes else ""
        name = _times(layers(r.source for r in group) or first.node, group)
        size = f", {bytes_text(first.bytes)}" if first.bytes else ""
        each = " each" if size and len(group) > 1 else ""
        at = f", at {first.node}" + (f" in {line}" if line else "") if line else ""
        lines.append(f"    {name}{size}{each}{at}")
        lines += _wrapped("      why: ", first.reason)
        if first.fix:
            lines += _wrapped("      fix: ", first.fix)
    return lines + _more(groups, shown)


def _times(name: str, group: Sequence[object]) -> str:
    return f"{name} x {len(group)}" if len(group) > 1 else name


def _where(sources: Iterable[str], line: str) -> str:
    where = layers(sources)
    return ", ".join(dict.fromkeys(filter(None, (where, line))))


# ---- what crosses ------------------------------------------------------------------------------
@dataclasses.dataclass
class _Crossing:
    saved_bytes: int = 0
    recomputed_bytes: int = 0
    reconstructed_bytes: int = 0


def _crossing(report: ReportData, nodes: dict[str, DrawnNode], shown: int) -> list[str]:
    plan = report.outcome.save_plan
    if plan is None:
        return []
    count = f"{len(plan.saved)} value{'s' if len(plan.saved) != 1 else ''}"
    lines = [f"  saved for backward: {count}, {bytes_text(plan.saved_bytes)} ({plan.solver})"]
    if plan.nested:
        lines += _wrapped(
            "  nested: ",
            f"{len(plan.nested)} values are recomputed from these in passes of their own; what "
            "they come from runs three times",
        )
    rows: dict[str, _Crossing] = {}
    for value in plan.saved:
        node = nodes.get(value.value)
        rows.setdefault(_module(node, value.source), _Crossing()).saved_bytes += value.bytes
    for node in nodes.values():
        if node.fate == RECOMPUTED:
            rows.setdefault(_module(node), _Crossing()).recomputed_bytes += node.bytes
        elif node.fate == RECONSTRUCTED:
            rows.setdefault(_module(node), _Crossing()).reconstructed_bytes += node.bytes
    ranked = sorted(rows.items(), key=lambda row: (-row[1].saved_bytes, -row[1].recomputed_bytes))
    if ranked:
        width = max(len(name) for name, _ in ranked[:shown])
        lines.append(f"    {'':{width}} {SAVED:>12} {RECOMPUTED:>12} {RECONSTRUCTED:>13}")
    for name, row in ranked[:shown]:
        cells = [bytes_text(size) if size else "-" for size in dataclasses.astuple(row)]
        lines.append(f"    {name:{width}} {cells[0]:>12} {cells[1]:>12} {cells[2]:>13}")
    return lines + _more(ranked, shown)


def _module(node: DrawnNode | None, otherwise: str = "") -> str:
    path = folded(node.module, _DEPTH) if node is not None else folded(otherwise, _DEPTH)
    return path or (node.source if node is not None else "") or "elsewhere"


def _reconstructed(report: ReportData) -> list[str]:
    """By rule, as layers repeat."""
    if not report.reconstructed:
        return []
    won = sum(item.bytes for item in report.reconstructed)
    rules = Counter((item.rule, item.grade) for item in report.reconstructed)
    told = "; ".join(f"{n} by {rule}, {grade}" for (rule, grade), n in rules.most_common(3))
    first = max(report.reconstructed, key=lambda item: item.bytes)
    where = f" ({first.source})" if first.source else ""
    return _wrapped(
        f"  reconstructed, {bytes_text(won)} less: ", f"{told}; largest: {first.node}{where}"
    )


# ---- the peak ----------------------------------------------------------------------------------
def _at_peak(report: ReportData, nodes: dict[str, DrawnNode], shown: int) -> list[str]:
    after = report.details.after if report.details else None
    if after is None or not after.bytes:
        return []
    moment = after.bytes.index(after.peak_bytes)
    runs = nodes.get(after.moments[moment].removeprefix(LOOP))
    phase = "forward" if moment < after.first_backward else "backward"
    where = _where([runs.module], runs.source) if runs else ""
    lines = [f"  at the peak, in the {phase}" + (f", {where}" if where else "") + ":"]
    groups = grouped(after.alive_at(moment), lambda life: _holds(life, after, nodes))
    groups.sort(key=lambda group: -_total(group))
    shown = min(shown, sum(100 * _total(group) >= after.peak_bytes for group in groups))
    for group in groups[:shown]:
        what, module, source = _holds(group[0], after, nodes)
        number = f" x {len(group)}" if len(group) > 1 else ""
        place = ", ".join(filter(None, (module, source)))
        lines.append(f"    {bytes_text(_total(group)):>10}  {what}{number}  {place}".rstrip())
    rest = groups[shown:]
    if rest:
        left = sum(_total(group) for group in rest)
        lines.append(f"    {bytes_text(left):>10}  in {sum(map(len, rest))} others")
    return lines


def _total(group: Sequence[Life]) -> int:
    return sum(life.bytes for life in group)


def _holds(life: Life, timeline: MemoryTimeline, nodes: dict[str, DrawnNode]) -> tuple[str, ...]:
    """What a buffer is, and where it comes from."""
    node = nodes.get(life.node.removeprefix(LOOP))
    module = folded(node.module) if node else ""
    source = node.source if node else life.node
    if life.transient:
        return "one chunk" if is_loop(life.node) else "workspace", module, source
    if node is not None and node.phase == BACKWARD:
        return "gradient", module, source
    crosses = life.start < timeline.first_backward < life.end
    again = life.start >= timeline.first_backward
    return "saved" if crosses else "computed again" if again else "value", module, source


def _more(items: Sequence[object], shown: int) -> list[str]:
    return [f"    ... and {len(items) - shown} more"] if len(items) > shown else []
