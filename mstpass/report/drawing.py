"""Nodes of a joint graph as the boxes of a drawing: by module, equal layers drawn once.

Terms: a *column* is a phase as it runs, so that backward nodes of a fused loop stand in forward's.
A *stack* is a list of layers (``model.layers``); a *layer* is one of them. Nodes of one module are
one box unless something that depends on the box comes between: boxes have no cycles.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
from mstpass.report.drawing_groups import VIEWS, Key, Piece, keys_of, kinds_of, pieces_of
from mstpass.report.fold_layers import layers as layers_text

AUTO, NONE, MODULE = "auto", "none", "module"
FOLDS = (AUTO, NONE, MODULE)
_FEW_NODES = 40  # that many beside views are drawn one by one under "auto"


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
    """From box to box. Where it crosses from forward to backward, what it carries is saved.

    ``bytes`` are those of the largest value that it stands for.
    """

    source: str
    target: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes in the order in which they run, forward's first; ``loops``: what the regions are."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    loops: tuple[str, ...]


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
    if fold == AUTO and sum(node.op not in VIEWS for node in nodes) <= _FEW_NODES:
        fold = NONE
    pieces: dict[str, list[Piece]] = {}
    for column in (FORWARD, BACKWARD):
        own = [node for node in nodes if columns[node.name] == column]
        pieces[column] = pieces_of(own, keys_of(own, loop_of, fold != NONE))
    kinds = kinds_of([*pieces[FORWARD], *pieces[BACKWARD]], alone=fold != AUTO)
    boxes = [box for column in pieces for box in _folded(column, pieces[column], kinds)]
    return Drawing(tuple(boxes), _arrows(outcome, boxes, nodes, columns), loops)


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


# ---- boxes and arrows ----------------------------------------------------------------------------
def _folded(
    column: str,
    pieces: Sequence[Piece],
    kinds: Mapping[tuple[str, int], tuple[int, ...]],
) -> list[Box]:
    together: dict[tuple[tuple[int, ...], Key, int], list[Piece]] = defaultdict(list)
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
                amounts=tuple(_amounts(same)),
                nodes=tuple(node.name for node in nodes),
            )
        )
    return boxes


def _amounts(pieces: Sequence[Piece]) -> Iterable[Amount]:
    for fate in (SAVED, RECOMPUTED, RECONSTRUCTED):
        sizes = [sum(n.bytes for n in piece.nodes if n.fate == fate) for piece in pieces]
        if any(sizes):
            yield Amount(fate, tuple(size for size in sizes if size))


# ---- arrows ------------------------------------------------------------------------------------
def _arrows(
    outcome: Outcome,
    boxes: Sequence[Box],
    nodes: Sequence[DrawnNode],
    columns: Mapping[str, str],
) -> tuple[Arrow, ...]:
    """Within a column what a box reads; across the cut the saved values that it needs."""
    by_name = {node.name: node for node in nodes}
    box_of = {name: box.name for box in boxes for name in box.nodes}
    position = {box.name: number for number, box in enumerate(boxes)}
    saved = _saved_behind(outcome, [n for n in nodes if columns[n.name] == FORWARD])
    carried: dict[tuple[str, str], int] = {}
    for node in nodes:
        for name in node.inputs:
            if name not in by_name:
                continue
            across = columns[node.name] == BACKWARD and columns[name] == FORWARD
            for source in sorted(saved[name]) if across else [name]:
                pair = box_of[source], box_of[node.name]
                carried[pair] = max(carried.get(pair, 0), by_name[source].bytes)
    # an arrow back to an earlier box is that to the next layer of the same kind
    return tuple(
        Arrow(source, target, size)
        for (source, target), size in carried.items()
        if position[source] < position[target]
    )


def _saved_behind(outcome: Outcome, forward: Sequence[DrawnNode]) -> dict[str, frozenset[str]]:
    """The saved values from which backward has each forward value, itself if it is saved."""
    plan = outcome.save_plan
    others = {item.node: item.sources for item in plan.reconstructed} if plan else {}
    behind: dict[str, tuple[str, ...]] = {}
    for node in forward:
        if node.fate == RECONSTRUCTED:
            behind[node.name] = others.get(node.name, ())
        elif node.fate == RECOMPUTED or (node.op in VIEWS and not node.fate):
            behind[node.name] = node.inputs
        else:
            behind[node.name] = ()
    saved = {node.name: frozenset({node.name}) for node in forward if node.fate == SAVED}
    result: dict[str, frozenset[str]] = {}
    for name in graphlib.TopologicalSorter(behind).static_order():
        sources = (result[source] for source in behind.get(name, ()))
        result[name] = saved.get(name) or frozenset().union(*sources)
    return result
