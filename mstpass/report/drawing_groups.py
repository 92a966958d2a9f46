"""Nodes that are drawn together: of one module, in one loop, without cycles; and equal layers.

A *stack* is a list of layers (``model.layers``), a *layer* one of them.
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
_MOST_KINDS = 4  # of layers in a stack; more are drawn as one


class Key(NamedTuple):
    stack: str
    layer: int
    rest: str
    phase: str
    loop: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box before layers are folded. ``number`` counts the pieces of one key."""

    key: Key
    number: int
    nodes: tuple[DrawnNode, ...]


def split_path(module: str) -> tuple[str, int, str]:
    """``model.layers.3.mlp.up`` as ``("model.layers", 3, "mlp")``; stack ``""`` and -1 outside."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part), ".".join(parts[i + 1 : i + 2])
    return "", -1, ".".join(parts[:2])


def keys_of(nodes: Sequence[DrawnNode], loop_of: Mapping[int, int], fold: bool) -> dict[str, Key]:
    """What each node of a column is drawn with. A view stands with the first that reads it."""
    keys: dict[str, Key] = {}
    reader: dict[str, str] = {}
    for node in reversed(nodes):
        loop = loop_of.get(node.region, -1)
        if not fold:
            keys[node.name] = Key("", -1, node.name, node.phase, loop)
        elif node.op in VIEWS and not node.fate and node.name in reader:
            keys[node.name] = keys[reader[node.name]]
        else:
            keys[node.name] = Key(*split_path(node.module), node.phase, loop)
        reader |= dict.fromkeys(node.inputs, node.name)
    return keys


def pieces_of(nodes: Sequence[DrawnNode], keys: Mapping[str, Key]) -> list[Piece]:
    """Nodes by key, without cycles, in an order in which they can run."""
    members: list[list[DrawnNode]] = []
    piece_of: dict[str, int] = {}
    last: dict[Key, int] = {}
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
    counts: Counter[Key] = Counter()
    result = []
    for piece in nx.lexicographical_topological_sort(graph):
        key = keys[members[piece][0].name]
        result.append(Piece(key, counts[key], tuple(members[piece])))
        counts[key] += 1
    return result


# ---- layers ------------------------------------------------------------------------------------
def kinds_of(pieces: Sequence[Piece], alone: bool) -> dict[tuple[str, int], tuple[int, ...]]:
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
