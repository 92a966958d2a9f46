"""Write the items of a split or of an ``unbind`` of wide values as slices and selections.

    split(x, n, dim)[i]  =  x.narrow(dim, i n, n)        unbind(x, dim)[i]  =  x.select(dim, i)

The rewrites of slices then need to know two ops only.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import dims_of, shape_of
from mstpass.normalize.downstream import downstream
from mstpass.regions.anchors import anchors

aten = torch.ops.aten
_CATS = (aten.cat.default, aten.stack.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def items_as_slices(joint: JointGraph) -> Rewritten:
    """Rewrite such items in a copy of the graph; the graph itself if it has none.

    No name counts as changed: a slice alone makes no region.
    """
    found = (node for node in joint.nodes if _is_item(node) and _is_wide(joint, node))
    return rewritten(joint, found, _rewrite)


def _rewrite(rewriting: Rewriting, item: fx.Node) -> None:
    with rewriting.graph.inserting_before(item):
        built = _written(rewriting.builder, item)
    built.meta.update(replacement_meta(item))
    rewriting.replace(item, built)


def _is_item(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    several = node.all_input_nodes[0]
    splits = several.target in _SPLITS or several.target is aten.unbind.int
    return splits and is_static(_source(node).meta["val"])


def _is_wide(joint: JointGraph, item: fx.Node) -> bool:
    """Whether the item holds tokens of the values after an anchor, or that an anchor multiplies,
    or is taken from a stack."""
    source, known = _source(item), joint.cached(downstream)
    (dim,) = dims_of(item.all_input_nodes[0], len(shape_of(source)), "dim")
    if (source in known and dim in known[source][0]) or item in joint.cached(_multiplied):
        return True
    while ops.is_cheap_view(source):
        source = source.all_input_nodes[0]
    return source.target in _CATS and any(n in known for n in source.all_input_nodes)


def _multiplied(joint: JointGraph) -> set[fx.Node]:
    """The values that an anchor multiplies, as they are before views and copies."""
    found = set()
    for anchor, _ in joint.cached(anchors):
        for node in ops.matmul_factors(anchor):
            while ops.is_cheap_view(node) or ops.is_copy(node):
                node = node.all_input_nodes[0]
            found.add(node)
    return found


def _source(item: fx.Node) -> fx.Node:
    return item.all_input_nodes[0].all_input_nodes[0]


def _written(builder: Builder, item: fx.Node) -> fx.Node:
    several, index = item.args
    assert isinstance(several, fx.Node) and isinstance(index, int), "a node and a number"
    source = _source(item)
    (dim,) = dims_of(several, len(shape_of(source)), "dim")
    if several.target is aten.unbind.int:
        return builder.call(aten.select.int, source, dim, index)
    sizes = [value.shape[dim] for value in several.meta["val"]]
    ends = list(itertools.accumulate(sizes))
    return builder.call(aten.slice.Tensor, source, dim, ends[index] - sizes[index], ends[index])
