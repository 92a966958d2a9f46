"""Which nodes are drawn together: those of one module and one loop, without cycles; equal layers.

Terms: a *stack* is a list of layers (``model.layers``), a *layer* is one of them. A *group* is the
nodes of one module that are drawn as one box.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import networkx as nx

from mstpass.report.details import DrawnNode

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
