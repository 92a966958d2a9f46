"""Windows of the tokens from which equal products are computed, one window after the other.

A loss that is chunked by hand multiplies each chunk of the hidden states by the same weight::

    for x, t in zip(hidden.chunk(4), labels.chunk(4)):  loss += cross_entropy(head(x), t)

The hidden states are the source of the windows, and the products and losses are their lanes
(lanes.py), which join_windows.py computes on all tokens. The windows must have nearly all tokens,
for what lies between them is computed for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.normalize.lanes import Windows, item_of
from mstpass.normalize.token_window import TAKERS, taken_dim
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten
_LEAST_SHARE = 0.9


def next_product_windows(joint: JointGraph, given_up: Container[str]) -> Windows | None:
    """The windows of a value that was not tried yet, several of which are multiplied."""
    found: defaultdict[tuple[fx.Node, Spec, int], dict[fx.Node, tuple[int, int]]]
    found = defaultdict(dict)  # source, its token dims, the sliced one of these: items
    product_of: dict[fx.Node, fx.Node] = {}  # of an item the one with the narrowest result
    for anchor, spec in reversed(joint.cached(anchors)):
        item = _item(anchor, spec)
        if item is None or item[0].all_input_nodes[0].name in given_up:
            continue
        node, of_source = item
        source = node.all_input_nodes[0]
        window = item_of(node, source, of_source)
        if window is not None:
            axis, start, stop = window
            found[source, of_source, axis][node] = start, stop
            product_of.setdefault(node, anchor)
    for (source, spec, axis), items in found.items():
        size = shape_of(source)[spec[axis]]
        lengths = {node: stop - start for node, (start, stop) in items.items()}
        if len(items) < 2 or not _LEAST_SHARE * size <= sum(lengths.values()) <= size:
            continue
        narrowest = min(numel(product_of[n]) * size / length for n, length in lengths.items())
        every = tuple((node, *bounds) for node, bounds in items.items())
        return Windows(source, spec, axis, WIDE_OF_ANCHOR * narrowest, every, of_products=True)
    return None


def _item(product: fx.Node, spec: Spec) -> tuple[fx.Node, Spec] | None:
    """The slice or selection that a product multiplies by a weight, and its source's token dims.

    It may be viewed, copied or cast in between.
    """
    needs = ops.operand_specs(product, spec)
    if isinstance(needs, Refusal):
        return None
    tokens = [n for n in ops.matmul_factors(product) if needs[n] != WHOLE]
    if len(tokens) != 1:
        return None
    node, spec = tokens[0], needs[tokens[0]]
    while node.target not in TAKERS:
        if not (ops.is_cheap_view(node) or ops.is_copy(node)) or not node.all_input_nodes:
            return None
        needs = ops.operand_specs(node, spec)
        node = node.all_input_nodes[0]
        if isinstance(needs, Refusal):
            return None
        spec = needs[node]
    dim = taken_dim(node)
    if node.target is aten.select.int:
        spec = tuple(d + (d >= dim) for d in spec)
    return node, tuple(sorted({dim, *spec}))
