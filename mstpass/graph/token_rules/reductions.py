"""Rules of ops that work along some dims and leave the others alone, for the op table.

Reductions, softmax, sorts, slices, concatenation, gather and scatter along a dim, norms: each is
token-parallel where the dims that it works along are no token dims. (``Forward`` and ``Backward``
rules: see rules.py.)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mstpass.graph.token_rules.basic import (
    Backward,
    Forward,
    argument,
    ints,
    shape_of,
    tensor_inputs,
)
from mstpass.graph.tokens import SUM, WHOLE, Refusal, Spec, Sum
from mstpass.torch_internals.op_types import OpOverload, schema_of

Dims = Callable[[fx.Node, int], "list[int]"]


def _given(node: fx.Node, rank: int, name: str) -> list[int]:
    """The dims of an argument, none given meaning all."""
    dims = argument(node, name)
    if dims is None or dims == []:
        return list(range(rank))
    return [d % max(1, rank) for d in ints([dims] if isinstance(dims, int) else dims)]


# ---- reductions: the dims go --------------------------------------------------------------------
def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dims of its operand that a reduction takes together."""
    assert isinstance(node.target, OpOverload)
    takes_dims = any(a.name == "dim" for a in schema_of(node.target).arguments)
    return _given(node, rank, "dim") if takes_dims else list(range(rank))


def reduce_forward(sums: bool) -> Forward:
    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
        source = shape_of(operand)
        dims = reduced_dims(node, len(source))
        if not set(dims) & set(spec):
            return _after_reduction(len(source), dims, len(shape_of(node)), spec)
        if sums and set(spec) <= set(dims):
            return SUM
        return Refusal(
            f"{node.target} reduces over {'all' if set(spec) <= set(dims) else 'some'} tokens"
        )

    return forward


def _after_reduction(in_rank: int, dims: list[int], out_rank: int, spec: Spec) -> Spec:
    if out_rank == in_rank:
        return spec
    kept = [d for d in range(in_rank) if d not in dims]
    return tuple(kept.index(d) for d in spec)


def reduce_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
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
def along(dims_of: Dims) -> tuple[Forward, Backward]:
    """Rules of an op whose operands and results have the same dims, worked along ``dims_of``."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
        if set(dims_of(node, len(shape_of(node)))) & set(spec):
            return Refusal(f"{node.target} works along a token dim")
        return spec

    def backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
        out = shape_of(node)
        if set(dims_of(node, len(out))) & set(spec):
            return Refusal(f"{node.target} works along a token dim")
        needs: dict[fx.Node, Spec] = {}
        for operand in tensor_inputs(node):
            source = shape_of(operand)
            if len(source) != len(out) or any(source[d] != out[d] for d in spec):
                return Refusal(f"{node.target}: operands differ in their token dims")
            needs[operand] = spec
        return needs

    return forward, backward


def dim_argument(node: fx.Node, rank: int) -> list[int]:
    return _given(node, rank, "dim")


def dims_argument(node: fx.Node, rank: int) -> list[int]:
    return _given(node, rank, "dims")


def last_two(node: fx.Node, rank: int) -> list[int]:
    return [rank - 2, rank - 1]


def padded(node: fx.Node, rank: int) -> list[int]:
    """Dims that are padded or cut; by as much at both ends still shifts their elements."""
    pads = ints(argument(node, "pad"))
    return [rank - 1 - i // 2 for i, size in enumerate(pads) if size != 0]


# ---- one dim comes or goes ----------------------------------------------------------------------
def select_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """select, unbind: the dim goes."""
    (dim,) = dim_argument(node, len(shape_of(operand)))
    if dim in spec:
        return Refusal(f"{node.target} of single tokens")
    return tuple(d - (d > dim) for d in spec)


def select_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    operand = node.all_input_nodes[0]
    (dim,) = dim_argument(node, len(shape_of(operand)))
    return {operand: tuple(d + (d >= dim) for d in spec)}


def stack_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec:
    (dim,) = dim_argument(node, len(shape_of(node)))
    return tuple(d + (d >= dim) for d in spec)


def stack_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    (dim,) = dim_argument(node, len(shape_of(node)))
    if dim in spec:
        return Refusal(f"{node.target} works along a token dim")
    return dict.fromkeys(tensor_inputs(node), tuple(d - (d > dim) for d in spec))


def select_scatter_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    (dim,) = dim_argument(node, len(shape_of(node)))
    if operand is node.args[1]:
        return stack_forward(node, operand, spec)
    return Refusal(f"{node.target} writes single tokens") if dim in spec else spec


def select_scatter_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    base, source = node.args[:2]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    (dim,) = dim_argument(node, len(shape_of(node)))
    if dim in spec:
        return Refusal(f"{node.target} writes single tokens")
    return {base: spec, source: tuple(d - (d > dim) for d in spec)}


# ---- norms: several results, weights that all tokens share --------------------------------------
def norm_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    if operand is not node.args[0] or operand in node.args[1:]:
        return Refusal(f"{node.target}: tokens in its weights")
    if set(_normalized(node)) & set(spec):
        return Refusal(f"{node.target} normalizes over tokens")
    return spec


def norm_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    source = node.all_input_nodes[0]
    result = norm_forward(node, source, spec)
    if isinstance(result, Refusal):
        return result
    return {**dict.fromkeys(tensor_inputs(node), WHOLE), source: spec}


def _normalized(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    return list(range(rank - len(ints(argument(node, "normalized_shape"))), rank))
