"""A plan as a picture: Graphviz's DOT text, and SVG or PNG through the ``dot`` program.

Forward stands on the left and runs down, backward on the right and runs up, so that a module's two
halves are side by side. Between them is the cut, a dashed line: a box on it is what one part of the
forward saves. Loops are frames around what they run in chunks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mstpass.errors import MissingPackageError, require
from mstpass.report.data import ReportData
from mstpass.report.details import BACKWARD, FORWARD, RECOMPUTED, RECONSTRUCTED, SAVED, Details
from mstpass.report.drawing import AUTO, Amount, Box, Drawing, drawing
from mstpass.report.drawing_groups import VIEWS
from mstpass.report.units import bytes_text

# Told apart by sign, word and line as well as by colour (Okabe and Ito's, for colour-blind eyes).
SIGNS = {SAVED: "■", RECOMPUTED: "↻", RECONSTRUCTED: "⇋"}
_INK, _FAINT, _GRID = "#222222", "#6b6b6b", "#9a9a9a"
_COLORS = {SAVED: "#0072b2", RECOMPUTED: "#b34700", RECONSTRUCTED: "#00664b"}
_FILLS = {SAVED: "#dcebf7", RECOMPUTED: "#fdeadd", RECONSTRUCTED: "#dcf2ea"}
_LOOP, _LOOP_FILL = "#8a6d00", "#fff6d6"
_FONT = "Helvetica,Arial,sans-serif"
_MOST_OPS = 4
_FAINT_ARROW = 1 / 256  # of the largest: arrows within a column that carry less are left out
_SHAPES = {
    "": {"shape": "box", "color": _GRID},
    SAVED: {"shape": "box", "color": _COLORS[SAVED], "penwidth": "2.6"},
    RECOMPUTED: {"shape": "ellipse", "color": _COLORS[RECOMPUTED], "style": "dashed,filled"},
    RECONSTRUCTED: {"shape": "hexagon", "color": _COLORS[RECONSTRUCTED], "style": "dotted,filled"},
}


def to_dot(report: ReportData, details: Details, fold: str = AUTO) -> str:
    """DOT text of the plan, its nodes folded as `boxes.drawing` says.

    Raises:
        MissingPackageError: without the ``graphviz`` package.
        ValueError: an unknown ``fold``.
    """
    require(["graphviz"], "viz", "a drawing of the plan")
    import graphviz

    drawn = drawing(report.outcome, details, fold)
    single = all(len(box.nodes) == 1 and not box.layers for box in drawn.boxes)
    graph = graphviz.Digraph(
        "mstpass",
        graph_attr={
            "label": _title(report, drawn),
            "labelloc": "t",
            "fontname": _FONT,
            "fontcolor": _INK,
            "newrank": "true",  # ranks across clusters
            "nodesep": "0.35",
            "ranksep": "0.28",
            "pad": "0.25",
            "bgcolor": "white",
        },
        node_attr={"fontname": _FONT, "fontsize": "11", "fontcolor": _INK, "style": "filled"},
        edge_attr={"color": _GRID, "arrowsize": "0.6", "fontname": _FONT, "fontsize": "10"},
    )
    graph.attr("node", fillcolor="white")
    rows = [] if single else _rows(drawn.boxes)
    with graph.subgraph(name=f"cluster_{FORWARD}") as cluster:
        _column(cluster, FORWARD, "forward ↓", drawn)
    with graph.subgraph(name="cluster_cut") as cluster:
        _cut(cluster, drawn, rows)
    with graph.subgraph(name=f"cluster_{BACKWARD}") as cluster:
        _column(cluster, BACKWARD, "backward ↑", drawn)
    for row in rows or [(box, None) for box in drawn.boxes if _saved(box)]:
        _side_by_side(graph, row)
    _edges(graph, drawn, free=not single)
    return str(graph.source)


def render(dot_text: str, kind: str) -> bytes:
    """DOT text as a picture; ``kind`` is a format of the ``dot`` program, such as ``"svg"``.

    Raises:
        MissingPackageError: without the ``graphviz`` package or the ``dot`` program.
    """
    require(["graphviz"], "viz", "a picture of the plan")
    import graphviz

    try:
        picture: bytes = graphviz.pipe("dot", kind, dot_text.encode(), quiet=True)
    except graphviz.ExecutableNotFound as error:
        raise MissingPackageError(
            "a picture needs Graphviz's 'dot' program: apt install graphviz, brew install graphviz "
            "or https://graphviz.org/download; Report.to_dot() gives the text without it"
        ) from error
    return picture


# ---- text --------------------------------------------------------------------------------------
def _title(report: ReportData, drawn: Drawing) -> str:
    facts = []
    if report.peak_bytes is not None and report.baseline_peak_bytes is not None:
        facts.append(
            f"peak {bytes_text(report.baseline_peak_bytes)} → {bytes_text(report.peak_bytes)}"
        )
    facts.append(f"saved for backward {bytes_text(report.saved_bytes)}")
    if report.extra_time is not None:
        facts.append(f"extra time {100 * report.extra_time:.1f} %")
    legend = "".join(
        f'<td bgcolor="{_FILLS[fate]}" border="1" color="{_COLORS[fate]}">'
        f'<font point-size="10" color="{_COLORS[fate]}">{sign} {fate}</font></td>'
        for fate, sign in SIGNS.items()
    )
    loop = f'<td bgcolor="{_LOOP_FILL}" border="1" color="{_LOOP}"><font point-size="10" '
    loop += f'color="{_LOOP}">▤ runs in chunks, one after the other</font></td>'
    return (
        '<<table border="0" cellspacing="4"><tr><td colspan="4"><font point-size="15"><b>'
        f"{escape(',  '.join(facts))}</b></font></td></tr><tr>{legend}{loop if drawn.loops else ''}"
        "</tr></table>>"
    )


def _amount(amount: Amount, box: Box) -> str:
    return f"{SIGNS[amount.fate]} {amount.fate} {_sum(amount, box)}"


def _sum(amount: Amount, box: Box) -> str:
    """Bytes in one layer where all are alike, else in all of them."""
    if len(set(amount.bytes)) == 1 and len(amount.bytes) == box.copies:
        return bytes_text(amount.bytes[0]) + (f" × {box.copies}" if box.copies > 1 else "")
    where = "all" if len(amount.bytes) == box.copies else f"{len(amount.bytes)} of {box.copies}"
    return f"{bytes_text(sum(amount.bytes))} in {where}"


def _heading(box: Box) -> str:
    title = box.title or ("between modules" if box.layers else box.source or "no module")
    return f"gradient of {title}" if box.gradient else title


def _op(name: str) -> str:
    """Short where aten's name is long."""
    if "scaled_dot_product" in name:
        return "sdpa_backward" if name.endswith("backward") else "sdpa"
    return "cast" if name == "convert_element_type" else name.lstrip("_")


def _plain(text: str) -> str:
    """As a label: DOT reads backslashes as escapes, and ``<...>`` as HTML."""
    import graphviz

    return str(graphviz.escape(text))


def _small(text: str) -> str:
    return f'<font point-size="9" color="{_FAINT}">{escape(text)}</font>'


def _ops(box: Box) -> str:
    shown = [_op(op) + (f" ×{count}" if count > 1 else "") for op, count in box.ops]
    more = len(shown) - _MOST_OPS
    return ", ".join([*shown[:_MOST_OPS], *([f"+{more}"] if more > 0 else [])])


def _table(box: Box) -> str:
    rows = [f'<tr><td align="left"><b>{escape(_heading(box))}</b></td></tr>']
    details = (_ops(box), box.source if box.layers and not box.title else "")
    rows += [f'<tr><td align="left">{_small(text)}</td></tr>' for text in details if text]
    for amount in box.amounts:
        color, fill = _COLORS[amount.fate], _FILLS[amount.fate]
        rows.append(
            f'<tr><td align="left" bgcolor="{fill}"><font point-size="10" color="{color}">'
            f"{escape(_amount(amount, box))}</font></td></tr>"
        )
    return f'<<table border="0" cellspacing="0" cellpadding="2">{"".join(rows)}</table>>'


# ---- columns -----------------------------------------------------------------------------------
def _column(cluster: Any, column: str, title: str, drawn: Drawing) -> None:
    """A cluster for the phase, in it one for each kind of layer, in those the loops."""
    boxes = [box for box in drawn.boxes if box.column == column]
    cluster.attr(label=title, fontsize="14", color="white", fontcolor=_INK)
    for layers in dict.fromkeys(box.layers for box in boxes):
        inside = [box for box in boxes if box.layers == layers]
        if not layers:
            _loops(cluster, column, "", inside, drawn)
            continue
        copies = max(box.copies for box in inside)
        with cluster.subgraph(name=f"cluster_{column}_{layers}") as inner:
            label = _plain(layers) + (f"  (× {copies}, drawn once)" if copies > 1 else "")
            inner.attr(label=label, fontsize="12", color=_GRID, style="rounded", margin="10")
            _loops(inner, column, layers, inside, drawn)


def _loops(graph: Any, column: str, layers: str, boxes: Sequence[Box], drawn: Drawing) -> None:
    for loop in dict.fromkeys(box.loop for box in boxes):
        inside = [box for box in boxes if box.loop == loop]
        if loop < 0:
            for box in inside:
                _node(graph, box)
            continue
        with graph.subgraph(name=f"cluster_{column}_{layers}_loop_{loop}") as frame:
            frame.attr(
                label=f"▤ {drawn.loops[loop]}",
                fontsize="10",
                fontcolor=_LOOP,
                color=_LOOP,
                style="rounded,filled",
                fillcolor=_LOOP_FILL,
                penwidth="1.6",
                margin="8",
            )
            for box in inside:
                _node(frame, box)


def _node(graph: Any, box: Box) -> None:
    if box.layers or len(box.nodes) > 1:
        graph.node(
            box.name, label=_table(box), shape="box", color=_GRID, tooltip=_plain(box.source)
        )
        return
    if box.title in VIEWS and not box.amounts:
        graph.node(box.name, box.title, shape="plaintext", style="", fontcolor=_FAINT, height="0.2")
        return
    fate = box.amounts[0].fate if box.amounts else ""
    lines = [escape(_op(box.title))]
    if box.bytes >= 2**10:
        lines.append(_small(f"{list(box.shape)}  {bytes_text(box.bytes)}"))
    if fate:
        lines.append(f'<font point-size="10">{escape(_amount(box.amounts[0], box))}</font>')
    look = {
        "fillcolor": _FILLS.get(fate, "white"),
        "tooltip": _plain(f"{box.nodes[0]} {box.source}"),
    }
    cells = "".join(f"<tr><td>{line}</td></tr>" for line in lines)
    table = f'<<table border="0" cellspacing="0" cellpadding="1">{cells}</table>>'
    graph.node(box.name, table, margin="0.06,0.03", **look, **_SHAPES[fate])


# ---- the cut -----------------------------------------------------------------------------------
Row = tuple[Box | None, Box | None]  # what stands in the forward's column, and in the backward's


def _rows(boxes: Sequence[Box]) -> list[Row]:
    """Forward from its top and backward from its end, what belongs together side by side."""
    forward = [box for box in boxes if box.column == FORWARD]
    backward = [box for box in reversed(boxes) if box.column == BACKWARD]
    keys = [[(box.layers, box.title) for box in column] for column in (forward, backward)]
    rows: list[Row] = []
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        left, right = forward[i:i_end], backward[j:j_end]
        if kind == "equal":
            rows += zip(left, right, strict=True)
        else:
            rows += [(box, None) for box in left] + [(None, box) for box in right]
    return rows


def _cut(cluster: Any, drawn: Drawing, rows: Sequence[Row]) -> None:
    """The dashed line, and on it what each box saves."""
    line = {
        "style": "dashed",
        "color": _INK,
        "arrowhead": "none",
        "penwidth": "1.4",
        "weight": "99",
    }
    cluster.attr(label="", color="white")
    cluster.node("cut", "saved at\nthe cut", shape="plaintext", style="", fontsize="12")
    places = [_gate_name(row) for row in rows]
    gates = {_gate_name((box, None)): (box, _saved(box)) for box in drawn.boxes}
    previous = "cut"
    for place in places or [name for name, (_, saved) in gates.items() if saved is not None]:
        box, saved = gates.get(place, (None, None))
        if box is not None and saved is not None:
            look = {"shape": "box", "color": _COLORS[SAVED], "penwidth": "2", "fontsize": "10"}
            cluster.node(place, f"{SIGNS[SAVED]} {_sum(saved, box)}", height="0.3", **look)
        else:
            cluster.node(place, "", shape="point", width="0.02", color=_INK)
        cluster.edge(previous, place, **line)
        previous = place


def _saved(box: Box) -> Amount | None:
    amounts: Iterable[Amount] = box.amounts if box.column == FORWARD else ()
    return next((amount for amount in amounts if amount.fate == SAVED), None)


def _gate_name(row: Row) -> str:
    box = row[0] or row[1]
    assert box is not None
    return f"cut_{box.name}"


def _side_by_side(graph: Any, row: Row) -> None:
    left, right = row
    gate = _gate_name(row)
    with graph.subgraph() as rank:
        rank.attr(rank="same")
        for name in (left and left.name, gate, right and right.name):
            if name:
                rank.node(name)
    if left is not None and _saved(left) is None:
        graph.edge(left.name, gate, style="invis")
    if right is not None:
        graph.edge(gate, right.name, style="invis")


def _edges(graph: Any, drawn: Drawing, free: bool) -> None:
    """``free``: the rows say where boxes stand, arrows do not."""
    column = {box.name: box.column for box in drawn.boxes}
    least = max((arrow.bytes for arrow in drawn.arrows), default=0) * _FAINT_ARROW if free else 0
    loose = {"constraint": "false"} if free else {}
    for first, second in zip(drawn.boxes, drawn.boxes[1:], strict=False):
        if free and first.column == second.column:  # one below the other
            pair = (first, second) if first.column == FORWARD else (second, first)
            graph.edge(pair[0].name, pair[1].name, style="invis", weight="20")
    crossing = {"color": _COLORS[SAVED], "penwidth": "2.2"}
    for box in drawn.boxes:
        if _saved(box) is not None:
            gate = _gate_name((box, None))
            graph.edge(f"{box.name}:e", f"{gate}:w", arrowhead="none", **crossing)
    for arrow in drawn.arrows:
        if column[arrow.source] != column[arrow.target]:
            gate = f"cut_{arrow.source}"
            if not free:
                graph.edge(arrow.target, gate, style="invis")  # backward runs up
            graph.edge(f"{gate}:e", arrow.target, constraint="false", **crossing)
        elif arrow.bytes < least:
            continue
        elif column[arrow.source] == FORWARD:
            graph.edge(arrow.source, arrow.target, **loose)
        else:
            graph.edge(arrow.target, arrow.source, dir="back", **loose)
