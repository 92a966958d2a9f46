"""Let a softmax over shards sum its exponentials before the maximum of all shards is known.

Each rank has some of the columns of x. A softmax over all of them subtracts the maximum M of all
ranks and adds up the sums of all ranks::

    m = amax(x);   M = all_reduce(m, max);   s = sum(exp(x - M));   S = all_reduce(s, sum)

So x is needed before the first collective, between the two and after them: three times, if it
exists only in chunks. The same sum, with the rank's own maximum::

    s = sum(exp(x - m)) exp(m - M)

needs x no later than m. A row that is ``-inf`` everywhere has s = 0 as before. The new form rounds
otherwise, within a few units of the last place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import JointGraph
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import same_shape
from mstpass.normalize.downstream import downstream
from mstpass.torch_internals.collectives import ALL_REDUCE
from mstpass.torch_internals.graphs import schema_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The names of the nodes of one such sum: x, m, M and s."""

    values: str
    own_maximum: str
    maximum: str
    total: str


def local_sums(joint: JointGraph) -> Rewritten:
    """Rewrite such sums over the results of anchors, in a copy of the graph.

    Returns:
        The copy and the names of the sums in it; the graph itself if it has none.
    """
    known = joint.cached(downstream)
    found = [s for node in joint.nodes if (s := _sum_of(node)) and joint.by_name[s.values] in known]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    made = frozenset(_rewrite(rewriting, each).name for each in found)
    return rewriting.finished(), made


def _sum_of(total: fx.Node) -> _Sum | None:
    """The sum, if the node is the s of the pattern."""
    if total.target is not aten.sum.dim_IntList or not any(map(is_collective, total.users)):
        return None
    (exponentials,) = total.all_input_nodes
    if exponentials.target is not aten.exp.default:
        return None
    (difference,) = exponentials.all_input_nodes
    if difference.target is not aten.sub.Tensor or len(difference.args) != 2 or difference.kwargs:
        return None
    values, maximum = difference.args
    if not isinstance(values, fx.Node) or not isinstance(maximum, fx.Node):
        return None
    own = _maximum_of_all_ranks(maximum)
    if own is None or own.target is not aten.amax.default or own.args[0] is not values:
        return None
    if list(own.args[1:2]) != list(total.args[1:2]) or not _keep_dims(own, total):
        return None
    return _Sum(values.name, own.name, maximum.name, total.name)


def _maximum_of_all_ranks(node: fx.Node) -> fx.Node | None:
    """What each rank gives, if the value is the maximum over the ranks."""
    if not is_wait(node) or not is_collective(node.all_input_nodes[0]):
        return None
    pending = node.all_input_nodes[0]
    name = schema_of(pending.target).name  # type: ignore[arg-type]
    if name != ALL_REDUCE or pending.args[1] != "max":
        return None
    return pending.all_input_nodes[0]


def _keep_dims(*reductions: fx.Node) -> bool:
    """Whether the results have the rank of their operand, and its dtype."""
    values: list[Any] = [node.meta["val"] for node in reductions]
    operands: list[Any] = [node.args[0].meta["val"] for node in reductions]  # type: ignore[union-attr]
    return all(
        value.dim() == operand.dim() and value.dtype == operand.dtype
        for value, operand in zip(values, operands, strict=True)
    ) and same_shape(values[0].shape, values[1].shape)


def _rewrite(rewriting: Rewriting, found: _Sum) -> fx.Node:
    """Put the new sum in the place of the old one. Returns the sum with the rank's own maximum."""
    builder, by_name = rewriting.builder, rewriting.joint.by_name
    old = by_name[found.total]
    values, own, maximum = (
        by_name[name] for name in (found.values, found.own_maximum, found.maximum)
    )
    value = own.meta["val"]
    call = builder.call
    with builder.graph.inserting_after(own):
        zero = call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    with builder.graph.inserting_after(zero):
        nothing = call(aten.eq.Scalar, own, float("-inf"))
    with builder.graph.inserting_after(nothing):
        subtracted = call(aten.where.self, nothing, zero, own)
    with builder.graph.inserting_after(subtracted):
        difference = call(aten.sub.Tensor, values, subtracted)
    with builder.graph.inserting_after(difference):
        exponentials = call(aten.exp.default, difference)
    with builder.graph.inserting_after(exponentials):
        total = call(old.target, exponentials, *old.args[1:], **old.kwargs)
    with builder.graph.inserting_before(old):
        scale = call(aten.exp.default, call(aten.sub.Tensor, own, maximum))
        empty = call(aten.eq.Scalar, own, float("-inf"))
        scaled = call(aten.where.self, empty, zero, call(aten.mul.Tensor, total, scale))
    for node in (total, scaled):
        node.meta.update(replacement_meta(old))
    rewriting.replace(old, scaled)
    return total
