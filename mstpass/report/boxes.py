"""A plan as boxes and arrows: the nodes of a module are one box, and equal layers are drawn once.

Terms: a *column* is the phase in which a node runs, so the backward nodes of a fused loop stand in
forward's column. A *stack* is a list of layers (``model.layers``); a *layer* is one of them. A
*group* is the nodes of one module and one loop that are one box. They become several boxes if a
node between them depends on the first and is needed by the last: boxes have no cycles.
"""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import networkx as nx

from mstpass.plans import ChunkPlan, Outcome
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    RECONSTRUCTED,
    SAVED,
    Details,
    DrawnNode,
    fused_nodes,
)
from mstpass.report.layer_paths import join_layers

# Ops that hold no bytes of their own, or next to none.
VIEWS = {"alias", "as_strided", "detach", "expand", "full", "getitem", "permute", "reshape"}
VIEWS |= {"scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "t"}
VIEWS |= {"transpose", "unsqueeze", "view", "_unsafe_view"}
_MOST_KINDS = 4  # of layers in a stack; if there are more, all layers are drawn as one


class GroupKey(NamedTuple):
    """What the nodes of a group have in common; ``module`` is the path below the layer."""

    stack: str
    layer: int
    module: str
    phase: str
    loop: int


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """Nodes that are drawn as one box. Groups with equal keys are numbered from 0."""

    key: GroupKey
    number: int
    nodes: tuple[DrawnNode, ...]


def _split_path(module: str) -> tuple[str, int, str]:
    """``model.layers.3.mlp.up`` as ``("model.layers", 3, "mlp")``; stack "" and -1 if no layer."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part), ".".join(parts[i + 1 : i + 2])
    return "", -1, ".".join(parts[:2])


def group_keys(
    nodes: Sequence[DrawnNode], loop_of: Mapping[int, int], by_module: bool
) -> dict[str, GroupKey]:
    """The key of each node. A view has the key of the first node that reads it.

    Args:
        nodes: of one column, in the graph's order.
        loop_of: index of a region -> index of its loop in the drawing.
        by_module: group nodes by module; otherwise each node is a group.
    """
    keys: dict[str, GroupKey] = {}
    reader: dict[str, str] = {}
    for node in reversed(nodes):
        loop = loop_of.get(node.region, -1)
        if not by_module:
            keys[node.name] = GroupKey("", -1, node.name, node.phase, loop)
        elif node.op in VIEWS and not node.fate and node.name in reader:
            keys[node.name] = keys[reader[node.name]]
        else:
            keys[node.name] = GroupKey(*_split_path(node.module), node.phase, loop)
        reader |= dict.fromkeys(node.inputs, node.name)
    return keys


def group_nodes(nodes: Sequence[DrawnNode], keys: Mapping[str, GroupKey]) -> list[NodeGroup]:
    """Nodes by key, in an order in which the groups can run.

    A node joins the last group with its key, unless the node depends on that group through another
    group: then it starts a new one, so that groups have no cycles.
    """
    members: list[list[DrawnNode]] = []
    group_of: dict[str, int] = {}
    latest: dict[GroupKey, int] = {}
    graph = nx.DiGraph()
    for node in nodes:
        sources = {group_of[name] for name in node.inputs if name in group_of}
        group = latest.get(keys[node.name], -1)
        if group < 0 or any(s != group and nx.has_path(graph, group, s) for s in sources):
            group = len(members)
            members.append([])
            graph.add_node(group)
            latest[keys[node.name]] = group
        members[group].append(node)
        group_of[node.name] = group
        graph.add_edges_from((source, group) for source in sources if source != group)
    counts: Counter[GroupKey] = Counter()
    groups = []
    for group in nx.lexicographical_topological_sort(graph):
        key = keys[members[group][0].name]
        groups.append(NodeGroup(key, counts[key], tuple(members[group])))
        counts[key] += 1
    return groups


def equal_layers(
    groups: Sequence[NodeGroup], each_alone: bool
) -> dict[tuple[str, int], tuple[int, ...]]:
    """(stack, layer) -> the layers of the stack that equal it, itself included.

    Layers are equal if they have the same ops, with the same shapes and fates, in the same groups.

    Args:
        each_alone: no layer equals another one.
    """
    contents: dict[tuple[str, int], Counter[tuple[object, ...]]] = defaultdict(Counter)
    for group in groups:
        key = group.key
        if key.layer >= 0:
            contents[key.stack, key.layer].update(
                (key._replace(layer=0), group.number, node.op, node.shape, node.fate)
                for node in group.nodes
                if node.op not in VIEWS
            )
    kinds: dict[str, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (stack, layer), content in sorted(contents.items()):
        kinds[stack][layer if each_alone else frozenset(content.items())].append(layer)
    equal: dict[tuple[str, int], tuple[int, ...]] = {}
    for stack, layers_by_kind in kinds.items():
        kind_list = list(layers_by_kind.values())
        if len(kind_list) > _MOST_KINDS and not each_alone:
            kind_list = [sorted(layer for layers in kind_list for layer in layers)]
        for layers in kind_list:
            equal |= {(stack, layer): tuple(layers) for layer in layers}
    return equal


FOLDS = AUTO, NONE, MODULE = "auto", "none", "module"
_FEW_NODES = 40  # under "auto", a graph of at most that many nodes is drawn node by node


@dataclasses.dataclass(frozen=True)
class Amount:
    """Bytes of the values with one fate: an entry for each layer that has such values.

    ``host_bytes`` are those that wait on the host, of all layers.
    """

    fate: str
    bytes: tuple[int, ...]
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Box:
    """Nodes that are drawn as one box.

    Attributes:
        name: unique in its drawing.
        column: when the nodes run, ``"forward"`` or ``"backward"``.
        layers: such as ``"layers.{0-3}"``; empty outside of a stack.
        copies: how many equal layers the box stands for.
        title: the module's path below the layer; for a single node, its op.
        gradient: backward nodes that run in a loop of the forward.
        loop: index of the box's loop among the drawing's loops; -1 for none.
        ops: the ops of one copy with their counts, views left out.
        shape, bytes: of the largest result.
        nodes: names of the nodes, of all copies.
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
    """From one box to another. An arrow from forward to backward stands for saved values.

    ``bytes`` are those of the largest value that the arrow stands for.
    """

    source: str
    target: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes in the order in which they run, forward's first, and the labels of the loops."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    loops: tuple[str, ...]


def make_drawing(outcome: Outcome, details: Details, fold: str = AUTO) -> Drawing:
    """The boxes and arrows of a plan.

    Args:
        fold: ``"none"`` makes every node a box; ``"module"`` makes one box of a module's nodes,
            down to the modules of a layer; ``"auto"`` draws a small graph node by node, and others
            by module with equal layers drawn once.

    Raises:
        ValueError: another ``fold``.
    """
    if fold not in FOLDS:
        raise ValueError(f"fold must be one of {list(FOLDS)}, got {fold!r}")
    nodes = [node for node in _with_gradient_scaling(outcome, details.nodes) if node.op != "input"]
    labels = {
        column: [loop_label(region, column) for region in outcome.regions]
        for column in (FORWARD, BACKWARD)
    }
    loops = tuple(dict.fromkeys(itertools.chain(*labels.values())))
    in_forward = fused_nodes(outcome)
    columns = {node.name: FORWARD if node.name in in_forward else node.phase for node in nodes}
    if fold == AUTO and sum(node.op not in VIEWS for node in nodes) <= _FEW_NODES:
        fold = NONE
    groups: dict[str, list[NodeGroup]] = {}
    for column in (FORWARD, BACKWARD):
        own = [node for node in nodes if columns[node.name] == column]
        loop_of = {number: loops.index(label) for number, label in enumerate(labels[column])}
        groups[column] = group_nodes(own, group_keys(own, loop_of, by_module=fold != NONE))
    equal = equal_layers([*groups[FORWARD], *groups[BACKWARD]], each_alone=fold != AUTO)
    on_host = {copy.node for copy in outcome.save_plan.transfers} if outcome.save_plan else set()
    boxes = [
        box for column in groups for box in _column_boxes(column, groups[column], equal, on_host)
    ]
    return Drawing(tuple(boxes), _arrows(outcome, boxes, nodes, columns), loops)


def loop_label(region: ChunkPlan, phase: str = FORWARD) -> str:
    """``mlp, recompute: 4 chunks of 512 tokens``."""
    chunks = region.chunks_in(phase)
    count = "chunks of up to" if chunks.symbolic else f"{chunks.count} chunks of"
    return f"{region.kind}, {region.mode}: {count} {chunks.length} {chunks.axis}"


def _with_gradient_scaling(outcome: Outcome, nodes: Sequence[DrawnNode]) -> list[DrawnNode]:
    """The nodes, and a product after each gradient that a fused loop returns.

    A fused loop computes gradients for a loss gradient of 1; backward multiplies them by the real
    one (``LoopPlan.unit``).
    """
    by_name = {node.name: node for node in nodes}
    scaled: dict[str, DrawnNode] = {}
    for region in outcome.regions:
        for loop in region.loops:
            for output in loop.outputs:
                node = by_name.get(output.node)
                if output.scaled and node is not None and node.phase == BACKWARD:
                    inputs = (node.name, *([loop.unit] if loop.unit else []))
                    name = f"{node.name}:scaled"
                    scaled[node.name] = dataclasses.replace(
                        node, name=name, op="mul", inputs=inputs, fate="", region=-1
                    )
    in_forward = fused_nodes(outcome)
    result: list[DrawnNode] = []
    for node in nodes:
        if node.name not in in_forward:
            inputs = tuple(scaled[name].name if name in scaled else name for name in node.inputs)
            node = dataclasses.replace(node, inputs=inputs)
        result.append(node)
        if node.name in scaled:
            result.append(scaled[node.name])
    return result


# ---- boxes -------------------------------------------------------------------------------------
def _column_boxes(
    column: str,
    groups: Sequence[NodeGroup],
    equal: Mapping[tuple[str, int], tuple[int, ...]],
    on_host: Set[str],
) -> list[Box]:
    """One box for each group, and for the groups of equal layers together."""
    together: dict[tuple[tuple[int, ...], GroupKey, int], list[NodeGroup]] = defaultdict(list)
    for group in groups:
        key = group.key
        layers = equal.get((key.stack, key.layer), ())
        together[layers, key._replace(layer=0), group.number].append(group)
    return [
        _box(f"{column}_{number}", column, layers, copies, on_host)
        for number, ((layers, _, _), copies) in enumerate(together.items())
    ]


def _box(
    name: str,
    column: str,
    layers: Sequence[int],
    copies: Sequence[NodeGroup],
    on_host: Set[str],
) -> Box:
    first = copies[0]
    nodes = [node for group in copies for node in group.nodes]
    is_single = len(nodes) == 1 and not layers
    sources = Counter(n.source for n in nodes if n.source and n.op not in VIEWS).most_common(1)
    largest = max(nodes, key=lambda node: node.bytes)
    ops = Counter(node.op for node in first.nodes if node.op not in VIEWS)
    return Box(
        name=name,
        column=column,
        layers=join_layers(f"{first.key.stack}.{layer}".lstrip(".") for layer in layers),
        copies=max(1, len(layers)),
        title=nodes[0].op if is_single else first.key.module,
        gradient=first.key.phase != column,
        source=sources[0][0] if sources else "",
        loop=first.key.loop,
        ops=tuple(ops.most_common()),
        shape=largest.shape,
        bytes=largest.bytes,
        amounts=tuple(_amounts(copies, on_host)),
        nodes=tuple(node.name for node in nodes),
    )


def _amounts(copies: Sequence[NodeGroup], on_host: Set[str]) -> Iterable[Amount]:
    for fate in (SAVED, RECOMPUTED, RECONSTRUCTED):
        sizes = [sum(n.bytes for n in group.nodes if n.fate == fate) for group in copies]
        if any(sizes):
            nodes = (n for group in copies for n in group.nodes if n.fate == fate)
            host_bytes = sum(n.bytes for n in nodes if n.name in on_host)
            yield Amount(fate, tuple(size for size in sizes if size), host_bytes)


# ---- arrows ------------------------------------------------------------------------------------
def _arrows(
    outcome: Outcome,
    boxes: Sequence[Box],
    nodes: Sequence[DrawnNode],
    columns: Mapping[str, str],
) -> tuple[Arrow, ...]:
    """Within a column, from each box to its readers; across, from saved values to theirs."""
    by_name = {node.name: node for node in nodes}
    box_of = {name: box.name for box in boxes for name in box.nodes}
    position = {box.name: number for number, box in enumerate(boxes)}
    saved = _saved_sources(outcome, [n for n in nodes if columns[n.name] == FORWARD])
    carried: dict[tuple[str, str], int] = {}
    for node in nodes:
        for name in node.inputs:
            if name not in by_name:
                continue
            across = columns[node.name] == BACKWARD and columns[name] == FORWARD
            for source in sorted(saved[name]) if across else [name]:
                pair = box_of[source], box_of[node.name]
                carried[pair] = max(carried.get(pair, 0), by_name[source].bytes)
    # An arrow to an earlier box is one to the next layer of the same kind: it is not drawn.
    return tuple(
        Arrow(source, target, size)
        for (source, target), size in carried.items()
        if position[source] < position[target]
    )


def _saved_sources(outcome: Outcome, forward: Sequence[DrawnNode]) -> dict[str, frozenset[str]]:
    """Forward value -> the saved values that backward computes it from; itself if it is saved."""
    plan = outcome.save_plan
    sources_of = {item.node: item.sources for item in plan.reconstructed} if plan else {}
    computed_from: dict[str, tuple[str, ...]] = {}
    for node in forward:
        if node.fate == RECONSTRUCTED:
            computed_from[node.name] = sources_of.get(node.name, ())
        elif node.fate == RECOMPUTED or (node.op in VIEWS and not node.fate):
            computed_from[node.name] = node.inputs
        else:
            computed_from[node.name] = ()
    saved = {node.name: frozenset({node.name}) for node in forward if node.fate == SAVED}
    result: dict[str, frozenset[str]] = {}
    for name in graphlib.TopologicalSorter(computed_from).static_order():
        sources = (result[source] for source in computed_from.get(name, ()))
        result[name] = saved.get(name) or frozenset().union(*sources)
    return result
