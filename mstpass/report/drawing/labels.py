"""The words, signs and colours of a drawing: its title and legend, and the labels of its boxes.

Labels are Graphviz's HTML-like labels: https://graphviz.org/doc/info/shapes.html#html
"""

from __future__ import annotations

import html

from mstpass.byte_sizes import bytes_text
from mstpass.plain_data import printable
from mstpass.report.data import ReportData
from mstpass.report.details import RECOMPUTED, RECONSTRUCTED, SAVED
from mstpass.report.drawing.boxes import Amount, Box, Drawing

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
        f"{_escaped(',  '.join(facts))}</b></font></td></tr><tr>{legend}</tr></table>>"
    )


def _legend_cell(text: str, color: str, fill: str) -> str:
    return (
        f'<td bgcolor="{fill}" border="1" color="{color}">'
        f'<font point-size="10" color="{color}">{text}</font></td>'
    )


def box_label(box: Box) -> str:
    """Title, ops and amounts of the nodes of a module, one below the other."""
    rows = [f'<tr><td align="left"><b>{_escaped(_heading(box))}</b></td></tr>']
    facts = (_ops_text(box), box.source if box.layers and not box.title else "")
    rows += [f'<tr><td align="left">{_small(text)}</td></tr>' for text in facts if text]
    for amount in box.amounts:
        color, fill = COLORS[amount.fate], FILLS[amount.fate]
        rows.append(
            f'<tr><td align="left" bgcolor="{fill}"><font point-size="10" color="{color}">'
            f"{_escaped(_amount_text(amount, box))}</font></td></tr>"
        )
    return f'<<table border="0" cellspacing="0" cellpadding="2">{"".join(rows)}</table>>'


def node_label(box: Box) -> str:
    """Op, shape, size and fate of a single node, one below the other."""
    rows = [_escaped(_op_text(box.title))]
    if box.bytes >= _LEAST_SHOWN_BYTES:
        rows.append(_small(f"{list(box.shape)}  {bytes_text(box.bytes)}"))
    if box.amounts:
        text = _escaped(_amount_text(box.amounts[0], box))
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


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _small(text: str) -> str:
    return f'<font point-size="9" color="{FAINT}">{_escaped(text)}</font>'
