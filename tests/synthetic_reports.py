"""Reports with details that no model stands behind: a deep one, and ones with hostile strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.plans import (
    ChunkPlan,
    Outcome,
    Reconstructed,
    Rejection,
    SavedValue,
    SavePlan,
    Transfer,
)
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    Details,
    DrawnNode,
    Life,
    MemoryTimeline,
    ParetoPoint,
)
from mstpass.report.report import Report

_MIB = 2**20
# of one layer, in order: module, ops of forward, and the fate of the last one
_LAYER = (
    ("attention_norm", "pow mean add rsqrt mul mul", "recomputed"),
    ("attention.q", "permute view mm view", ""),
    ("attention.k", "permute view mm view", ""),
    ("attention.v", "permute view mm", "saved"),
    ("attention", "view permute mul split getitem getitem neg cat mul add sdpa getitem", "saved"),
    ("attention.o", "permute view mm view", ""),
    ("", "add", "reconstructed"),
    ("mlp_norm", "pow mean add rsqrt mul mul", "recomputed"),
    ("mlp.gate", "permute view mm", "saved"),
    ("mlp", "neg exp add div", "recomputed"),
    ("mlp.up", "permute view mm", "saved"),
    ("mlp", "mul", "recomputed"),
    ("mlp.down", "permute view mm view", ""),
    ("", "add", "saved"),
)


def llama_report(layers: int, rename: Callable[[str], str] = str) -> Report:
    """A plan such as a Llama-like step has; about 157 nodes a layer.

    Args:
        rename: applied to every name, op, module, source and reason.
    """
    forward = [_node("input", "primals_1", "embed"), _node("embedding", "embedding", "embed")]
    for i in range(layers):
        for part, ops, fate in _LAYER:
            module = ".".join(("layers", str(i), part)).rstrip(".")
            region = i if part.startswith("mlp") and "norm" not in part else -1
            names = ops.split()
            for op in names:
                last = op == names[-1]
                name = f"{op}_{len(forward)}"
                one = _node(op, name, module, (forward[-1].name,), fate if last else "", region)
                forward.append(one)
    forward.append(_node("sum", "loss", "", (forward[-1].name,)))
    backward = [_node("input", "tangents_1", "", phase=BACKWARD)]
    for source in reversed(forward[1:]):
        for k in (1, 2):
            inputs = (backward[-1].name, source.name)
            name = f"{source.name}_grad_{k}"
            one = _node("mul", name, source.module, inputs, "", source.region, BACKWARD)
            backward.append(one)
    nodes = [*forward, *backward]
    before, after = _timeline(forward, backward, 4), _timeline(forward, backward, 1)
    regions = tuple(
        ChunkPlan("mlp", "save", f"layers.{i}.mlp", 2048, 512, 4, 30 * _MIB, 8 * _MIB, (), (), ())
        for i in range(layers)
    )
    save_plan = SavePlan(
        tuple(SavedValue(n.name, n.bytes, n.module) for n in nodes if n.fate == "saved"),
        "peak_search",
        tuple(
            Reconstructed(n.name, (n.inputs[0],), "subtract", "exact", n.bytes, (), n.module)
            for n in nodes
            if n.fate == "reconstructed"
        ),
    )
    details = Details(
        tuple(_renamed(node, rename) for node in nodes),
        *(_renamed_timeline(timeline, rename) for timeline in (before, after)),
        (
            ParetoPoint("memory_budget=1.0", after.peak_bytes, 0.01, chosen=True),
            ParetoPoint(rename("memory_budget=0.0"), after.peak_bytes // 2, 0.2),
        ),
    )
    rejection = Rejection("detect", forward[5].name, rename("it is too small"), "head", 2 * _MIB)
    outcome = Outcome(
        tuple(dataclasses.replace(region, source=rename(region.source)) for region in regions),
        (dataclasses.replace(rejection, node=rename(rejection.node)),),
        save_plan,
        after.peak_bytes,
        before.peak_bytes,
        0.01,
        (rename("a note"),),
    )
    return Report(outcome, details=details)


def report_with_copies(layers: int, rename: Callable[[str], str] = str) -> Report:
    """The same plan, but the value that each layer ends with waits on the host.

    Forward and backward compute for 10 ms a layer. A copy takes 1 ms, and the device computes
    meanwhile, but for 0.4 ms of the forward's last copy and 0.6 ms of the backward's first.
    """
    report = llama_report(layers, rename)
    plan = report.outcome.save_plan
    assert plan is not None and report.details is not None and report.details.after is not None
    saved = tuple(
        dataclasses.replace(v, node=f"{v.node}_host", value=rename(v.node), on_host=True)
        if v.node.startswith("add")
        else v
        for v in plan.saved
    )
    copied = [value for value in saved if value.on_host]
    ends_us = [(i + 1) * 10_000.0 for i in range(layers)]
    to_host = [
        Transfer(v.value, v.bytes, True, end_us - 600, end_us + 400)
        for v, end_us in zip(copied, ends_us, strict=True)
    ]
    back = [
        Transfer(v.value, v.bytes, False, end_us - 10_000, end_us - 9_000)
        for v, end_us in zip(reversed(copied), ends_us, strict=True)
    ]
    to_host[-1] = dataclasses.replace(to_host[-1], stall_us=400.0)
    back[0] = dataclasses.replace(back[0], stall_us=600.0)
    transfers, us = (*to_host, *back), ends_us[-1]
    after = _with_reloads(report.details.after, {value.value for value in copied})
    outcome = dataclasses.replace(
        report.outcome,
        save_plan=dataclasses.replace(
            plan, saved=saved, transfers=transfers, forward_us=us, backward_us=us
        ),
        peak_bytes=after.peak_bytes,
    )
    return Report(outcome, details=dataclasses.replace(report.details, after=after))


def _with_reloads(timeline: MemoryTimeline, names: set[str]) -> MemoryTimeline:
    """These values leave the device for the middle of their lives."""
    lives: list[Life] = []
    used = list(timeline.bytes)
    for life in timeline.lives:
        if life.node not in names:
            lives.append(life)
            continue
        start, end = life.start + 1, life.end - 1
        lives.append(dataclasses.replace(life, end=start))
        lives.append(dataclasses.replace(life, node=f"reload:{life.node}", start=end))
        for moment in range(start, end):
            used[moment] -= life.bytes
    return dataclasses.replace(timeline, bytes=tuple(used), lives=tuple(lives))


def _node(
    op: str,
    name: str,
    module: str,
    inputs: tuple[str, ...] = (),
    fate: str = "",
    region: int = -1,
    phase: str = FORWARD,
) -> DrawnNode:
    shape, size = ((2048, 256), 2 * _MIB) if "mlp" not in module else ((2048, 1024), 8 * _MIB)
    return DrawnNode(
        name, op, phase, module, "model.py:12", shape, "float32", size, inputs, fate, region
    )


def _timeline(forward: list[DrawnNode], backward: list[DrawnNode], every: int) -> MemoryTimeline:
    """Saved values live from where they are made to the other side; of the rest one in ``every``
    moments holds two."""
    moments = [node.name for node in (*forward, *backward)]
    lives = []
    for i, node in enumerate(forward):
        end = len(moments) - 2 * i if node.fate == "saved" else i + every
        lives.append(Life(node.name, node.bytes, i, max(i + 1, end)))
    lives += [Life(node.name, node.bytes, len(forward) + i, len(forward) + i + every)
              for i, node in enumerate(backward)]  # fmt: skip
    lives = [dataclasses.replace(life, end=min(life.end, len(moments))) for life in lives]
    change = [0] * (len(moments) + 1)
    for life in lives:
        change[life.start] += life.bytes
        change[life.end] -= life.bytes
    used, total = [], 0
    for step in change[:-1]:
        total += step
        used.append(total)
    return MemoryTimeline(tuple(moments), tuple(used), tuple(lives), len(forward))


def _renamed(node: DrawnNode, rename: Callable[[str], str]) -> DrawnNode:
    return dataclasses.replace(
        node,
        name=rename(node.name),
        op=node.op if node.op == "input" else rename(node.op),
        module=rename(node.module) if node.module else "",
        source=rename(node.source),
        inputs=tuple(rename(name) for name in node.inputs),
    )


def _renamed_timeline(timeline: MemoryTimeline, rename: Callable[[str], str]) -> MemoryTimeline:
    return dataclasses.replace(
        timeline,
        moments=tuple(rename(moment) for moment in timeline.moments),
        lives=tuple(dataclasses.replace(life, node=rename(life.node)) for life in timeline.lives),
    )
