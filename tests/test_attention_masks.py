"""Masks that the backward of attention reads get one buffer for all heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from mstpass.schedule.finished_graphs import materialize_masks
from mstpass.torch_internals.fake_tensors import FakeTensorMode

aten = torch.ops.aten
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
HEADS, TOKENS = 4, 16


class _Traced:
    """A graph that is written node by node, with the values of its nodes."""

    def __init__(self) -> None:
        self.graph, self.fake = fx.Graph(), FakeTensorMode()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.fake:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, op: Callable[..., object], *args: object) -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with self.fake:
            node.meta["val"] = op(*values)
        return node

    def attention(self, mask: fx.Node | None) -> fx.Node:
        query = self.input(1, HEADS, TOKENS, 8)
        sums = self.input(1, HEADS, TOKENS)
        seed = self.input()
        operands = (query, query, query, query, mask, query, sums, seed, seed)
        node = self.graph.call_function(BACKWARD, (*operands, 0.0, [True, True, True, False]))
        node.meta["val"] = (query.meta["val"],) * 3
        return node


def _expanded(traced: _Traced, mask: fx.Node) -> fx.Node:
    return traced.call(aten.expand.default, mask, [1, HEADS, TOKENS, TOKENS])


def _realized(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "mstpass.realize" in str(node.target)]


def test_a_computed_mask_is_written_before_it_is_expanded() -> None:
    traced = _Traced()
    mask = traced.call(aten.log.default, traced.input(1, 1, TOKENS, TOKENS))
    expanded = _expanded(traced, mask)
    first, second = traced.attention(expanded), traced.attention(expanded)
    materialize_masks(traced.graph)
    (written,) = _realized(traced.graph)
    assert written.all_input_nodes == [mask] and expanded.all_input_nodes == [written]
    assert first.args[4] is expanded and second.args[4] is expanded
    order = list(traced.graph.nodes)
    assert order.index(mask) < order.index(written) < order.index(expanded)


@pytest.mark.parametrize("kind", ["an input", "as large", "none"])
def test_other_masks_stay(kind: str) -> None:
    traced = _Traced()
    mask: fx.Node | None = None
    if kind == "an input":
        mask = _expanded(traced, traced.input(1, 1, TOKENS, TOKENS))
    elif kind == "as large":
        mask = traced.call(aten.log.default, traced.input(1, HEADS, TOKENS, TOKENS))
        mask = _expanded(traced, mask)
    traced.attention(mask)
    before = str(traced.graph)
    materialize_masks(traced.graph)
    assert str(traced.graph) == before
