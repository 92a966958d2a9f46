"""Dims along which a value is the same everywhere, whatever the data: it is made of equal copies.

    expand        along the dims that it adds or stretches
    full          along all
    index         x[i, j] with x made of copies along dim 0: whatever i is
    others        along what the op table follows as token dims to operands that are made of copies
                  along theirs, or that all tokens read alike

What the table follows is computed for each token alone and in one way, so that equal operands give
equal results: bit for bit among integers and masks, and where floats are moved, chosen and cast
alone. A kernel that computes with them may round the last tokens in another way than the others.
An attention mask for each sequence of a batch is such a value where no sequence is padded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rules import tensor_inputs
from mstpass.graph.tokens import WHOLE, Refusal
from mstpass.partition.reconstruct.rule import CAST
from mstpass.partition.repeatable import is_pinned

aten = ops.aten

Dims = frozenset[int]
_NONE: Dims = frozenset()
_MOVES = frozenset(
    {
        aten.full.default,
        aten.where.self,
        aten.index.Tensor,
        aten.cat.default,
        aten.clone.default,
        CAST,
    }
)


def copied_dims(joint: JointGraph) -> dict[fx.Node, Dims]:
    """Of the forward values that are made of copies, these dims."""
    found: dict[fx.Node, Dims] = {}
    for node in joint.nodes:
        if node.op != "call_function" or node in joint.backward or value_of(node) is None:
            continue
        operands = tensor_inputs(node)
        begins = node.target in (aten.full.default, aten.expand.default)
        if (begins or any(n in found for n in operands)) and _computes_nothing(node):
            if dims := frozenset(d for d in _long(node) if _is_copied(node, d, found)):
                found[node] = dims
    return found


def _computes_nothing(node: fx.Node) -> bool:
    """Whether a float of the result is one of an operand's, or cast from it."""
    if is_pinned(node):
        return False
    return not node.meta["val"].is_floating_point() or node.target in _MOVES or ops.is_view(node)


def _long(node: fx.Node) -> list[int]:
    """Dims that are not known to have a single element."""
    shape = node.meta["val"].shape
    return [d for d, size in enumerate(shape) if not (isinstance(size, int) and size < 2)]


def _is_copied(node: fx.Node, dim: int, known: Mapping[fx.Node, Dims]) -> bool:
    if node.target is aten.full.default:
        return True
    needs = ops.operand_specs(node, (dim,))
    if isinstance(needs, Refusal):
        return False
    same = _any_will_do(node, known) if node.target is aten.index.Tensor else ()
    return all(
        spec == WHOLE or operand in same or known.get(operand, _NONE).issuperset(spec)
        for operand, spec in needs.items()
    )


def _any_will_do(node: fx.Node, known: Mapping[fx.Node, Dims]) -> list[fx.Node]:
    """Indices into dims along which the source is made of copies."""
    source, indices = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(indices, tuple | list)
    dims = known.get(source, _NONE)
    return [i for d, i in enumerate(indices) if isinstance(i, fx.Node) and d in dims]
