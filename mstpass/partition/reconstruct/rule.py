"""What a reconstruction rule is: how to compute an operand of an op from the op's result.

    c = op(a, b)        in the forward
    a = inverse(c, b)   an ``Inverse`` with the target a and the sources (c, b)

For each operand of an op a rule answers with an ``Inverse``, or with ``Refused`` and the reason. A
rule reads only the graph. Where an inverse holds only for some data, the rule refuses, unless its
``condition`` states what it assumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx

from mstpass.graph.builder import Builder, SizeNodes, fake_mode_of
from mstpass.graph.joint import value_of
from mstpass.graph.sizes import generic_shape, same_shape

EXACT, TOLERANT = "exact", "tolerant"
aten = torch.ops.aten
prims = torch.ops.prims
CAST = prims.convert_element_type.default
AGAIN = "mst_again"  # the name of what a reconstruction adds


@dataclasses.dataclass(frozen=True)
class Inverse:
    """One way to compute a forward value from later ones. Nodes are given by name.

    Attributes:
        target: the value to compute.
        sources: the values it is computed from; the first is the result of ``op``.
        op: the forward node that is inverted.
        rule: name of the rule.
        grade: ``"exact"``: the same bits for every input; ``"tolerant"``: within ``bound``.
        bound: the error of a tolerant inverse, as text.
        coarse: the target is known to fewer digits than its type has.
        magnifies: the error of a source may be larger relative to the target than to the source,
            as in the difference of two numbers that are nearly equal. It reads no coarse value.
    """

    target: str
    sources: tuple[str, ...]
    op: str
    rule: str
    grade: str
    bound: str = "none"
    coarse: bool = False
    magnifies: bool = False


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why the operand ``target`` of the node ``op`` cannot be computed by a rule."""

    target: str
    op: str
    rule: str
    reason: str


class Writer(Builder):
    """A ``Builder`` that can write shapes as arguments of ops, also symbolic ones."""

    def __init__(self, graph: fx.Graph, like: Iterable[fx.Node]):
        super().__init__(graph, fake_mode_of(like), AGAIN)
        self.sizes = SizeNodes(self)

    def shape(self, node: fx.Node) -> list[int | fx.Node]:
        """The node's shape as an op's argument.

        Raises:
            UnknownSize: a symbolic size that no node of the graph holds.
        """
        value = value_of(node)
        assert value is not None, "the op gives one tensor"
        return self.sizes.arguments(value.shape)


Found = Iterator[Inverse | Refused]
Read = Callable[[fx.Node], fx.Node]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table in docs/reconstruction.md.

    Attributes:
        name: shown in reports.
        algebra: the equations.
        grade: the grade of its inverses, where they have only one.
        condition: when the rule applies, and what it assumes.
        bound: the error of its inverses.
        source: a paper, or "-".
        find: an inverse or a refusal for each operand of one such node.
        write: ``write(writer, op, target, read)`` adds the nodes that compute the target, and
            returns the last of them; ``read`` gives the node that backward reads for a forward
            node.
    """

    name: str
    algebra: str
    grade: str
    condition: str
    bound: str
    source: str
    find: Callable[[fx.Node], Found]
    write: Callable[[Writer, fx.Node, fx.Node, Read], fx.Node]


def operands(node: fx.Node) -> list[tuple[fx.Node, fx.Node | float]]:
    """The tensor operands of a binary op, each with the other operand, a node or a number."""
    a, b = node.args[:2]
    pairs = [(a, b), (b, a)]
    return [(x, other) for x, other in pairs if isinstance(x, fx.Node)]  # type: ignore[misc]


def names(*nodes: object) -> tuple[str, ...]:
    """Names of those arguments that are nodes, each once."""
    return tuple(dict.fromkeys(n.name for n in nodes if isinstance(n, fx.Node)))


def dtype_of(node: fx.Node) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def has_shape_of(operand: fx.Node, result: fx.Node) -> bool:
    a, b = value_of(operand), value_of(result)
    return a is not None and b is not None and same_shape(a.shape, b.shape)


def rank(node: fx.Node) -> int:
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    return value.dim()


def shape(node: fx.Node) -> torch.Size:
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    return generic_shape(value)


def unit_roundoff(dtype: torch.dtype) -> str:
    """Half the distance from 1 to the next larger number, as text: ``2^-24`` for float32."""
    return f"2^{round(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item()) - 1}"


def cast_to(writer: Builder, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    if dtype is None or dtype_of(node) == dtype:
        return node
    return writer.call(CAST, node, dtype)
