"""Nodes of a joint graph as the boxes of a drawing: by module, equal layers drawn once.

Terms: a *column* is a phase as it runs, so that backward nodes of a fused loop stand in forward's.
A *stack* is a list of layers (``model.layers``); a *layer* is one of them. Nodes of one module are
one box unless something that depends on the box comes between: boxes have no cycles.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import networkx as nx

from mstpass.plans import FUSED, ChunkPlan, Outcome
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    RECONSTRUCTED,
    SAVED,
    Details,
    DrawnNode,
)
from mstpass.report.fold import layers as layers_text

AUTO, NONE, MODULE = "auto", "none", "module"
FOLDS = (AUTO, NONE, MODULE)
# Ops that hold no bytes of their own, or next to none.
VIEWS = {"alias", "as_strided", "detach", "expand", "full", "getitem", "permute", "reshape"}
VIEWS |= {"scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "t"}
VIEWS |= {"transpose", "unsqueeze", "view", "_unsafe_view"}
_FEW_NODES = 40  # that many beside views are drawn one by one under "auto"
_MOST_KINDS = 4  # of layers in a stack; more are drawn as one


@dataclasses.dataclass(frozen=True)
class Amount:
    """Bytes of the values of one fate: an entry for each layer that has some."""

    fate: str
    bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Box:
    """What is drawn as one.

    Attributes:
        name: unique in its drawing.
        column: ``"forward"`` or ``"backward"``: when it runs.
        layers: such as ``"layers.0-3"``; empty outside a stack.
        copies: how many layers it stands for.
        title: the module's path below the layer, or a node's op.
        gradient: backward nodes that run in a forward's loop.
        loop: index of its loop among the drawing's; -1 for none.
        ops: of one copy, views left out, each with its count.
        shape, bytes: of its largest result.
        nodes: names, of all copies.
    """

    name: str
    column: str
    layers: str
    copies: int
    title: str
    gradient: bool
    source: str
    loop: int
    ops: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    bytes: int
    amounts: tuple[Amount, ...]
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Arrow:
    """From box to box. Where it crosses from forward to backward, what it carries is saved."""

    source: str
    target: str


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes in the order in which they run, forward's first; ``loops``: what the regions are."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    loops: tuple[str, ...]


class _Key(NamedTuple):
    stack: str
    layer: int
    rest: str
    phase: str
    loop: int


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A box before layers are folded. ``number`` counts the pieces of one key."""

    key: _Key
    number: int
    nodes: tuple[DrawnNode, ...]


def drawing(outcome: Outcome, details: Details, fold: str = AUTO) -> Drawing:
    """The boxes of a plan.

    Args:
        fold: ``"none"``: every node is a box; ``"module"``: one for the nodes of a module, down to
            the modules of a layer; ``"auto"``: no folding of a small graph, otherwise by module,
            and equal layers are drawn once.

    Raises:
        ValueError: another ``fold``.
    """
    if fold not in FOLDS:
        raise ValueError(f"fold must be one of {list(FOLDS)}, got {fold!r}")
    nodes = [node for node in _with_scaling(outcome, details.nodes) if node.op != "input"]
    labels = [loop_label(region) for region in outcome.regions]
    loops = tuple(dict.fromkeys(labels))
    loop_of = {number: loops.index(label) for number, label in enumerate(labels)}
    early = _fused(outcome)
    columns = {node.name: FORWARD if node.name in early else node.phase for node in nodes}
    sizes = (
        {value.node: value.bytes for value in outcome.save_plan.saved} if outcome.save_plan else {}
    )
    if fold == AUTO and sum(node.op not in VIEWS for node in nodes) <= _FEW_NODES:
        fold = NONE
    pieces: dict[str, list[_Piece]] = {}
    for column in (FORWARD, BACKWARD):
        own = [node for node in nodes if columns[node.name] == column]
        pieces[column] = _pieces(own, _keys(own, loop_of, fold))
    kinds = _kinds([*pieces[FORWARD], *pieces[BACKWARD]], alone=fold != AUTO)
    boxes = [box for column in pieces for box in _folded(column, pieces[column], kinds, sizes)]
    return Drawing(tuple(boxes), _arrows(boxes, nodes, columns), loops)


def loop_label(region: ChunkPlan) -> str:
    """``mlp, recompute: 4 chunks of 512 tokens``."""
    if region.symbolic:
        return f"{region.kind}, {region.mode}: chunks of up to {region.chunk_tokens} tokens"
    chunks = f"{region.num_chunks} chunks of {region.chunk_tokens} tokens"
    return f"{region.kind}, {region.mode}: {chunks}"


def _with_scaling(outcome: Outcome, nodes: Sequence[DrawnNode]) -> list[DrawnNode]:
    """With what backward does to the gradients of a fused loop: it multiplies them by the unit."""
    by_name = {node.name: node for node in nodes}
    scaled: dict[str, DrawnNode] = {}
    for region in outcome.regions:
        for loop in region.loops:
            for output in loop.outputs:
                node = by_name.get(output.node)
                if output.scaled and node is not None and node.phase == BACKWARD:
                    inputs = (node.name, *([loop.unit] if loop.unit else []))
                    scaled[node.name] = dataclasses.replace(
                        node,
                        name=f"{node.name}:scaled",
                        op="mul",
                        inputs=inputs,
                        fate="",
                        region=-1,
                    )
    early = _fused(outcome)
    result: list[DrawnNode] = []
    for node in nodes:
        if node.name not in early:
            inputs = tuple(scaled[name].name if name in scaled else name for name in node.inputs)
            node = dataclasses.replace(node, inputs=inputs)
        result.append(node)
        if node.name in scaled:
            result.append(scaled[node.name])
    return result


def _fused(outcome: Outcome) -> frozenset[str]:
    """Nodes of fused loops, those of backward included, and what runs before them."""
    fused = [region for region in outcome.regions if region.mode == FUSED]
    members = {name for region in fused for name, _ in region.members}
    preludes = {name for region in fused for loop in region.loops for name in loop.prelude}
    return frozenset(members | preludes)


# ---- pieces ------------------------------------------------------------------------------------
def split_path(module: str) -> tuple[str, int, str]:
    """``model.layers.3.mlp.up`` as ``("model.layers", 3, "mlp")``; stack ``""`` and -1 outside."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part), ".".join(parts[i + 1 : i + 2])
    return "", -1, ".".join(parts[:2])


def _keys(nodes: Sequence[DrawnNode], loop_of: Mapping[int, int], fold: str) -> dict[str, _Key]:
    """What each node of a column is drawn with. A view stands with the first that reads it."""
    keys: dict[str, _Key] = {}
    reader: dict[str, str] = {}
    for node in reversed(nodes):
        loop = loop_of.get(node.region, -1)
        if fold == NONE:
            keys[node.name] = _Key("", -1, node.name, node.phase, loop)
        elif node.op in VIEWS and not node.fate and node.name in reader:
            keys[node.name] = keys[reader[node.name]]
        else:
            keys[node.name] = _Key(*split_path(node.module), node.phase, loop)
        reader |= dict.fromkeys(node.inputs, node.name)
    return keys


def _pieces(nodes: Sequence[DrawnNode], keys: Mapping[str, _Key]) -> list[_Piece]:
    """Nodes by key, without cycles, in an order in which they can run."""
    members: list[list[DrawnNode]] = []
    piece_of: dict[str, int] = {}
    last: dict[_Key, int] = {}
    graph = nx.DiGraph()
    for node in nodes:
        sources = {piece_of[name] for name in node.inputs if name in piece_of}
        piece = last.get(keys[node.name], -1)
        if piece < 0 or any(s != piece and nx.has_path(graph, piece, s) for s in sources):
            piece = len(members)
            members.append([])
            graph.add_node(piece)
            last[keys[node.name]] = piece
        members[piece].append(node)
        piece_of[node.name] = piece
        graph.add_edges_from((source, piece) for source in sources if source != piece)
    counts: Counter[_Key] = Counter()
    result = []
    for piece in nx.lexicographical_topological_sort(graph):
        key = keys[members[piece][0].name]
        result.append(_Piece(key, counts[key], tuple(members[piece])))
        counts[key] += 1
    return result


# ---- layers ------------------------------------------------------------------------------------
def _kinds(pieces: Sequence[_Piece], alone: bool) -> dict[tuple[str, int], tuple[int, ...]]:
    """Each layer's equals, itself included, by its stack and its number."""
    looks: dict[tuple[str, int], Counter[tuple[object, ...]]] = defaultdict(Counter)
    for piece in pieces:
        key = piece.key
        if key.layer >= 0:
            looks[key.stack, key.layer].update(
                (key._replace(layer=0), piece.number, node.op, node.shape, node.fate)
                for node in piece.nodes
                if node.op not in VIEWS
            )
    equals: dict[str, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (stack, layer), look in sorted(looks.items()):
        equals[stack][layer if alone else frozenset(look.items())].append(layer)
    kinds: dict[tuple[str, int], tuple[int, ...]] = {}
    for stack, groups in equals.items():
        if len(groups) > _MOST_KINDS and not alone:
            groups = {"": sorted(layer for group in groups.values() for layer in group)}
        for group in groups.values():
            kinds |= {(stack, layer): tuple(group) for layer in group}
    return kinds


def _folded(
    column: str,
    pieces: Sequence[_Piece],
    kinds: Mapping[tuple[str, int], tuple[int, ...]],
    saved_bytes: Mapping[str, int],
) -> list[Box]:
    together: dict[tuple[tuple[int, ...], _Key, int], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        key = piece.key
        layers = kinds.get((key.stack, key.layer), ())
        together[layers, key._replace(layer=0), piece.number].append(piece)
    boxes = []
    for number, ((layers, _, _), same) in enumerate(together.items()):
        first = same[0]
        nodes = [node for piece in same for node in piece.nodes]
        by_itself = len(nodes) == 1 and not layers
        sources = Counter(n.source for n in nodes if n.source and n.op not in VIEWS).most_common(1)
        largest = max(nodes, key=lambda node: node.bytes)
        ops = Counter(node.op for node in first.nodes if node.op not in VIEWS)
        boxes.append(
            Box(
                name=f"{column}_{number}",
                column=column,
                layers=layers_text(f"{first.key.stack}.{n}".lstrip(".") for n in layers),
                copies=max(1, len(layers)),
                title=nodes[0].op if by_itself else first.key.rest,
                gradient=first.key.phase != column,
                source=sources[0][0] if sources else "",
                loop=first.key.loop,
                ops=tuple(ops.most_common()),
                shape=largest.shape,
                bytes=largest.bytes,
                amounts=tuple(_amounts(same, saved_bytes)),
                nodes=tuple(node.name for node in nodes),
            )
        )
    return boxes


def _amounts(pieces: Sequence[_Piece], saved_bytes: Mapping[str, int]) -> Iterable[Amount]:
    for fate in (SAVED, RECOMPUTED, RECONSTRUCTED):
        sizes = [
            sum(saved_bytes.get(n.name, n.bytes) for n in piece.nodes if n.fate == fate)
            for piece in pieces
        ]
        if any(sizes):
            yield Amount(fate, tuple(size for size in sizes if size))


# ---- arrows ------------------------------------------------------------------------------------
def _arrows(
    boxes: Sequence[Box], nodes: Sequence[DrawnNode], columns: Mapping[str, str]
) -> tuple[Arrow, ...]:
    """Within a column what a box reads; across the cut the saved values that it needs.

    A box of backward that reads a recomputed value needs what that is recomputed from.
    """
    by_name = {node.name: node for node in nodes}
    box_of = {name: box.name for box in boxes for name in box.nodes}
    position = {box.name: number for number, box in enumerate(boxes)}
    saved_behind: dict[str, frozenset[str]] = {}
    for node in nodes:
        if columns[node.name] == FORWARD:
            behind = [saved_behind[name] for name in node.inputs if name in saved_behind]
            alone = frozenset({box_of[node.name]})
            saved_behind[node.name] = alone if node.fate == SAVED else frozenset().union(*behind)
    pairs: dict[tuple[str, str], None] = {}
    for node in nodes:
        target, column = box_of[node.name], columns[node.name]
        for name in node.inputs:
            if name not in by_name:
                continue
            across = column == BACKWARD and columns[name] == FORWARD
            sources = saved_behind[name] if across else {box_of[name]}
            pairs |= {(source, target): None for source in sorted(sources) if source != target}
    # an arrow back to an earlier box is that to the next layer of the same kind
    return tuple(Arrow(*pair) for pair in pairs if position[pair[0]] < position[pair[1]])
