"""Pictures of a plan: folding, DOT and SVG, Perfetto and PyTorch's memory viewer."""

from __future__ import annotations

import itertools
import json
import pickle
import pickletools
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
from torch.cuda import _memory_viz

import mstpass
from mstpass.bench.models import LlamaSize, llama
from mstpass.cli.main import main
from mstpass.errors import MissingPackageError
from mstpass.plans import Outcome
from mstpass.report import dot
from mstpass.report.boxes import FOLDS, Drawing, make_drawing
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    SAVED,
    Details,
    DrawnNode,
    Life,
    MemoryTimeline,
)
from mstpass.report.report import NoDetails, Report

SIZE = LlamaSize(width=32, heads=2, mlp_width=128, vocabulary=600, length=640, layers=2)
needs_graphviz = pytest.mark.skipif(find_spec("graphviz") is None, reason="graphviz is not here")
needs_dot = pytest.mark.skipif(
    find_spec("graphviz") is None or shutil.which("dot") is None, reason="Graphviz is not here"
)


@pytest.fixture(scope="module")
def report() -> Report:
    model, ids_BS, target_BS = llama(SIZE, torch.device("meta"))
    return mstpass.explain(model, ids_BS, target_BS, options={"memory_budget": 0.0})


def layered(layers: int, odd: int = -1, name: str = "layers") -> Details:
    """Layers of two modules each; what the layer ``odd`` would save it recomputes."""
    nodes: list[DrawnNode] = []

    def add(op: str, phase: str, module: str, *inputs: str, fate: str = "") -> str:
        node = f"{op}_{len(nodes)}"
        nodes.append(DrawnNode(node, op, phase, module, "a.py:1", (4, 8), "f32", 128, inputs, fate))
        return node

    x, kept = add("input", FORWARD, ""), []
    for i in range(layers):
        h = add("mm", FORWARD, f"{name}.{i}.up", x, fate=RECOMPUTED if i == odd else SAVED)
        kept.append(h)
        x = add("add", FORWARD, f"{name}.{i}", x, add("relu", FORWARD, f"{name}.{i}.act", h))
    g = add("sum", BACKWARD, "", x)
    for i in reversed(range(layers)):
        g = add("mm", BACKWARD, f"{name}.{i}.up", g, kept[i])
    return Details(tuple(nodes))


# ---- folding -----------------------------------------------------------------------------------
@pytest.mark.parametrize("fold", FOLDS)
def test_every_node_is_in_one_box_and_boxes_have_no_cycles(report: Report, fold: str) -> None:
    assert report.details is not None
    drawn = make_drawing(report.outcome, report.details, fold)
    names = [name for box in drawn.boxes for name in box.nodes if not name.endswith(":scaled")]
    nodes = {node.name: node for node in report.details.nodes if node.op != "input"}
    assert sorted(names) == sorted(nodes)
    assert nx.is_directed_acyclic_graph(nx.DiGraph([(a.source, a.target) for a in drawn.arrows]))
    for fate in (SAVED, RECOMPUTED):
        amounts = [a for box in drawn.boxes for a in box.amounts if a.fate == fate]
        expected = sum(node.bytes for node in nodes.values() if node.fate == fate)
        assert sum(sum(amount.bytes) for amount in amounts) == expected > 0


def _crossing(drawn: Drawing) -> set[tuple[str, str]]:
    column = {box.name: box.column for box in drawn.boxes}
    pairs = {(arrow.source, arrow.target) for arrow in drawn.arrows}
    return {(s, t) for s, t in pairs if column[s] != column[t]}


def test_what_crosses_is_saved_and_reaches_backward(report: Report) -> None:
    assert report.details is not None
    drawn = make_drawing(report.outcome, report.details)
    boxes = {box.name: box for box in drawn.boxes}
    saving = {b.name for b in drawn.boxes if any(a.fate == SAVED for a in b.amounts)}
    crossing = _crossing(drawn)
    assert saving == {source for source, _ in crossing}
    head = [box for box in drawn.boxes if box.gradient and box.title == "head"]
    assert [box.column for box in head] == [FORWARD], "a fused loop's gradient runs in the forward"
    assert any(
        boxes[target].column == BACKWARD for source, target in crossing if boxes[source] in head
    )


def test_equal_layers_are_drawn_once() -> None:
    few, many = (make_drawing(Outcome(), layered(n)) for n in (20, 64))
    assert len(few.boxes) == len(many.boxes) == 5  # up, act, add | sum, up
    assert {box.copies for box in many.boxes if box.layers} == {64}
    assert {box.layers for box in many.boxes} == {"layers.{0-63}", ""}
    (saved,) = [a for box in many.boxes for a in box.amounts]
    assert saved.fate == SAVED and saved.bytes == (128,) * 64
    assert len(make_drawing(Outcome(), layered(20), "module").boxes) == 20 * 4 + 1


def test_a_layer_unlike_the_others_is_drawn_apart() -> None:
    drawn = make_drawing(Outcome(), layered(64, odd=5))
    kinds = {box.layers: box.copies for box in drawn.boxes if box.layers}
    assert kinds == {"layers.{0-4,6-63}": 63, "layers.5": 1}


def test_many_kinds_of_layers_are_drawn_as_one() -> None:
    details = layered(12)
    widths = {f"layers.{i}.up": 128 + i for i in range(12)}
    nodes = tuple(
        DrawnNode(**{**vars(node), "shape": (widths.get(node.module, 1),)})
        for node in details.nodes
    )
    boxes = make_drawing(Outcome(), Details(nodes)).boxes
    assert {box.layers for box in boxes} == {"layers.{0-11}", ""}


@needs_graphviz
def test_an_unknown_fold_is_named(report: Report) -> None:
    with pytest.raises(ValueError, match=r"fold must be one of .*'module'.*, got 'layers'"):
        report.to_dot("layers")


# ---- DOT ---------------------------------------------------------------------------------------
@needs_graphviz
def test_dot_tells_the_fates_apart_by_sign_and_word(report: Report) -> None:
    text = report.to_dot("module")
    assert all(part in text for part in ("■ saved", "↻ recomputed", "▤ lm_head, fused"))
    assert "saved at" in text and "forward ↓" in text and "backward ↑" in text
    assert "(× 20, drawn once)" in Report(Outcome(), details=layered(20)).to_dot()


@needs_dot
@pytest.mark.parametrize("name", ["layers", '<b>&"\\N</script>'])
def test_svg_is_well_formed_whatever_modules_are_called(tmp_path: Path, name: str) -> None:
    Report(Outcome(), details=layered(20, name=name)).to_svg(tmp_path / "plan.svg")
    svg = ElementTree.parse(tmp_path / "plan.svg").getroot()
    words = " ".join("".join(text.itertext()) for text in svg.iter() if text.tag.endswith("text"))
    assert f"{name}.{{0-19}}" in words and "× 20" in words


@needs_dot
def test_a_picture_of_a_plan(tmp_path: Path, report: Report) -> None:
    report.to_svg(tmp_path / "plan.svg")
    report.to_png(tmp_path / "plan.png", fold="module")
    assert 5_000 < (tmp_path / "plan.svg").stat().st_size < 200_000
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@needs_graphviz
def test_without_the_dot_program_the_text_still_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Report
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.to_dot().startswith("digraph")
    with pytest.raises(MissingPackageError, match="install graphviz"):
        report.to_svg(tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    def missing(packages: object, extra: str, purpose: str) -> None:
        raise MissingPackageError(f"pip install 'mstpass[{extra}]'")

    monkeypatch.setattr(dot, "require", missing)
    with pytest.raises(MissingPackageError, match=r"mstpass\[viz\]"):
        report.to_dot()


def test_a_report_without_details_says_so(tmp_path: Path) -> None:
    for draw in (Report.to_svg, Report.to_perfetto, Report.to_memory_viz):
        with pytest.raises(NoDetails, match="cannot be drawn"):
            draw(Report(Outcome()), tmp_path / "file")


# ---- timelines ---------------------------------------------------------------------------------
def test_perfetto_has_the_memory_of_the_step(tmp_path: Path, report: Report) -> None:
    report.to_perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert "moment" in trace["otherData"]["axis"]
    events = trace["traceEvents"]
    required = {"M": set(), "C": set(), "X": {"dur"}, "b": {"id2", "cat"}, "e": {"id2", "cat"}}
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name", "args"} | required[event["ph"]] <= set(event)
    assert report.details is not None and report.details.before is not None
    for pid, peak in ((1, report.peak_bytes), (2, report.details.before.peak_bytes)):
        counted = [e for e in events if e["ph"] == "C" and e["pid"] == pid]
        assert max(event["args"]["bytes"] for event in counted) == peak
        assert [e["ts"] for e in counted] == sorted({e["ts"] for e in counted})
    begins, ends = (
        {(e["pid"], e["id2"]["local"]): e["ts"] for e in events if e["ph"] == ph} for ph in "be"
    )
    assert {pid for pid, _ in begins} == {3, 4}
    assert begins.keys() == ends.keys() and all(ts < ends[i] for i, ts in begins.items())
    loops = [e["args"] for e in events if e["ph"] == "X" and e["name"].startswith("loop:")]
    assert {args["loop"] for args in loops} >= {"lm_head, fused"}
    named = [e["args"].get("source", "") for e in events if e["ph"] == "b"]
    assert sum(source.startswith("models.py:") for source in named) > len(named) / 2


def test_memory_viewer_snapshot(tmp_path: Path, report: Report) -> None:
    report.to_memory_viz(tmp_path / "memory.pickle")
    data = (tmp_path / "memory.pickle").read_bytes()
    # what https://pytorch.org/memory_viz unpickles, besides numbers, strings and lists of them
    assert Counter(op.name for op, _, _ in pickletools.genops(data)).keys() <= _READ_BY_VIEWER
    snapshot = pickle.loads(data)
    assert report.details is not None and report.details.before is not None
    peaks = (report.peak_bytes, report.details.before.peak_bytes)
    for trace, segment, peak in zip(
        snapshot["device_traces"], snapshot["segments"], peaks, strict=True
    ):
        live: dict[int, int] = {}
        highest = 0
        for event in trace:
            if event["action"] == "alloc":
                start, end = event["addr"], event["addr"] + event["size"]
                assert all(end <= a or a + size <= start for a, size in live.items())
                assert (
                    segment["address"] <= start < end <= segment["address"] + segment["total_size"]
                )
                live[start] = event["size"]
            elif event["action"] == "free_completed":
                assert live.pop(event["addr"]) == event["size"]
            highest = max(highest, sum(live.values()))
        assert highest == peak and not live
    assert "models.py" in {frame["filename"] for e in trace for frame in e["frames"]}
    assert "segments: 2" in _memory_viz.segsum(snapshot)
    assert "TOTAL MEM" in _memory_viz.trace(snapshot)
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)


_READ_BY_VIEWER = {"PROTO", "FRAME", "MARK", "STOP", "MEMOIZE", "NONE", "NEWTRUE", "NEWFALSE"}
_READ_BY_VIEWER |= {"BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "SETITEM", "SETITEMS"}
_READ_BY_VIEWER |= {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "TUPLE"}
_READ_BY_VIEWER |= {"TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "LONG1"}
_READ_BY_VIEWER |= {"BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"}


def test_a_timeline_whose_buffers_come_and_go(tmp_path: Path) -> None:
    lives = (Life("a", 8, 0, 2), Life("b", 4, 1, 4), Life("c", 6, 2, 3), Life("a", 1, 1, 2, True))
    sizes = tuple(sum(l.bytes for l in lives if l.start <= m < l.end) for m in range(4))
    timeline = MemoryTimeline(("a", "b", "c", "d"), sizes, lives, first_backward=2)
    details = Details((), after=timeline)
    Report(Outcome(), details=details).to_memory_viz(tmp_path / "m.pickle")
    (trace,) = pickle.loads((tmp_path / "m.pickle").read_bytes())["device_traces"]
    signs = {"alloc": 1, "free_completed": -1}
    steps = [event["size"] * signs.get(event["action"], 0) for event in trace]
    assert max(itertools.accumulate(steps)) == timeline.peak_bytes == 13


def test_the_command_writes_them(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(
        "import torch\n"
        "def inputs():\n    return torch.randn(64, 8, requires_grad=True)\n"
        "def loss(x):\n    return x.exp().sum()\n"
    )
    files = {name: tmp_path / name for name in ("perfetto", "memory-viz")}
    arguments = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    assert main(["explain", f"{tmp_path / 'step.py'}:loss", *arguments]) == 0
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
    assert pickle.loads(files["memory-viz"].read_bytes())["device_traces"]
