"""Compute what is made from windows of a wide value on all of its tokens.

Some steps take finished logits apart: a trainer that sums the losses of ``logits.chunk(8)``, a loss
of ``logits[:, :-1]`` beside a z-loss on all logits. A region would end at the windows. An op that
works token by token gives the same for the tokens of a window if it runs on all tokens::

    forward:    f(x[a:b], t)                =  f(x, pad(t))[a:b]                    pad: with zeros
                f(x[:a], t_1), f(x[a:], t_2) are windows of one  f(x, cat(t_1, t_2))
    backward:   cat(g(x[:a]), g(x[a:]))     =  g(x)
                pad(g(x[a:b]))              =  where(the token is in the window, g(x), 0)

So windows that do not overlap and that are worked on alike (lanes.py) become one computation on all
tokens, and every other window one of its own. Tokens outside of all windows are computed for
nothing and left out by the ``where``, which is exact even if a value there is not finite.

Products of the windows of one narrow value, as of a loss that is chunked by hand, are one as well::

    forward:    x[:a] @ w, x[a:] @ w               are windows of  x @ w
    backward:   cat(g_1 @ w', g_2 @ w')         =  g @ w'
                g_1' @ x[:a] + g_2' @ x[a:]     =  g' @ x

An accuracy is often taken of ``logits[:, :-1]`` beside a loss on all logits, with shifted labels.
All tokens are used, so the slice cannot move to the operand of the product
(move_token_slices.py): what there is for each token is computed of all of them, and then sliced.
Labels, of the window's tokens alone, are zeros for the others.

A window stays as it is if a wide value of it is needed otherwise than token by token, or if the
windows that are worked on alike have gradients and less than ``LEAST_SHARE`` of the tokens.

Pseudo-code::

    for each wide value of which windows are taken:
        group its lanes: those that are alike, as long as their windows do not overlap
        for each group: write each demand of its lanes, computed on all tokens
        let the readers of demands read windows of these

A loss that is chunked by hand multiplies each chunk of the hidden states by the same weight::

    for x, t in zip(hidden.chunk(4), labels.chunk(4)):  loss += cross_entropy(head(x), t)

The hidden states are the source of the windows, and the products and losses are their lanes
(lanes.py), which are computed on all tokens. These windows must have nearly all tokens,
for what lies between them is computed for nothing.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Container

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec
from mstpass.normalize.lanes import (
    Lane,
    Sink,
    Windows,
    item_of,
    lane_of,
    next_windows,
    sink_of,
)
from mstpass.normalize.partial import TAKERS, grid_shape, replace_alike, taken_dim
from mstpass.normalize.products import bases_of
from mstpass.normalize.window_group import WindowGroup
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten
LEAST_SHARE = 0.5
_LEAST_SHARE_OF_PRODUCTS = 0.9
_CONVERT = torch.ops.prims.convert_element_type.default


def join_windows(joint: JointGraph) -> Rewritten:
    """Rewrite such windows, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that were changed or made; the graph itself if there is
        no such window.
    """
    return repeated(joint, next_windows, _joined)


def join_products(joint: JointGraph, kept: Container[str] = ()) -> Rewritten:
    """Write products of the windows of one value as one product, in a copy of the graph.

    Args:
        kept: the names of the bases of factors whose products stay as they are.

    Returns:
        As ``join_windows``.
    """
    next_match = functools.partial(next_product_windows, kept=kept)
    return repeated(joint, next_match, _joined)


def _joined(joint: JointGraph, windows: Windows) -> Rewritten:
    grid_shape(windows.source, windows.spec, windows.grid)  # can its token dims be merged?
    groups = _groups(_lanes(joint, windows))
    if windows.of_products and len(groups) > 1:
        raise CannotTake(windows.source, "its windows are worked on in different ways")
    axis_size = windows.grid[windows.axis]
    for group in groups:
        tokens = sum(lane.stop - lane.start for lane in group)
        if group[0].has_gradients and tokens < LEAST_SHARE * axis_size:
            raise CannotTake(group[0].item, "most tokens would be computed for nothing")
    rewriting = Rewriting(joint)
    _Writer(rewriting, windows, groups).write()
    return rewriting.result(reorder=True)


def _lanes(joint: JointGraph, windows: Windows) -> list[Lane]:
    """The lanes of all items; if one has none, those of the others that have no gradients."""
    lanes, refusals = list[Lane](), list[CannotTake]()
    for item in windows.items:
        try:
            lanes.append(lane_of(joint, windows, item))
        except CannotTake as refusal:
            refusals.append(refusal)
    lanes = [lane for lane in lanes if not refusals or not lane.has_gradients]
    if not any(lane.demands for lane in lanes):
        raise refusals[0] if refusals else CannotTake(windows.source, "nothing reads its windows")
    return lanes


def _groups(lanes: list[Lane]) -> list[list[Lane]]:
    """Lanes that are alike and do not overlap, in the order of their tokens."""
    groups: list[list[Lane]] = []
    for lane in sorted(lanes, key=lambda lane: lane.start):
        for group in groups:
            alike = group[0].signature == lane.signature
            if alike and group[-1].stop <= lane.start:
                group.append(lane)
                break
        else:
            groups.append([lane])
    return groups


# A gradient of an item -> its group, the number of its lane, and the same gradient of lane 0.
_Gradients = dict[fx.Node, tuple[WindowGroup, int, fx.Node]]


class _Writer:
    """Writes the computations on all tokens, into a graph whose order is mended afterwards."""

    def __init__(self, rewriting: Rewriting, windows: Windows, groups: list[list[Lane]]):
        self.rewriting, self.windows, self.groups = rewriting, windows, groups
        self.joint, self.builder = rewriting.joint, rewriting.builder

    def write(self) -> None:
        """Write all of them.

        Raises:
            CannotTake, UnknownSize: one cannot be computed on all tokens.
        """
        found: list[tuple[fx.Node, fx.Node]] = []
        terms: list[fx.Node] = []
        gradients: _Gradients = {}
        readers: dict[fx.Node, None] = {}
        with self.builder.graph.inserting_before(self.joint.output):
            for lanes in self.groups:
                group = WindowGroup(self.rewriting, self.windows, lanes)
                for demands in zip(*(lane.demands for lane in lanes), strict=True):
                    here = [self._node(demand.node) for demand in demands]
                    if demands[0].kind == "window":
                        found.extend(group.windows_of(here))
                    elif demands[0].kind == "sum":
                        sums = [self._node(d.reader) for d in demands]
                        found.append((sums[0], group.sum_of(here, sums)))
                        terms += sums[1:]
                    else:
                        group.nodes.setdefault(here[0], here)
                        for number, demand in enumerate(demands):
                            gradients[here[number]] = group, number, here[0]
                            readers[demand.reader] = None
            for reader in readers:
                sink = sink_of(reader, self.windows)
                assert sink is not None, "the reader of a gradient is a sink"
                found.append((self._node(sink.node), self._sink(sink, gradients)))
        for old, new in found:
            replace_alike(self.rewriting, old, new)
        for term in terms:
            self._leave_out(term)

    def _leave_out(self, term: fx.Node) -> None:
        """Leave a summand out of the sum of which it is a part, perhaps viewed or cast.

        Raises:
            CannotTake: it is no summand, or something else reads it.
        """
        while len(live := [user for user in term.users if user.users]) == 1:
            (user,) = live  # the others were left out before
            others = [n for n in user.all_input_nodes if n is not term]
            if user.target is aten.add.Tensor and len(others) == 1 and not user.kwargs:
                replace_alike(self.rewriting, user, others[0])
                return
            if not ops.is_cheap_view(user) and user.target is not _CONVERT:
                break
            term = user
        raise CannotTake(term, "is not added to what is computed from other windows")

    def _node(self, node: fx.Node) -> fx.Node:
        """The node of the copy."""
        return self.joint.by_name[node.name]

    def _sink(self, sink: Sink, gradients: _Gradients) -> fx.Node:
        """The gradients of all tokens, each where it belongs, and zeros elsewhere."""
        value = self._node(sink.node).meta["val"]
        numbers: dict[WindowGroup, list[int]] = {}
        firsts: dict[WindowGroup, fx.Node] = {}
        for piece, start, stop in sink.pieces:
            known = gradients.get(self._node(piece))
            if known is None:
                raise CannotTake(piece, "another gradient is written beside those of the windows")
            group, number, first = known
            lane = group.lanes[number]
            at_place = (lane.start, lane.stop) == (start, stop)
            if not at_place or firsts.setdefault(group, first) is not first:
                raise CannotTake(piece, "is written to other tokens")
            numbers.setdefault(group, []).append(number)
        result: fx.Node | None = None
        for group, of_group in numbers.items():
            first = firsts[group]
            before = math.prod(shape_of(first)[: group.cone[first][0]])
            if before != math.prod(value.shape[: sink.first]):
                raise CannotTake(first, "is written to other dims")
            whole = group.sizes.reshaped(group.merged([first]), list(value.shape))
            if len(of_group) < len(group.lanes) or not group.has_all_tokens:
                grid, after = self.windows.grid, value.dim() - sink.first - len(self.windows.grid)
                shape = [*[1] * sink.first, *grid, *[1] * after]
                mask = group.sizes.reshaped(group.mask(of_group), shape)
                rest = self.builder.filled([], 0, value) if result is None else result
                whole = self.builder.call(aten.where.self, mask, whole, rest)
            result = whole
        assert result is not None, "the result is known"
        return result


def next_product_windows(
    joint: JointGraph, tried: Container[str], kept: Container[str]
) -> tuple[list[str], Windows] | None:
    """The windows of a value that was not tried yet, several of which are multiplied."""
    found: defaultdict[tuple[fx.Node, Spec, int], dict[fx.Node, tuple[int, int]]]
    found = defaultdict(dict)  # source, its token dims, the sliced one of these: items
    product_of: dict[fx.Node, fx.Node] = {}  # of an item the one with the narrowest result
    for anchor, spec in reversed(joint.cached(anchors)):
        item = None if any(name in kept for name in bases_of(anchor)) else _item(anchor, spec)
        if item is None or item[0].all_input_nodes[0].name in tried:
            continue
        node, of_source = item
        source = node.all_input_nodes[0]
        window = item_of(node, source, of_source)
        if window is not None and is_static(source.meta["val"]):
            axis, start, stop = window
            found[source, of_source, axis][node] = start, stop
            product_of.setdefault(node, anchor)
    for (source, spec, axis), items in found.items():
        size = shape_of(source)[spec[axis]]
        lengths = {node: stop - start for node, (start, stop) in items.items()}
        if len(items) < 2 or not _LEAST_SHARE_OF_PRODUCTS * size <= sum(lengths.values()) <= size:
            continue
        narrowest = min(numel(product_of[n]) * size / length for n, length in lengths.items())
        every = tuple((node, *bounds) for node, bounds in items.items())
        wide_numel = WIDE_OF_ANCHOR * narrowest
        return [source.name], Windows(source, spec, axis, wide_numel, every, of_products=True)
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
