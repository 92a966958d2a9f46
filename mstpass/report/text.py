"""A report as text that fits one screen, however deep the model: equal layers share one line.

The parts, from top to bottom: the peak memory, what runs in chunks, what does not and why, what
forward saves for backward, what is in memory at the peak, and notes. What does not run in chunks
and asks for no change shares one line. Each part lists its largest items first; the report shows as
many items of each part as keep it within ``_MOST_LINES``.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from mstpass.byte_sizes import bytes_text
from mstpass.plans import (
    ERROR_IN_16_BITS,
    INPUT,
    MOST_CHUNKS_IN_16_BITS,
    ChunkPlan,
    Rejection,
    SavePlan,
)
from mstpass.report.data import LEAST_PEAK_SHARE, ReportData, asks_for_change, phase_times
from mstpass.report.details import (
    BACKWARD,
    RECOMPUTED,
    RECONSTRUCTED,
    RELOAD,
    DrawnNode,
    Life,
    MemoryTimeline,
    is_loop,
    node_name,
)
from mstpass.report.layer_paths import fold_numbers, group_by, join_layers
from mstpass.report.unlooked import by_length_text, unlooked

_MOST_LINES = 40  # of the whole report
_MOST_ITEMS = (7, 6, 5, 4, 3, 2, 1)  # of each part: the first number with which the report fits
_MOST_REJECTIONS, _MOST_RULES = 4, 3
_WIDTH = 110
_MODULE_DEPTH = 3  # parts of a module's path by which saved values are added up

_IN_16_BITS = {"bfloat16", "float16"}

Nodes = Mapping[str, DrawnNode]


def report_lines(report: ReportData) -> list[str]:
    """The lines of ``str(report)``."""
    nodes = {node.name: node for node in report.details.nodes} if report.details else {}
    lines: list[str] = []
    for most in _MOST_ITEMS:
        lines = [
            f"mstpass report{' (graph from the compile cache)' if report.cached else ''}",
            *_peak_lines(report),
            *_region_lines(report.regions, nodes, most),
            *_rejection_lines(report, nodes, min(most, _MOST_REJECTIONS)),
            *_saved_lines(report, nodes, most),
            *_reconstructed_lines(report),
            *_at_peak_lines(report, nodes, most),
            *(line for note in report.outcome.notes[:most] for line in _wrap("  note: ", note)),
        ]
        if len(lines) <= _MOST_LINES:
            break
    return lines


def _peak_lines(report: ReportData) -> list[str]:
    """The simulated peaks, as planned and under Inductor alone, and apart from them the schedule's.

    And why a budget does not decide about what is saved, if it does not. A schedule's peak and a
    simulated one count different things: they do not share a line.
    """
    outcome, lines = report.outcome, list[str]()
    if outcome.no_plan:
        lines += _wrap("  no plan: ", outcome.no_plan)
    if outcome.peak_bytes is not None:
        line = f"  peak memory: {bytes_text(outcome.peak_bytes)} (simulated)"
        if outcome.baseline_peak_bytes is not None and outcome.extra_time is not None:
            line += (
                f", {bytes_text(outcome.baseline_peak_bytes)} under Inductor alone; "
                f"estimated extra time: {100 * outcome.extra_time:.1f} %"
            )
        lines.append(line)
    if outcome.scheduled_peak_bytes is not None:
        size = bytes_text(outcome.scheduled_peak_bytes)
        lines.append(f"  peak memory by Inductor's schedule: {size}")
    if outcome.peaks:
        lines += _wrap("  ", by_length_text(outcome))
    if outcome.left_to_torch:
        said = "torch's partitioner chose what is saved, without a budget, because mstpass cannot: "
        lines += _wrap("  ", said + outcome.left_to_torch)
    return lines


# ---- what runs in chunks -----------------------------------------------------------------------
def _region_lines(regions: Sequence[ChunkPlan], nodes: Nodes, most: int) -> list[str]:
    """For each group of equal regions: how it runs, where it is in the model, and what else to know
    of it."""
    if not regions:
        return ["  nothing runs in chunks"]
    groups = group_by(
        regions, lambda r: (_chunks_text(r), _sums_text(r, nodes), fold_numbers(r.source), r.note)
    )
    names = [_with_count(group[0].kind, group) for group in groups[:most]]
    width = max(map(len, names))
    lines = ["  runs in chunks:"]
    for name, group in zip(names, groups[:most], strict=True):
        first = group[0]
        lines.append(f"    {name:{width}}  {first.mode:<9}  {_chunks_text(first)}")
        place = _place(join_layers(r.source for r in group), _source_line(first, nodes))
        lines.append(f"      {place}".rstrip())
        if sums := _sums_text(first, nodes):
            lines += _wrap("      sums: ", sums)
        if first.note:
            lines += _wrap("      note: ", first.note)
    return lines + _more_line(groups, most)


def _sums_text(region: ChunkPlan, nodes: Nodes) -> str:
    """In which dtype sums over chunks are kept, if that is no wider than the results'."""
    loops = [loop for loop in region.loops if loop.accumulate == INPUT]
    names = {item.node for loop in loops for item in loop.outputs if item.spec is None}
    dtypes = sorted({nodes[name].dtype for name in names if name in nodes} & _IN_16_BITS)
    if not names or (nodes and not dtypes):
        return ""
    kept = f"kept in {' and '.join(dtypes) or 'the dtype of the results'}"
    if max(loop.cut.count for loop in loops) > MOST_CHUNKS_IN_16_BITS or region.unbounded:
        return f'{kept}, rounded at each chunk, as accumulate="input" asks'
    return f"{kept}: the error is at most {ERROR_IN_16_BITS} times that of eager mode"


def _chunks_text(region: ChunkPlan) -> str:
    chunks = (
        f"{region.num_tokens} {region.axis} in {region.num_chunks} chunks of {region.chunk_tokens}"
    )
    if region.symbolic:
        counted = "when traced" if region.unbounded else "at most"
        chunks = f"{region.num_tokens} tokens {counted}, in chunks of up to {region.chunk_tokens}"
    own = {loop.cut for loop in region.loops if loop.cut.axis != region.axis}
    chunks += "".join(f"; {c.total} {c.axis} in {c.count} chunks of {c.length}" for c in own)
    before, after = bytes_text(region.bytes_before), bytes_text(region.bytes_after)
    return f"{chunks}; large values: {before} -> {after}"


def _source_line(region: ChunkPlan, nodes: Nodes) -> str:
    """The user's line with the region's largest matrix product of the forward."""
    members = [nodes[name] for name, _ in region.members if name in nodes]
    products = [n for n in members if n.phase != BACKWARD and n.op in ("mm", "addmm", "bmm")]
    return max(products, key=lambda node: node.bytes).source if products else ""


# ---- what does not run in chunks ---------------------------------------------------------------
def _rejection_lines(report: ReportData, nodes: Nodes, most: int) -> list[str]:
    """What the user can change, what no loop was looked for in, and the rest in one line."""
    asked = [r for r in report.rejections if asks_for_change(r, report)]
    unasked = [r for r in report.rejections if r not in asked]
    others = [line for label, text in unlooked(report) for line in _wrap(label, text)]
    return [*_asked_lines(asked, nodes, most), *others, *_unasked_line(unasked)]


def _asked_lines(rejections: Sequence[Rejection], nodes: Nodes, most: int) -> list[str]:
    """For each group of equal rejections: the part, why it is whole, and what to change."""
    if not rejections:
        return []
    groups = group_by(rejections, lambda r: (r.reason, r.fix, fold_numbers(r.source)))
    groups.sort(key=lambda group: -sum(r.bytes for r in group))
    lines = ["  does not run in chunks:"]
    for group in groups[:most]:
        first = group[0]
        line = nodes[first.node].source if first.node in nodes else ""
        name = _with_count(join_layers(r.source for r in group) or first.node, group)
        size = f", {bytes_text(first.bytes)}" if first.bytes else ""
        each = " each" if size and len(group) > 1 else ""
        at = f", at {first.node} in {line}" if line else ""
        lines.append(f"    {name}{size}{each}{at}")
        lines += _wrap("      why: ", first.reason)
        if first.fix:
            lines += _wrap("      fix: ", first.fix)
    return lines + _more_line(groups, most)


def _unasked_line(rejections: Sequence[Rejection]) -> list[str]:
    """How many parts they are, of which size, and which."""
    if not rejections:
        return []
    count = f"{len(rejections)} part{'s' if len(rejections) != 1 else ''}"
    largest_first = sorted(rejections, key=lambda r: -r.bytes)
    size = f" of up to {bytes_text(largest_first[0].bytes)}" if largest_first[0].bytes else ""
    groups = group_by(largest_first, lambda r: fold_numbers(r.source) or r.node)
    first, *more = (join_layers(r.source for r in group) or group[0].node for group in groups)
    line = f"  stays whole, with nothing to change: {count}{size} ({first}"
    for name in more:
        if len(line) + len(name) > _WIDTH - len(", , ...)"):
            return [f"{line}, ...)"]
        line += f", {name}"
    return [f"{line})"]


# ---- what forward saves for backward -----------------------------------------------------------
@dataclasses.dataclass
class _ModuleBytes:
    """Of one module's forward values that backward uses: the bytes by fate."""

    saved: int = 0
    on_host: int = 0
    recomputed: int = 0
    reconstructed: int = 0


def _saved_lines(report: ReportData, nodes: Nodes, most: int) -> list[str]:
    """The saved bytes, and a table of what each module saves, recomputes and reconstructs."""
    plan = report.outcome.save_plan
    if plan is None:
        return []
    on_device = sum(not value.on_host for value in plan.saved)
    size = bytes_text(plan.saved_bytes)
    lines = [f"  saved for backward: {_values(on_device)}, {size} (chosen by {plan.solver})"]
    lines += _host_lines(plan)
    if plan.nested:
        lines += _wrap(
            "  nested recomputation: ",
            f"backward recomputes {len(plan.nested)} values first, each in a pass of its own, on "
            f"{max(plan.levels, default=1)} levels; the ops of these passes run up to that many "
            "times more in a step",
        )
    rows = _bytes_by_module(report, nodes)
    if rows:
        lines += _module_table(rows[:most], has_host=bool(plan.host_bytes))
    return lines + _more_line(rows, most)


def _values(count: int) -> str:
    return f"{count} value{'s' if count != 1 else ''}"


def _host_lines(plan: SavePlan) -> list[str]:
    """What waits in host memory, and how much of the time of its copies is hidden."""
    phases = phase_times(plan)
    if not phases:
        return []
    copy_us, wait_us = (sum(getattr(p, f) for p in phases) for f in ("copy_us", "wait_us"))
    count = _values(sum(value.on_host for value in plan.saved))
    by_chunk = sum(value.by_chunk for value in plan.saved)
    size, pinned = bytes_text(plan.host_bytes), bytes_text(plan.pinned_bytes)
    return [
        f"  waiting in host memory: {count}, {size} ({pinned} pinned)",
        f"    their copies take {copy_us / 1e3:.2f} ms, of which the device waits for "
        f"{wait_us / 1e3:.2f} ms (estimated)",
        *([f"    of {by_chunk} of them, loops copy the rows of a chunk"] if by_chunk else []),
    ]


def _module_table(rows: Sequence[tuple[str, _ModuleBytes]], has_host: bool) -> list[str]:
    """A line for each module; without values on the host they have no column."""
    width = max(len(name) for name, _ in rows)
    fields = [f.name for f in dataclasses.fields(_ModuleBytes) if has_host or f.name != "on_host"]
    heads = [f"{field.replace('_', ' '):>12}" for field in fields]
    lines = [f"    {'':{width}} {' '.join(heads)}"]
    for name, row in rows:
        sizes = [getattr(row, field) for field in fields]
        cells = [
            f"{bytes_text(size) if size else '-':>{len(head)}}"
            for size, head in zip(sizes, heads, strict=True)
        ]
        lines.append(f"    {name:{width}} {' '.join(cells)}")
    return lines


def _bytes_by_module(report: ReportData, nodes: Nodes) -> list[tuple[str, _ModuleBytes]]:
    """By module, with equal layers added up; the module that saves most comes first."""
    rows: dict[str, _ModuleBytes] = {}
    for value in report.saved:
        name = _module_name(nodes.get(value.value), value.source)
        row = rows.setdefault(name, _ModuleBytes())
        if value.on_host:
            row.on_host += value.bytes
        else:
            row.saved += value.bytes
    for node in nodes.values():
        if node.fate == RECOMPUTED:
            rows.setdefault(_module_name(node), _ModuleBytes()).recomputed += node.bytes
        elif node.fate == RECONSTRUCTED:
            rows.setdefault(_module_name(node), _ModuleBytes()).reconstructed += node.bytes
    return sorted(rows.items(), key=lambda r: (-r[1].saved - r[1].on_host, -r[1].recomputed))


def _module_name(node: DrawnNode | None, source: str = "") -> str:
    """The node's module, or else the value's ``source``; equal layers have the same name."""
    path = fold_numbers(node.module if node is not None else source, _MODULE_DEPTH)
    return path or (node.source if node is not None else "") or "elsewhere"


def _reconstructed_lines(report: ReportData) -> list[str]:
    """What reconstruction gains, by rule."""
    if not report.reconstructed:
        return []
    gained = sum(item.bytes for item in report.reconstructed)
    rules = Counter((item.rule, item.grade) for item in report.reconstructed)
    counts = "; ".join(
        f"{count} by {rule} ({grade})" for (rule, grade), count in rules.most_common(_MOST_RULES)
    )
    largest = max(report.reconstructed, key=lambda item: item.bytes)
    place = f" ({largest.source})" if largest.source else ""
    return _wrap(
        f"  reconstruction saves {bytes_text(gained)} less: ",
        f"{counts}; the largest value is {largest.node}{place}",
    )


# ---- what is in memory at the peak -------------------------------------------------------------
def _at_peak_lines(report: ReportData, nodes: Nodes, most: int) -> list[str]:
    after = report.details.after if report.details else None
    if after is None or not after.bytes:
        return []
    moment = after.bytes.index(after.peak_bytes)
    running = nodes.get(node_name(after.moments[moment]))
    phase = "forward" if moment < after.first_backward else "backward"
    place = _place(running.module, running.source) if running else ""
    lines = [f"  in memory at the peak, in {phase}" + (f" at {place}" if place else "") + ":"]

    def describe(life: Life) -> tuple[str, str, str]:
        return _describe(life, after, nodes, report.offloaded)

    groups = group_by(after.alive_at(moment), describe)
    groups.sort(key=lambda group: -_sum_bytes(group))
    least = LEAST_PEAK_SHARE * after.peak_bytes
    most = min(most, sum(_sum_bytes(group) >= least for group in groups))
    kinds = [_with_count(describe(group[0])[0], group) for group in groups[:most]]
    width = max(map(len, kinds), default=0)
    for kind, group in zip(kinds, groups[:most], strict=True):
        _, module, source = describe(group[0])
        size = bytes_text(_sum_bytes(group))
        lines.append(f"    {size:>10}  {kind:{width}}  {_place(module, source)}".rstrip())
    rest = groups[most:]
    if rest:
        size = bytes_text(sum(map(_sum_bytes, rest)))
        lines.append(f"    {size:>10}  in {sum(map(len, rest))} others")
    return lines


def _sum_bytes(lives: Sequence[Life]) -> int:
    return sum(life.bytes for life in lives)


def _describe(
    life: Life, timeline: MemoryTimeline, nodes: Nodes, offloaded: Set[str]
) -> tuple[str, str, str]:
    """What a buffer holds, and the module and the line that it comes from."""
    node = nodes.get(node_name(life.node))
    module = fold_numbers(node.module) if node else ""
    source = node.source if node else life.node
    crosses = life.start < timeline.first_backward < life.end
    if life.transient:
        kind = "chunk of a loop" if is_loop(life.node) else "workspace"
    elif node is not None and node.phase == BACKWARD:
        kind = "gradient"
    elif life.node.startswith(RELOAD):
        kind = "value from the host"
    elif node_name(life.node) in offloaded and life.start < timeline.first_backward:
        kind = "value for the host"
    elif crosses:
        kind = "saved value"
    else:
        kind = "recomputed value" if life.start >= timeline.first_backward else "temporary value"
    return kind, module, source


# ---- words -------------------------------------------------------------------------------------
def _wrap(label: str, text: str) -> list[str]:
    """Lines within the screen's width, indented below the label. Code in backquotes is not cut."""
    unbroken = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    rows = textwrap.wrap(
        unbroken,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace("\0", " ") for row in rows]


def _with_count(name: str, group: Sequence[object]) -> str:
    return f"{name} x {len(group)}" if len(group) > 1 else name


def _place(*parts: str) -> str:
    """``head, models.py:202`` of a module and a line; an unknown part is left out."""
    return ", ".join(dict.fromkeys(filter(None, parts)))


def _more_line(items: Sequence[object], most: int) -> list[str]:
    return [f"    ... and {len(items) - most} more"] if len(items) > most else []
