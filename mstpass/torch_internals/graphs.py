"""FX graphs: the ops that nodes call, calls as plain data, graph modules, and what nodes hold.

The joint graph holds overloads (``aten.mm.default``) and higher-order ops (``while_loop``), for
whose types torch has no public names. Source: torch/_ops.py, torch/_higher_order_ops/utils.py and
flex_attention.py, torch/fx/_lazy_graph_module.py, torch/utils/_pytree.py and _dtype_abbrs.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, library
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._pytree import tree_leaves, tree_map

from mstpass.torch_internals.versions import find_or_none

__all__ = ["HigherOrderOperator", "OpOverload", "dtype_abbrs", "tree_leaves", "tree_map"]


def rename(node: fx.Node, name: str) -> None:
    """Give a node a name that no other node of its graph has or had (torch/fx/node.py)."""
    node._rename(name)
    assert node.name == name, f"a node has the name {name} already"


def graph_module(root: torch.nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph, with what the graph's ``get_attr`` nodes name in ``root``.

    It writes its Python code when that is first needed, as Inductor's do: to write and compile code
    takes longer than to build a graph. Most of ours are planned, split or lowered next, and nobody
    calls them.
    """
    return _LazyGraphModule(root if isinstance(root, torch.nn.Module) else dict(root), graph)


# ---- ops ---------------------------------------------------------------------------------------
def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """``name`` (``aten::mm``), ``arguments`` in order, ``is_mutable``."""
    return op._schema


@functools.cache
def returns_view(op: OpOverload) -> bool:
    """Whether the op's schema says that its result shares the storage of an operand."""
    returned = [result.alias_info for result in schema_of(op).returns]
    return any(alias is not None and not alias.is_write for alias in returned)


@functools.cache
def name_of(target: Any) -> str:
    """The name of an op, as in ``OpCall``; empty for what is no op."""
    if isinstance(target, str):  # a kernel of Inductor that is no op
        return target
    if isinstance(target, OpOverload):
        return schema_of(target).name
    return str(target.name()) if isinstance(target, HigherOrderOperator) else ""


def implement(op: HigherOrderOperator, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give an op of our own what it computes; ``fake`` gets the fake mode before the arguments.

    The op has no gradient: it is put into graphs that have their backward.
    """
    op.py_autograd_impl(autograd_not_implemented(op, deferred_error=True))
    op.py_impl(FakeTensorMode)(fake)
    op.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(eager)


_LIBRARY = library.Library("mstpass", "FRAGMENT")  # one that is collected takes its ops away


def own_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Define an op of our own, ``torch.ops.mstpass``, without a gradient and for every device.

    Args:
        schema: its name, arguments and results.
        fake: what stands for its results while a graph is traced.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"mstpass::{name}", fake, lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.mstpass, name).default
    return op


# ---- calls as plain data -----------------------------------------------------------------------
# What higher-order ops call their first arguments; they have no schema.
HIGHER_ORDER_ARGUMENTS = {
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
    """A call of an op by an FX node or by an extern kernel of Inductor.

    As plain data, both can be asked the same questions, such as what memory the op needs while it
    runs.

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
        names = HIGHER_ORDER_ARGUMENTS.get(name) or [str(i) for i in range(len(args))]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return OpCall(name, {key: argument_of(value) for key, value in given.items()})


# ---- opaque values -----------------------------------------------------------------------------
_is_opaque_node = find_or_none("torch._functorch.partitioners.is_opaque_node")  # from 2.12 on


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is opaque, so that it can cross to the backward as it is.

    torch calls values *opaque* that are neither tensors nor sizes, such as the device mesh of a
    DTensor: a graph passes them on and hands them to ops, but computes nothing with them. From 2.12
    on, a DTensor's mesh is an input of its graph, and ops make process groups from it. AOTAutograd
    keeps opaque values that cross to the backward apart from tensors and sizes
    (``_categorize_saved_tensors_for_backward`` in torch/_functorch/_aot_autograd/graph_compile.py).
    In 2.11 only TorchScript objects are opaque.
    """
    value = node.meta.get("val")
    if value is None or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, FakeScriptObject):
        return True
    return bool(_is_opaque_node(node)) if _is_opaque_node is not None else False
