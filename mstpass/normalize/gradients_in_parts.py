"""A norm's gradient by the keys and values, apart from that by the queries.

What the queries, keys and values of attention are computed from, ``n = norm(x)``, has a gradient of
three terms, and ``x`` one that is linear in it::

    before    dn = dn_q + dn_kv               dx = dh + norm'(dn)
    after     p = dh + norm'(dn_q)            dx = p + norm'(dn_kv)

A loop over chunks of queries has ``dn_q`` of its chunk, and ``dn_kv`` only once all chunks have run
(regions/blocks.py). So it returns ``p``, where it would return ``dh`` and ``dn_q``.

Pseudo-code, for each backward of attention, of what depends on the gradients of keys or values::

    of each node: its part by these, and its part by other gradients
    where an op has both: apply it to each, as it is linear in them
    where a product, or an op that is not linear, reads the value: the sum of both
    a cast to a wider dtype that ends the sums: of the sum
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention, is_backward, is_product, is_summed
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import same_shape

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A value as a sum: by the gradients of keys and values, and by others; None for no part."""

    by_keys: fx.Node | None
    by_others: fx.Node | None


def gradients_in_parts(joint: JointGraph) -> Rewritten:
    """Split such gradients, in a copy of the graph.

    Returns:
        The copy and the names of the sums of two parts in it; the graph itself if there are none.
    """
    attention = [node for node in joint.nodes if is_attention(node) and is_backward(node)]
    if not attention:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    gradients = set(rewriting.joint.backward)
    splits = [
        _Split(rewriting, rewriting.joint.by_name[node.name], gradients).run() for node in attention
    ]
    return rewriting.result() if any(splits) else (joint, frozenset())


class _Split:
    """The parts of what depends on one attention's gradients.

    Args:
        gradients: the nodes of the backward; it grows.
    """

    def __init__(self, rewriting: Rewriting, attention: fx.Node, gradients: set[fx.Node]):
        self.rewriting, self.gradients = rewriting, gradients
        self.nodes = rewriting.joint.nodes[rewriting.joint.index[attention] + 1 :]
        self.parts = {item: _Parts(item, None) for item in attention.users if is_summed(item)}
        self.split: dict[fx.Node, _Parts] = {}  # where both parts have nodes of their own

    def run(self) -> bool:
        """Rewrite the graph; returns whether there are sums."""
        for node in self.nodes:
            operands = [n for n in node.all_input_nodes if n in self.gradients]
            if node.op != "call_function" or not any(n in self.parts for n in operands):
                continue
            parts = self._parts_of(node, operands)
            if parts is None:
                continue
            if parts.by_others is not None:
                self.split[node] = parts
                if any(map(is_product, ops.readers_through_views(node))):
                    continue  # it exists as a whole
            self.parts[node] = parts
        for node in reversed([*self.split]):
            if ops.widens(node) and all(user not in self.split for user in node.users):
                del self.split[node]  # it reads the sum, which takes less memory
        found = False
        for node, parts in self.split.items():
            readers = [user for user in node.users if user not in self.split]
            if readers:  # of the value as a whole
                total = self._call(node, aten.add.Tensor, parts.by_others, parts.by_keys)
                self.rewriting.replace(node, total, readers)
                found = True
        return found

    def _parts_of(self, node: fx.Node, operands: list[fx.Node]) -> _Parts | None:
        """The parts of a node; None where it reads its operands as a whole."""
        parts = [self.parts.get(n, _Parts(None, n)) for n in operands]
        if all(part.by_others is None for part in parts):
            return _Parts(node, None)
        is_plain = value_of(node) is not None and not ops.is_matmul(node)
        if not is_plain or not ops.row(node).is_linear(node, set(operands)):
            return None
        by_keys = self._applied(node, operands, [part.by_keys for part in parts])
        by_others = self._applied(node, operands, [part.by_others for part in parts])
        return None if by_keys is None or by_others is None else _Parts(by_keys, by_others)

    def _applied(
        self, node: fx.Node, operands: list[fx.Node], parts: list[fx.Node | None]
    ) -> fx.Node | None:
        """The op on one part of each operand; None if it cannot do without one that has none."""
        given = {old: new for old, new in zip(operands, parts, strict=True) if new is not None}
        if len(given) == len(operands):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n))
            return self._call(node, node.target, *args, **kwargs)
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        alike = all(
            same_shape(n.meta["val"].shape, node.meta["val"].shape)
            and n.meta["val"].dtype == node.meta["val"].dtype
            for n in operands
        )
        return next(iter(given.values())) if is_sum and alike else None

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.rewriting.before(node):
            new = self.rewriting.builder.call(target, *args, **kwargs)
        self.gradients.add(new)
        return new
