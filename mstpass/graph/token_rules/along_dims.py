"""Token rules of ops that work along some dims and treat the others as a batch.

Reductions, softmax, sorts, slices, concatenation, gather and scatter along a dim, norms: each is
token-parallel if no dim that it works along is a token dim. A sum over all token dims gives SUM, a
maximum MAX, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mstpass.graph.token_rules import BackwardRule, ForwardRule, OperandSpecs
from mstpass.graph.token_rules.arguments import (
    argument,
    dims_of,
    has_argument,
    shape_of,
    tensor_inputs,
)
from mstpass.graph.tokens import WHOLE, Reduced, Refusal, Spec

WorkedDims = Callable[[fx.Node, int], "list[int]"]  # (node, its rank) -> dims that it works along


# ---- reductions: the dims disappear or keep size 1 ----------------------------------------------
def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dims that a reduction of an operand with ``rank`` dims reduces over."""
    return dims_of(node, rank, "dim") if has_argument(node, "dim") else list(range(rank))


def reduce_forward(combined: Reduced | None) -> ForwardRule:
    """The rule of a reduction; ``combined``: how results of chunks make that of all tokens."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        source = shape_of(operand)
        dims = reduced_dims(node, len(source))
        if not set(dims) & set(spec):
            return _after_reduction(len(source), dims, len(shape_of(node)), spec)
        if combined and set(spec) <= set(dims):
            return combined
        which = "all tokens" if set(spec) <= set(dims) else "some of the token dims"
        return Refusal(f"{node.target} reduces over {which}")

    return forward


def _after_reduction(in_rank: int, dims: list[int], out_rank: int, spec: Spec) -> Spec:
    if out_rank == in_rank:
        return spec
    kept = [d for d in range(in_rank) if d not in dims]
    return tuple(kept.index(d) for d in spec)


def reduce_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    operand = node.all_input_nodes[0]
    source = shape_of(operand)
    dims = reduced_dims(node, len(source))
    if len(shape_of(node)) == len(source):
        result = spec
    else:
        kept = [d for d in range(len(source)) if d not in dims]
        result = tuple(kept[d] for d in spec)
    if set(result) & set(dims):
        return Refusal(f"{node.target} reduces over tokens")
    return {operand: result}


# ---- the dims stay: softmax, sort, slice, cat, gather, flip, triu, padding ----------------------
def _works_along_tokens(node: fx.Node) -> Refusal:
    return Refusal(f"{node.target} works along a token dim")


def along(worked_dims: WorkedDims) -> tuple[ForwardRule, BackwardRule]:
    """Both rules of an op that works along ``worked_dims``; operands and result have equal rank."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
        if set(worked_dims(node, len(shape_of(node)))) & set(spec):
            return _works_along_tokens(node)
        return spec

    def backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        out = shape_of(node)
        if set(worked_dims(node, len(out))) & set(spec):
            return _works_along_tokens(node)
        needs: OperandSpecs = {}
        for operand in tensor_inputs(node):
            source = shape_of(operand)
            if len(source) != len(out) or any(source[d] != out[d] for d in spec):
                return Refusal(f"the operands of {node.target} differ in their token dims")
            needs[operand] = spec
        return needs

    return forward, backward


def repeat_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """``aten.repeat``: new dims come first, and some dims hold their elements several times."""
    new = len(shape_of(node)) - len(shape_of(operand))
    result = tuple(d + new for d in spec)
    return _works_along_tokens(node) if set(result) & _repeated(node) else result


def repeat_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    operand = node.all_input_nodes[0]
    new = len(shape_of(node)) - len(shape_of(operand))
    if set(spec) & _repeated(node):
        return _works_along_tokens(node)
    return {operand: tuple(d - new for d in spec)}


def _repeated(node: fx.Node) -> set[int]:
    """The dims of the result that are new, or that hold their elements more than once."""
    counts, source = argument(node, "repeats"), shape_of(node.all_input_nodes[0])
    new = len(counts) - len(source)
    return {d for d, count in enumerate(counts) if d < new or count != 1}


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


# ---- one dim is added or removed ----------------------------------------------------------------
def select_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """``select`` and ``unbind``: the result does not have the dim."""
    (dim,) = dim_argument(node, len(shape_of(operand)))
    if dim in spec:
        return Refusal(f"{node.target} picks single tokens")
    return tuple(d - (d > dim) for d in spec)


def select_backward(node: fx.Node, spec: Spec) -> OperandSpecs:
    operand = node.all_input_nodes[0]
    (dim,) = dim_argument(node, len(shape_of(operand)))
    return {operand: tuple(d + (d >= dim) for d in spec)}


def stack_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    (dim,) = dim_argument(node, len(shape_of(node)))
    return tuple(d + (d >= dim) for d in spec)


def stack_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    (dim,) = dim_argument(node, len(shape_of(node)))
    if dim in spec:
        return Refusal(f"{node.target} works along a token dim")
    return dict.fromkeys(tensor_inputs(node), tuple(d - (d > dim) for d in spec))


def select_scatter_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    (dim,) = dim_argument(node, len(shape_of(node)))
    if operand is node.args[1]:
        return stack_forward(node, operand, spec)
    return Refusal(f"{node.target} writes single tokens") if dim in spec else spec


def select_scatter_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    base, source = node.args[:2]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node), "both are nodes"
    (dim,) = dim_argument(node, len(shape_of(node)))
    if dim in spec:
        return Refusal(f"{node.target} writes single tokens")
    return {base: spec, source: tuple(d - (d > dim) for d in spec)}


# ---- norms: several results; all tokens share the weights ---------------------------------------
def norm_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    if operand is not node.args[0] or operand in node.args[1:]:
        return Refusal(f"the weights of {node.target} depend on tokens")
    if set(_normalized_dims(node)) & set(spec):
        return Refusal(f"{node.target} normalizes over tokens")
    return spec


def norm_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    source = node.all_input_nodes[0]
    result = norm_forward(node, source, spec)
    if isinstance(result, Refusal):
        return result
    return {**dict.fromkeys(tensor_inputs(node), WHOLE), source: spec}


def _normalized_dims(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    return list(range(rank - len(argument(node, "normalized_shape")), rank))


# ---- collectives ---------------------------------------------------------------------------------
# An all-reduce and a broadcast compute each element from that element of each rank's value. An
# all-gather, a reduce-scatter and an all-to-all exchange blocks of the first dim: gathered features
# belong to the same token, but gathered tokens belong to other ranks. These rules follow tokens
# through a graph; no loop runs a collective all the same (graph/collectives.py).
def _no_dim(node: fx.Node, rank: int) -> list[int]:
    return []


def _first_dim(node: fx.Node, rank: int) -> list[int]:
    return [0]


def _gathered_and_divided(node: fx.Node, rank: int) -> list[int]:
    """``shard_dim_alltoall``: one dim is gathered, another one is divided."""
    return [argument(node, name) % rank for name in ("gather_dim", "shard_dim")]


elementwise_over_ranks = along(_no_dim)
first_dim_over_ranks = along(_first_dim)
gathered_and_divided = along(_gathered_and_divided)
