"""Add the bias of attention's output projection after its product, because heads can add up sums.

    addmm(bias, x, weight)  =  mm(x, weight) + bias

Each group of heads has its share of the product; the bias is added once. Only products of values
that attention returns are rewritten, seen through views and copies.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention_item
from mstpass.graph.joint import JointGraph
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten

aten = torch.ops.aten


def bias_after_product(joint: JointGraph) -> Rewritten:
    """Rewrite the biased products of attention's results, in a copy of the graph.

    Returns:
        The copy and the names of the products in it; the graph itself if it has no such product.
    """
    return rewritten(joint, filter(_is_output_projection, joint.nodes), _split)


def _is_output_projection(node: fx.Node) -> bool:
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    source = node.args[1]
    assert isinstance(source, fx.Node), "the source is a node"
    while (ops.is_cheap_view(source) or ops.is_copy(source)) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return is_attention_item(source) or source.target is aten.bmm.default


def _split(rewriting: Rewriting, biased: fx.Node) -> fx.Node:
    """Replace the node by a product and a sum; returns the product."""
    call = rewriting.builder.call
    bias, left, right = biased.args
    with rewriting.graph.inserting_before(biased):
        product = call(aten.mm.default, left, right)
        total = call(aten.add.Tensor, product, bias)
    for node in (product, total):
        node.meta.update(policy_meta(biased))
    rewriting.replace(biased, total)
    return product
