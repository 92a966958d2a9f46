"""The call of an op as plain data: its name and its arguments, by the names of the op's schema.

FX nodes and Inductor's extern kernels call the same ops and give their arguments in the same order.
As plain data they can be asked the same questions, such as what memory the op needs while it runs.
Source: torch/_ops.py, torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mstpass.torch_internals.op_types import HigherOrderOperator, OpOverload, schema_of
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._ops.HigherOrderOperator.name",
        "torch._higher_order_ops.flex_attention.FlexAttentionHOP.__call__(query, key, value)",
        "torch._higher_order_ops.flex_attention.FlexAttentionBackwardHOP.__call__"
        "(query, key, value, out, logsumexp, grad_out)",
    ),
)
# What higher-order ops call their first arguments; they have no schema.
_HIGHER_ORDER = {
    "flex_attention": ("query", "key", "value"),
    "flex_attention_backward": ("query", "key", "value", "out", "logsumexp", "grad_out"),
}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor that an op is given; a symbolic size counts with its hint."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


Argument = Operand | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of an op.

    Attributes:
        op: without its overload, such as ``aten::mm``; of a higher-order op the name alone.
        arguments: those that are given, by name, or by number where they have none. Arguments of
            other types, such as lists, are None.
    """

    op: str
    arguments: Mapping[str, Argument]

    def operand(self, name: str) -> Operand | None:
        """The tensor of this name; None if there is none."""
        found = self.arguments.get(name)
        return found if isinstance(found, Operand) else None

    def number(self, name: str, default: float = 0) -> float:
        found = self.arguments.get(name)
        return default if found is None or isinstance(found, Operand) else found


@functools.cache
def name_of(target: Any) -> str:
    """The name of an op, as in ``OpCall``; empty for what is no op."""
    if isinstance(target, str):  # a kernel of Inductor that is no op
        return target
    if isinstance(target, OpOverload):
        return schema_of(target).name
    return str(target.name()) if isinstance(target, HigherOrderOperator) else ""


def op_call(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argument_of: Callable[[Any], Argument],
) -> OpCall:
    """The call of an op.

    Args:
        argument_of: an argument as plain data; None for what is neither a tensor nor a number.
    """
    name = name_of(target)
    if isinstance(target, OpOverload):
        names: Sequence[str] = [argument.name for argument in schema_of(target).arguments]
    else:
        names = _HIGHER_ORDER.get(name) or [str(i) for i in range(len(args))]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return OpCall(name, {key: argument_of(value) for key, value in given.items()})


def probe() -> None:
    APIS.require()
    mm = torch.ops.aten.mm.default
    APIS.expect(name_of(mm) == "aten::mm", f"aten.mm.default is called {name_of(mm)}")
    for name, arguments in _HIGHER_ORDER.items():
        op = getattr(torch.ops.higher_order, name)
        APIS.expect(name_of(op) == name, f"{name} is called {name_of(op)}")
        found = tuple(inspect.signature(op.__call__).parameters)[: len(arguments)]
        APIS.expect(found == arguments, f"the arguments of {name} are {', '.join(found)}")
