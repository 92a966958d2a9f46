"""Products whose results are worked on in parts that meet, so that no loop can run over all rows.

Two forms are found.

*Windows that meet*::

    a, b = logits.chunk(2);   loss(a, b)            a divergence between two passes of one batch

The token of the loss is a row of each window. Written as one product for each window, all windows'
rows are in one loop. What else reads the whole, such as a cross-entropy, is computed part by part.
The windows must tile their value and have one length: chunks one after the other, or every k-th
row. Windows that overlap, or that are worked on by themselves, have other rewrites
(move_token_slices.py, join_windows.py).

*A dim of several heads that a view merges with the tokens*::

    logits = einsum("nd,hdv->hnv", x, weight);   loss(logits.view(h n, v), labels.view(h n))

The product is written as one for each head. ``x @ weight`` is one product as well, whose rows are
the words of all heads and whose columns are the tokens.

How the parts are computed is in unstack.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Container, Mapping

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.sizes import generic
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import Refusal, Spec, group_of
from mstpass.normalize.partial import Reading, readings, rows_taken
from mstpass.normalize.parts import Parts, PartsFlow
from mstpass.regions.anchors import WIDE_OF_ANCHOR, WIDEN, anchors, widths

aten = torch.ops.aten
MOST_PARTS = 16  # each is a product of its own, in the code of one loop or in a loop of its own


@dataclasses.dataclass(frozen=True)
class Division:
    """A product, by name, where it has its parts, and these."""

    product: str
    held: HeadDim
    parts: Parts


def next_divisions(
    joint: JointGraph, tried: Container[str]
) -> tuple[list[str], list[Division]] | None:
    """Products that are divided together and that were not tried yet; None if there are none."""
    found = [each for each in _with_meeting_windows(joint) if each.product not in tried]
    for anchor, spec in () if found else joint.cached(anchors):
        found = [] if anchor.name in tried else _heads(joint, anchor, spec)
        if found:
            break
    return ([each.product for each in found], found) if found else None


# ---- windows that meet ---------------------------------------------------------------------------
_Window = tuple[int, int, bool]  # its number, how many tile the tokens, whether they take turns


def _with_meeting_windows(joint: JointGraph) -> list[Division]:
    """The products of which windows meet others: two wide operands of a node have different ones.

    Windows of two products with the same place meet in one row of both, which needs no rewrite.
    """
    found = {a: w for a, spec in joint.cached(anchors) if (w := _windows(joint, a, spec))}
    held: dict[fx.Node, frozenset[_Window]] = {}
    products: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)  # of which a value has windows
    for product, (_, taken) in found.items():
        for node, window in taken.items():
            held[node] = frozenset({window})
            products[node] = {product}
    met: set[fx.Node] = set()
    for node in joint.nodes if held else ():
        operands = [n for n in node.all_input_nodes if n in held]
        if node in held or node in joint.backward or not operands:
            continue
        if 2 * numel(node) < min(map(numel, operands)):  # a value of each token, or less
            continue
        held[node] = frozenset().union(*(held[n] for n in operands))
        products[node] = set().union(*(products[n] for n in operands))
        if len({held[n] for n in operands}) > 1 and node.target is not aten.cat.default:
            met |= products[node]
    return [division for product, (division, _) in found.items() if product in met]


def _windows(
    joint: JointGraph, anchor: fx.Node, spec: Spec
) -> tuple[Division, Mapping[fx.Node, _Window]] | None:
    """The windows of a product's rows, by the nodes that take them from what is made of it; None if
    they do not tile its rows."""
    taken: dict[fx.Node, Reading] = {}
    for reading in readings(joint, anchor, spec):
        rows = rows_taken(reading.node)
        if rows is not None and rows[0] in reading.spec:
            taken[reading.node] = reading
    divisions = _tiled(anchor, spec, next(iter(taken.values()))) if taken else []
    if not divisions:
        return None
    (division,) = divisions
    count, in_turns = len(division.parts.lengths), division.held.inner == 1
    wide_numel = WIDE_OF_ANCHOR * numel(anchor) / count
    picks = PartsFlow(joint, anchor, wide_numel, division.held, division.parts).picks
    if not taken.keys() <= picks.keys() or {picks[node] for node in taken} != {*range(count)}:
        return None
    return division, {node: (picks[node], count, in_turns) for node in taken}


def _tiled(anchor: fx.Node, spec: Spec, reading: Reading) -> list[Division]:
    """The parts of a product of which a node takes one; empty if there are too many or too few."""
    dim, rows = rows_taken(reading.node) or (0, range(0))
    size = shape_of(reading.source)[dim]
    if rows.step == 1 and dim == reading.spec[0]:
        return _division(anchor, spec[0], size // max(len(rows), 1))
    return _division(anchor, spec[0], size if len(rows) == 1 else rows.step, take_turns=True)


# ---- heads ---------------------------------------------------------------------------------------
def _heads(joint: JointGraph, anchor: fx.Node, spec: Spec) -> list[Division]:
    """The heads of a product, if a view merges them with its tokens."""
    shape = shape_of(anchor)
    found = _division(anchor, 0, shape[0]) if len(shape) == 3 else []
    feature = 0 if spec == (1,) and len(shape) == 2 else len(shape) - 1
    merged = False
    shown = {anchor: feature}  # the dim of all features
    for reading in readings(joint, anchor, spec):
        node, source = reading.node, reading.source
        if not ops.is_reshape(node):
            continue
        merged |= isinstance(reading.result, Refusal)
        if source not in shown or spec == (feature,):
            continue
        new, dim = shape_of(node), shown[source]
        ins, outs = group_of(shape_of(source), new, dim)
        if ins == [dim] and len(outs) == 1:
            shown[node] = outs[0]
        elif outs and ins[-1] == dim and not found:
            width = math.prod(new[d] for d in outs[1:])
            if shape[feature] % width == 0 and _widens(anchor, width):
                found = _division(anchor, feature, shape[feature] // width)
    return found if merged else []


def _division(product: fx.Node, dim: int, count: int, take_turns: bool = False) -> list[Division]:
    held = HeadDim(dim, 1 if take_turns else shape_of(product)[dim] // count)
    several = 1 < count <= MOST_PARTS
    return [Division(product.name, held, Parts((1,) * count))] if several else []


def _widens(anchor: fx.Node, width: int) -> bool:
    """Whether a head of this width is an anchor itself: queries, keys and values are none."""
    both = widths(anchor)
    return both is not None and width >= WIDEN * generic(both[0])
