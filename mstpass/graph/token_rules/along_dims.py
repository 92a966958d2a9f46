"""Token rules of ops that keep dims apart, but for some that they work along.

Permutations, reductions, softmax, sorts, slices, concatenation, gather and scatter along a dim,
norms: each is token-parallel if no dim that it works along is a token dim. A sum over all token
dims gives SUM, a maximum MAX, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from mstpass.graph.advice import NO_STACKS, ROWWISE, SELECT_FIRST, SEPARATE_DIMS, Advice, Reason
from mstpass.graph.token_rules import WORKED, Place, Places, Rule
from mstpass.graph.token_rules.arguments import (
    argument,
    dims_of,
    has_argument,
    ints,
    shape_of,
    tensor_inputs,
)
from mstpass.graph.tokens import Reduced

aten = torch.ops.aten
# (node, operand) -> the dim of the result for each dim of the operand; None: the op works along it
PlacesOf = Callable[[fx.Node, fx.Node], "list[int | None]"]
WorkedDims = Callable[[fx.Node, int], "list[int]"]  # (node, its rank) -> dims that it works along


def by_places(places_of: PlacesOf, refused: Reason = WORKED) -> Rule:
    """The rule of an op whose result has the dims of its operands in other places."""

    def places(node: fx.Node) -> Places:
        each = [(n, places_of(node, n)) for n in tensor_inputs(node)]
        return [(n, [refused if place is None else place for place in of]) for n, of in each]

    return Rule(places, refused)


def along(worked_dims: WorkedDims, advice: Advice = ROWWISE) -> Rule:
    """The rule of an op that works along ``worked_dims``; operands and result have equal rank."""

    def places(node: fx.Node) -> Places:
        out, operands = shape_of(node), tensor_inputs(node)
        found: list[Place] = [*range(len(out))]
        for dim, size in enumerate(out):
            if any(shape_of(n)[dim] != size for n in operands):
                found[dim] = SEPARATE_DIMS("the operands of {} differ in their token dims")
        for dim in worked_dims(node, len(out)):
            found[dim] = advice(WORKED)
        return [(n, found) for n in operands]

    return Rule(places, advice(WORKED))


# ---- the dims that an op works along ------------------------------------------------------------
def dim_argument(node: fx.Node, rank: int) -> list[int]:
    return dims_of(node, rank, "dim")


def dims_argument(node: fx.Node, rank: int) -> list[int]:
    return dims_of(node, rank, "dims")


def last_two(node: fx.Node, rank: int) -> list[int]:
    return [rank - 2, rank - 1]


def padded(node: fx.Node, rank: int) -> list[int]:
    """The dims that are padded or cropped.

    A dim that is padded at one end and cropped by as much at the other keeps its size, but its
    elements move, so it counts as well, and so does one that is padded by a symbolic size.
    """
    return [rank - 1 - i // 2 for i, size in enumerate(argument(node, "pad")) if size != 0]


# ---- dims are added, removed or moved -----------------------------------------------------------
def _with_dim(rank: int, dim: int) -> list[int | None]:
    """The places of dims in a result that has one more."""
    return [d + (d >= dim) for d in range(rank)]


def _without_dim(rank: int, dim: int) -> list[int | None]:
    """The places of dims in a result that has one of them no more."""
    return [None if d == dim else d - (d > dim) for d in range(rank)]


def _selected(node: fx.Node, operand: fx.Node) -> list[int | None]:
    rank = len(shape_of(operand))
    return _without_dim(rank, *dim_argument(node, rank))


def _stacked(node: fx.Node, operand: fx.Node) -> list[int | None]:
    return _with_dim(len(shape_of(operand)), *dim_argument(node, len(shape_of(node))))


def _select_scattered(node: fx.Node, operand: fx.Node) -> list[int | None]:
    if operand is node.args[1]:
        return _stacked(node, operand)
    (dim,) = dim_argument(node, len(shape_of(node)))
    return [None if d == dim else d for d in range(len(shape_of(operand)))]


def _repeated(node: fx.Node, operand: fx.Node) -> list[int | None]:
    """``aten.repeat``: new dims come first, and some dims hold their elements several times."""
    counts = argument(node, "repeats")
    new = len(counts) - len(shape_of(operand))
    return [d + new if counts[d + new] == 1 else None for d in range(len(counts) - new)]


def _permuted(node: fx.Node, operand: fx.Node) -> list[int | None]:
    rank = len(shape_of(node))
    order = list(range(rank))  # for each dim of the result, the operand's dim
    if node.target is aten.permute.default:
        order = [d % rank for d in ints(node.args[1])]
    elif node.target is aten.t.default:
        order = order[::-1]
    else:
        a, b = (d % rank for d in ints(node.args[1:3]))
        order[a], order[b] = order[b], order[a]
    return [order.index(d) for d in range(rank)]


def _complex(node: fx.Node, operand: fx.Node) -> list[int | None]:
    """``view_as_real`` has a last dim of two more than its complex operand, ``view_as_complex`` one
    less; real and imaginary parts are no tokens."""
    rank = len(shape_of(node))
    return [d if d < rank else None for d in range(len(shape_of(operand)))]


selected = by_places(_selected, SELECT_FIRST("{} picks single tokens"))  # and ``unbind``
stacked = by_places(_stacked, NO_STACKS(WORKED))
select_scattered = by_places(_select_scattered, SELECT_FIRST("{} writes single tokens"))
repeated = by_places(_repeated)
permuted = by_places(_permuted)
as_complex = by_places(_complex)


# ---- reductions: the dims disappear or keep size 1 ----------------------------------------------
def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dims that a reduction of an operand with ``rank`` dims reduces over."""
    return dims_of(node, rank, "dim") if has_argument(node, "dim") else list(range(rank))


def reduced(combined: Reduced | None = None, advice: Advice = ROWWISE) -> Rule:
    """The rule of a reduction; ``combined``: how results of chunks make that of all tokens."""

    def places(node: fx.Node) -> Places:
        (source,) = tensor_inputs(node)
        rank = len(shape_of(source))
        dims = reduced_dims(node, rank)
        kept = [d for d in range(rank) if d not in dims]
        names = kept if len(shape_of(node)) == rank else range(len(kept))
        found: dict[int, Place] = dict(zip(kept, names, strict=True))
        return [(source, [found.get(d, -1 - d) for d in range(rank)])]

    return Rule(places, combined=combined, reduced=advice)


# ---- norms: several results; all tokens share the weights ---------------------------------------
def _normalized(node: fx.Node) -> Places:
    source, *weights = (n for n in node.args[:1] + node.args[2:] if isinstance(n, fx.Node))
    refused = ROWWISE("the weights of {} depend on tokens")
    rank = len(shape_of(source))
    kept = rank - len(argument(node, "normalized_shape"))
    of_source = [d if d < kept else _normalizes for d in range(rank)]
    return [(source, of_source), *((n, [refused] * len(shape_of(n))) for n in weights)]


_normalizes = ROWWISE("{} normalizes over tokens")
norm = Rule(_normalized, _normalizes)


# ---- collectives ---------------------------------------------------------------------------------
# An all-reduce and a broadcast compute each element from that element of each rank's value. An
# all-gather, a reduce-scatter and an all-to-all exchange blocks of the first dim: gathered features
# belong to the same token, but gathered tokens belong to other ranks. These rules follow tokens
# through a graph; no loop runs a collective all the same (graph/collectives.py).
def _gathered_and_divided(node: fx.Node, rank: int) -> list[int]:
    """``shard_dim_alltoall``: one dim is gathered, another one is divided."""
    return [argument(node, name) % rank for name in ("gather_dim", "shard_dim")]


elementwise_over_ranks = along(lambda node, rank: [])
first_dim_over_ranks = along(lambda node, rank: [0])
gathered_and_divided = along(_gathered_and_divided)
