"""Token rules of collectives, which combine the values of several ranks.

*Elementwise* over ranks: an all-reduce and a broadcast compute each element of the result from that
element of each rank's value, so tokens stay apart. A wait changes nothing.

*Along dims*: an all-gather, a reduce-scatter and an all-to-all exchange blocks of the first dim.
They are token-parallel if that is no token dim: gathered features belong to the same token, but
gathered tokens belong to other ranks.

These rules follow tokens through a graph. No loop runs a collective all the same: see
graph/collectives.py.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph.token_rules.along_dims import along
from mstpass.graph.token_rules.arguments import argument


def _no_dim(node: fx.Node, rank: int) -> list[int]:
    return []


def _first_dim(node: fx.Node, rank: int) -> list[int]:
    return [0]


def _gathered_and_divided(node: fx.Node, rank: int) -> list[int]:
    """``shard_dim_alltoall``: one dim is gathered, another one is divided."""
    return [argument(node, name) % rank for name in ("gather_dim", "shard_dim")]


elementwise = along(_no_dim)
first_dim = along(_first_dim)
gathered_and_divided = along(_gathered_and_divided)
