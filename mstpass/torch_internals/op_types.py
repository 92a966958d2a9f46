"""What a node of an FX graph calls: the types of ATen and higher-order ops, and an op's schema.

The joint graph holds overloads (``aten.mm.default``) and higher-order ops (``while_loop``). The
passes ask of which kind a target is, whether it writes to its operands, and what its arguments are
named. torch has no public names for these types. Source: torch/_ops.py.
"""

from __future__ import annotations

import functools

import torch
from torch._ops import HigherOrderOperator, OpOverload

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["HigherOrderOperator", "OpOverload", "returns_view", "schema_of"]

APIS = PrivateApis(
    names=(
        "torch._ops.OpOverload",
        "torch.ops.aten.mm.default._schema",
        "torch._ops.HigherOrderOperator(name, cacheable)",
    ),
)


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """``name`` (``aten::mm``), ``arguments`` in order, ``is_mutable``."""
    return op._schema


@functools.cache
def returns_view(op: OpOverload) -> bool:
    """Whether the op's schema says that its result shares the storage of an operand."""
    returned = [result.alias_info for result in schema_of(op).returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def probe() -> None:
    APIS.require()
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    APIS.expect(isinstance(add, OpOverload), "aten.add.Tensor is no OpOverload")
    APIS.expect(schema_of(add).name == "aten::add", "an op's schema has another name")
    arguments = [argument.name for argument in schema_of(add).arguments]
    APIS.expect(arguments == ["self", "other", "alpha"], "an op's schema has other arguments")
    writes = (schema_of(add).is_mutable, schema_of(add_).is_mutable)
    APIS.expect(writes == (False, True), "an op's schema does not say what the op writes to")
    views = (returns_view(add), returns_view(add_), returns_view(torch.ops.aten.view.default))
    APIS.expect(views == (False, False, True), "an op's schema does not say what is a view")
    loop = torch.ops.higher_order.while_loop
    APIS.expect(isinstance(loop, HigherOrderOperator), "while_loop is no HigherOrderOperator")
