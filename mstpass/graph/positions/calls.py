"""One call of an op whose operands are known at every position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.positions.exact import checked
from mstpass.graph.positions.pieces import Number, Pieces, Shape, whole
from mstpass.graph.positions.polynomials import Poly, TooComplicated, const, of_size
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.graphs import schema_of


@dataclass(frozen=True)
class Call:
    """A node and the values of the tensors that it reads.

    Methods that get an argument's name raise ``TooComplicated`` where it has no such form.
    """

    node: fx.Node
    known: Mapping[fx.Node, Pieces]

    @cached_property
    def result(self) -> torch.Tensor:
        value = value_of(self.node)
        if value is None:
            raise TooComplicated("an op with several results")
        return value

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.result)

    @property
    def dtype(self) -> torch.dtype:
        return self.result.dtype

    def argument(self, name: str) -> Any:
        return argument(self.node, name) if has_argument(self.node, name) else None

    def value(self, name: str) -> Pieces:
        return self.of(self.argument(name))

    def of(self, given: Any) -> Pieces:
        """A tensor, a size or a number that is an argument."""
        if isinstance(given, fx.Node):
            if is_size(given):
                return whole((), of_size(given.meta["val"]))
            if given not in self.known:
                raise TooComplicated("an operand that is no tensor")
            return self.known[given]
        return whole((), number_of(given))

    def poly(self, name: str, default: int | None = None) -> Poly:
        """An argument that is an integer or a size; of None the default."""
        given = self.argument(name)
        if given is None and default is not None:
            return const(default)
        if isinstance(given, fx.Node) and not is_size(given):
            raise TooComplicated("a size that depends on data")
        number = self.of(given).only
        if not isinstance(number, Poly):
            raise TooComplicated("a position that is no integer")
        return number

    def dim(self, name: str, rank: int) -> int:
        given = self.argument(name)
        if not isinstance(given, int):
            raise TooComplicated("an op along no single dim")
        return given % max(1, rank)

    def operand_dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor; None of a number."""
        given = self.argument(name)
        value = value_of(given) if isinstance(given, fx.Node) else None
        return None if value is None else value.dtype


Rule = Callable[[Call], Pieces]


def shape_of(value: torch.Tensor) -> Shape:
    return tuple(map(of_size, value.shape))


def number_of(given: object) -> Number:
    if isinstance(given, bool | int):
        return const(int(given))
    if isinstance(given, torch.SymInt):
        return of_size(given)
    if isinstance(given, float):
        is_exact = given.is_integer() and abs(given) <= 2.0**53
        return const(int(given)) if is_exact else given
    raise TooComplicated("an argument that is no number")


def name_of_op(node: fx.Node) -> str:
    """The op without its overload, such as ``aten::add``."""
    return schema_of(node.target).name  # type: ignore[arg-type]


def exactly(call: Call, value: Pieces) -> Pieces:
    """The result of a call: numbers of its dtype, in its shape."""
    if value.shape != call.shape:
        raise TooComplicated("the shape is known otherwise only")
    return checked(value, call.dtype)
