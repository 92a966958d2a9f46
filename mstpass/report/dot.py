"""A plan as Graphviz's DOT text, and as SVG or PNG through the ``dot`` program.

Forward stands on the left and runs down, backward stands on the right and runs up, so that the two
halves of a module are side by side. Between them is the cut, a dashed line: a box on the line shows
how many bytes the forward box beside it saves. Loops are frames around the nodes that they run.
Labels are Graphviz's HTML-like labels: https://graphviz.org/doc/info/shapes.html#html
"""

from __future__ import annotations

import difflib
import html
import itertools
from collections.abc import Sequence
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.errors import MissingPackageError, require
from mstpass.plain_data import printable
from mstpass.report.boxes import AUTO, VIEWS, Amount, Box, Drawing, make_drawing
from mstpass.report.data import ReportData
from mstpass.report.details import BACKWARD, FORWARD, RECOMPUTED, RECONSTRUCTED, SAVED, Details

# Fates differ by sign, word and line as well as by colour. The colours are those of Okabe and Ito,
# which colour-blind people can tell apart.
SIGNS = {SAVED: "■", RECOMPUTED: "↻", RECONSTRUCTED: "⇋"}
INK, FAINT, GRID = "#222222", "#6b6b6b", "#9a9a9a"
COLORS = {SAVED: "#0072b2", RECOMPUTED: "#b34700", RECONSTRUCTED: "#00664b"}
FILLS = {SAVED: "#dcebf7", RECOMPUTED: "#fdeadd", RECONSTRUCTED: "#dcf2ea"}
LOOP, LOOP_FILL = "#8a6d00", "#fff6d6"
_MOST_OPS = 4  # that a box lists
_LEAST_SHOWN_BYTES = 2**10  # a smaller result's shape and size are left out


def title_label(report: ReportData, drawing: Drawing) -> str:
    """The plan's figures above, the legend below."""
    facts = []
    before, after = report.baseline_peak_bytes, report.outcome.peak_bytes
    if before is not None and after is not None:
        facts.append(f"peak {bytes_text(before)} → {bytes_text(after)}")
    facts.append(f"saved for backward {report.saved_text}")
    if report.extra_time is not None:
        facts.append(f"extra time {100 * report.extra_time:.1f} %")
    legend = "".join(
        _legend_cell(f"{sign} {fate}", COLORS[fate], FILLS[fate]) for fate, sign in SIGNS.items()
    )
    if drawing.loops:
        legend += _legend_cell("▤ runs in chunks, one after the other", LOOP, LOOP_FILL)
    return (
        '<<table border="0" cellspacing="4"><tr><td colspan="4"><font point-size="15"><b>'
        f"{_in_html(',  '.join(facts))}</b></font></td></tr><tr>{legend}</tr></table>>"
    )


def _legend_cell(text: str, color: str, fill: str) -> str:
    return (
        f'<td bgcolor="{fill}" border="1" color="{color}">'
        f'<font point-size="10" color="{color}">{text}</font></td>'
    )


def box_label(box: Box) -> str:
    """Title, ops and amounts of the nodes of a module, one below the other."""
    rows = [f'<tr><td align="left"><b>{_in_html(_heading(box))}</b></td></tr>']
    facts = (_ops_text(box), box.source if box.layers and not box.title else "")
    rows += [f'<tr><td align="left">{_small(text)}</td></tr>' for text in facts if text]
    for amount in box.amounts:
        color, fill = COLORS[amount.fate], FILLS[amount.fate]
        rows.append(
            f'<tr><td align="left" bgcolor="{fill}"><font point-size="10" color="{color}">'
            f"{_in_html(_amount_text(amount, box))}</font></td></tr>"
        )
    return f'<<table border="0" cellspacing="0" cellpadding="2">{"".join(rows)}</table>>'


def node_label(box: Box) -> str:
    """Op, shape, size and fate of a single node, one below the other."""
    rows = [_in_html(_op_text(box.title))]
    if box.bytes >= _LEAST_SHOWN_BYTES:
        rows.append(_small(f"{list(box.shape)}  {bytes_text(box.bytes)}"))
    if box.amounts:
        text = _in_html(_amount_text(box.amounts[0], box))
        rows.append(f'<font point-size="10">{text}</font>')
    cells = "".join(f"<tr><td>{row}</td></tr>" for row in rows)
    return f'<<table border="0" cellspacing="0" cellpadding="1">{cells}</table>>'


def saved_label(amount: Amount, box: Box) -> str:
    """What stands on the cut beside a box that saves values."""
    return f"{SIGNS[SAVED]} {_sum_text(amount, box)}"


def _amount_text(amount: Amount, box: Box) -> str:
    return f"{SIGNS[amount.fate]} {amount.fate} {_sum_text(amount, box)}"


def _sum_text(amount: Amount, box: Box) -> str:
    """Bytes of one layer if all layers are alike, else the sum over all layers."""
    host = ""
    if amount.host_bytes:
        some = f"{bytes_text(amount.host_bytes)} of all "
        host = f", {some if amount.host_bytes < sum(amount.bytes) else ''}on the host"
    if len(set(amount.bytes)) == 1 and len(amount.bytes) == box.copies:
        return bytes_text(amount.bytes[0]) + (f" × {box.copies}" if box.copies > 1 else "") + host
    layers = "all" if len(amount.bytes) == box.copies else f"{len(amount.bytes)} of {box.copies}"
    return f"{bytes_text(sum(amount.bytes))} in {layers} layers{host}"


def _heading(box: Box) -> str:
    title = box.title or ("between modules" if box.layers else box.source or "no module")
    return f"gradient of {title}" if box.gradient else title


def _op_text(name: str) -> str:
    """An op's name, shortened if ATen's name is long."""
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "sdpa_backward" if name.endswith("backward") else "sdpa"
    return "cast" if name == "convert_element_type" else name.lstrip("_")


def _ops_text(box: Box) -> str:
    shown = [_op_text(op) + (f" ×{count}" if count > 1 else "") for op, count in box.ops]
    more = len(shown) - _MOST_OPS
    return ", ".join([*shown[:_MOST_OPS], *([f"+{more}"] if more > 0 else [])])


def _in_html(text: str) -> str:
    return html.escape(printable(text))


def _small(text: str) -> str:
    return f'<font point-size="9" color="{FAINT}">{_in_html(text)}</font>'


# ---- the graph -----------------------------------------------------------------------------------
_FONT = "Helvetica,Arial,sans-serif"
_LEAST_ARROW = 1 / 256  # of the largest arrow: smaller ones within a column are left out
_NODE_LOOKS = {
    "": {"shape": "box", "color": GRID},
    SAVED: {"shape": "box", "color": COLORS[SAVED], "penwidth": "2.6"},
    RECOMPUTED: {"shape": "ellipse", "color": COLORS[RECOMPUTED], "style": "dashed,filled"},
    RECONSTRUCTED: {"shape": "hexagon", "color": COLORS[RECONSTRUCTED], "style": "dotted,filled"},
}
_CUT_LINE = {
    "style": "dashed",
    "color": INK,
    "arrowhead": "none",
    "penwidth": "1.4",
    "weight": "99",
}
_CROSSING_LINE = {"color": COLORS[SAVED], "penwidth": "2.2"}


def to_dot(report: ReportData, details: Details, fold: str = AUTO) -> str:
    """DOT text of the plan; ``fold`` is explained in `make_drawing`.

    Raises:
        MissingPackageError: without the ``graphviz`` package.
        ValueError: an unknown ``fold``.
    """
    require(["graphviz"], "viz", "a drawing of the plan")
    import graphviz  # optional

    drawing = make_drawing(report.outcome, details, fold)
    is_node_by_node = all(len(box.nodes) == 1 and not box.layers for box in drawing.boxes)
    graph = graphviz.Digraph(
        "mstpass",
        graph_attr={
            "label": title_label(report, drawing),
            "labelloc": "t",
            "fontname": _FONT,
            "fontcolor": INK,
            "newrank": "true",  # ranks across clusters
            "nodesep": "0.35",
            "ranksep": "0.28",
            "pad": "0.25",
            "bgcolor": "white",
        },
        node_attr={"fontname": _FONT, "fontsize": "11", "fontcolor": INK, "style": "filled"},
        edge_attr={"color": GRID, "arrowsize": "0.6", "fontname": _FONT, "fontsize": "10"},
    )
    graph.attr("node", fillcolor="white")
    rows = [] if is_node_by_node else _rows(drawing.boxes)
    with graph.subgraph(name=f"cluster_{FORWARD}") as cluster:
        _add_column(cluster, FORWARD, "forward ↓", drawing)
    with graph.subgraph(name="cluster_cut") as cluster:
        _add_cut(cluster, drawing, rows)
    with graph.subgraph(name=f"cluster_{BACKWARD}") as cluster:
        _add_column(cluster, BACKWARD, "backward ↑", drawing)
    for row in rows or [(box, None) for box in drawing.boxes if _saved(box)]:
        _place_side_by_side(graph, row)
    if not is_node_by_node:
        _place_below_each_other(graph, drawing.boxes)
    _add_edges(graph, drawing, in_rows=not is_node_by_node)
    return str(graph.source)


def render(dot_text: str, kind: str) -> bytes:
    """DOT text as a picture; ``kind`` is a format of the ``dot`` program, such as ``"svg"``.

    Graphviz cannot always lead its curved edges around all boxes; then they are straight.

    Raises:
        MissingPackageError: without the ``graphviz`` package or the ``dot`` program.
    """
    require(["graphviz"], "viz", "a picture of the plan")
    import graphviz  # optional

    def piped(text: str) -> bytes:
        picture: bytes = graphviz.pipe("dot", kind, text.encode(), quiet=True)
        return picture

    try:
        try:
            return piped(dot_text)
        except graphviz.CalledProcessError:
            return piped(dot_text.replace("{", "{\n\tsplines=line", 1))
    except graphviz.ExecutableNotFound as error:
        raise MissingPackageError(
            "a picture of the plan needs Graphviz's 'dot' program: apt install graphviz, "
            "brew install graphviz, or https://graphviz.org/download. "
            "Report.to_dot() gives the text without it"
        ) from error


# ---- columns -----------------------------------------------------------------------------------
def _add_column(cluster: Any, column: str, title: str, drawing: Drawing) -> None:
    """Clusters within clusters: the phase, its kinds of layers, their loops."""
    boxes = [box for box in drawing.boxes if box.column == column]
    cluster.attr(label=title, fontsize="14", color="white", fontcolor=INK)
    for layers in dict.fromkeys(box.layers for box in boxes):
        inside = [box for box in boxes if box.layers == layers]
        if not layers:
            _add_loops(cluster, column, "", inside, drawing)
            continue
        copies = max(box.copies for box in inside)
        with cluster.subgraph(name=_escaped(f"cluster_{column}_{layers}")) as inner:
            label = layers + (f"  (× {copies}, drawn once)" if copies > 1 else "")
            inner.attr(
                label=_escaped(label), fontsize="12", color=GRID, style="rounded", margin="10"
            )
            _add_loops(inner, column, layers, inside, drawing)


def _add_loops(
    graph: Any, column: str, layers: str, boxes: Sequence[Box], drawing: Drawing
) -> None:
    for loop in dict.fromkeys(box.loop for box in boxes):
        inside = [box for box in boxes if box.loop == loop]
        if loop < 0:
            for box in inside:
                _add_node(graph, box)
            continue
        with graph.subgraph(name=_escaped(f"cluster_{column}_{layers}_loop_{loop}")) as frame:
            frame.attr(
                label=_escaped(f"▤ {drawing.loops[loop]}"),
                fontsize="10",
                fontcolor=LOOP,
                color=LOOP,
                style="rounded,filled",
                fillcolor=LOOP_FILL,
                penwidth="1.6",
                margin="8",
            )
            for box in inside:
                _add_node(frame, box)


def _add_node(graph: Any, box: Box) -> None:
    if box.layers or len(box.nodes) > 1:
        tooltip = _escaped(box.source)
        graph.node(box.name, label=box_label(box), shape="box", color=GRID, tooltip=tooltip)
        return
    if box.title in VIEWS and not box.amounts:
        graph.node(
            box.name,
            _escaped(box.title),
            shape="plaintext",
            style="",
            fontcolor=FAINT,
            height="0.2",
        )
        return
    fate = box.amounts[0].fate if box.amounts else ""
    look = {
        "fillcolor": FILLS.get(fate, "white"),
        "tooltip": _escaped(f"{box.nodes[0]} {box.source}"),
    }
    graph.node(box.name, node_label(box), margin="0.06,0.03", **look, **_NODE_LOOKS[fate])


def _escaped(text: str) -> str:
    """Text as a plain label: DOT reads backslashes as escapes, and ``<...>`` as HTML."""
    import graphviz  # optional

    escaped: str = graphviz.escape(printable(text))  # no plain str: its type says it is no HTML
    return escaped


# ---- rows and the cut --------------------------------------------------------------------------
Row = tuple[Box | None, Box | None]  # the boxes of forward and of backward that are side by side


def _rows(boxes: Sequence[Box]) -> list[Row]:
    """Forward from its start and backward from its end, with matching modules side by side."""
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


def _add_cut(cluster: Any, drawing: Drawing, rows: Sequence[Row]) -> None:
    """The dashed line, with a box for each forward box that saves values."""
    cluster.attr(label="", color="white")
    cluster.node("cut", "saved at\nthe cut", shape="plaintext", style="", fontsize="12")
    saved_at = {_cut_name((box, None)): (box, _saved(box)) for box in drawing.boxes}
    names = [_cut_name(row) for row in rows]
    previous = "cut"
    for name in names or [name for name, (_, saved) in saved_at.items() if saved is not None]:
        box, saved = saved_at.get(name, (None, None))
        if box is not None and saved is not None:
            look = {"shape": "box", "color": COLORS[SAVED], "penwidth": "2", "fontsize": "10"}
            cluster.node(name, saved_label(saved, box), height="0.3", **look)
        else:
            cluster.node(name, "", shape="point", width="0.02", color=INK)
        cluster.edge(previous, name, **_CUT_LINE)
        previous = name


def _saved(box: Box) -> Amount | None:
    """The bytes that a forward box saves."""
    if box.column != FORWARD:
        return None
    return next((amount for amount in box.amounts if amount.fate == SAVED), None)


def _cut_name(row: Row) -> str:
    """The name of a row's place on the cut."""
    box = row[0] or row[1]
    assert box is not None, "the box is known"
    return f"cut_{box.name}"


def _place_side_by_side(graph: Any, row: Row) -> None:
    left, right = row
    cut = _cut_name(row)
    with graph.subgraph() as rank:
        rank.attr(rank="same")
        for name in (left and left.name, cut, right and right.name):
            if name:
                rank.node(name)
    if left is not None and _saved(left) is None:
        graph.edge(left.name, cut, style="invis")
    if right is not None:
        graph.edge(cut, right.name, style="invis")


def _place_below_each_other(graph: Any, boxes: Sequence[Box]) -> None:
    for first, second in itertools.pairwise(boxes):
        if first.column == second.column:
            upper, lower = (first, second) if first.column == FORWARD else (second, first)
            graph.edge(upper.name, lower.name, style="invis", weight="20")


# ---- edges -------------------------------------------------------------------------------------
def _add_edges(graph: Any, drawing: Drawing, in_rows: bool) -> None:
    """Arrows within the columns, and lines from saving boxes through the cut to their readers.

    Args:
        in_rows: boxes stand in rows, so arrows do not decide where they stand.
    """
    column = {box.name: box.column for box in drawing.boxes}
    largest = max((arrow.bytes for arrow in drawing.arrows), default=0)
    least = largest * _LEAST_ARROW if in_rows else 0
    constraint = {"constraint": "false"} if in_rows else {}
    for box in drawing.boxes:
        if _saved(box) is not None:
            cut = _cut_name((box, None))
            graph.edge(f"{box.name}:e", f"{cut}:w", arrowhead="none", **_CROSSING_LINE)
    for arrow in drawing.arrows:
        if column[arrow.source] != column[arrow.target]:
            cut = f"cut_{arrow.source}"
            if not in_rows:
                graph.edge(arrow.target, cut, style="invis")  # backward runs up
            graph.edge(f"{cut}:e", arrow.target, constraint="false", **_CROSSING_LINE)
        elif arrow.bytes < least:
            continue
        elif column[arrow.source] == FORWARD:
            graph.edge(arrow.source, arrow.target, **constraint)
        else:
            graph.edge(arrow.target, arrow.source, dir="back", **constraint)
