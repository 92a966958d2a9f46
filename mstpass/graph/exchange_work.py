"""What a rank sends in a collective, as plain data: the costs of a device turn it into a time.

Of R ranks, each sends of its operand x or of its result y, by the algorithm that sends the least::

    all-to-all       x (R - 1) / R, an equal part to each of the others
    all-gather       y (R - 1) / R
    reduce-scatter   x (R - 1) / R
    all-reduce     2 x (R - 1) / R
    broadcast, and an exchange in which a rank has one partner, as in a ring: x

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from mstpass.graph.collectives import group_of, is_collective
from mstpass.graph.joint import nbytes
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.collectives import group_size
from mstpass.torch_internals.graphs import schema_of


@dataclasses.dataclass(frozen=True)
class ExchangeWork:
    """The work of a collective.

    Attributes:
        sent_bytes: what a rank sends to all others together.
        ranks: of the group, neighbors in as few nodes as hold them.
        in_turn: ranks send to their neighbors alone. Otherwise each sends equal parts to all.
    """

    sent_bytes: float
    ranks: int
    in_turn: bool = True


def exchange_work(node: fx.Node) -> ExchangeWork | None:
    """The work of a node; None where it is no collective of a group that this process knows."""
    ranks = group_size(group_of(node)) if is_collective(node) else 0
    if ranks == 0:
        return None
    name = schema_of(node.target).name.partition("::")[2]  # type: ignore[arg-type]
    given = sum(map(nbytes, node.all_input_nodes))
    others = (ranks - 1) / ranks
    if "all_to_all" in name or "alltoall" in name:
        if _has_one_partner(node):
            return ExchangeWork(given, ranks)
        return ExchangeWork(given * others, ranks, in_turn=False)
    if name.startswith("all_gather"):
        return ExchangeWork(nbytes(node) * others, ranks)
    if name.startswith("reduce_scatter"):
        return ExchangeWork(given * others, ranks)
    if name.startswith("all_reduce"):
        return ExchangeWork(2 * given * others, ranks)
    return ExchangeWork(given, ranks)


def _has_one_partner(node: fx.Node) -> bool:
    sizes = argument(node, "input_split_sizes") if has_argument(node, "input_split_sizes") else ()
    return sum(size != 0 for size in sizes or ()) == 1
