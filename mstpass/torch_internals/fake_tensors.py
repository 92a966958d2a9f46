"""Tensors without data or without memory, the ops that run on tensors, and sizes as symbols.

Graphs hold a fake tensor for each value; new nodes are computed under the same mode, and a step can
be traced, or run without computing. Source: torch/_subclasses/fake_tensor.py,
torch/utils/_python_dispatch.py, torch/storage.py, torch/fx/experimental/symbolic_shapes.py,
torch/csrc/autograd/python_variable.cpp (``THPVariable_make_wrapper_subclass``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import sympy
import torch
from torch import SymInt, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "unset_fake_temporarily",
]
_NOT_IN_LOOPS = ("Conjugate", "Negative", "ZeroTensor", "FuncTorchBatched", "Functionalize")
Subclass = TypeVar("Subclass", bound=torch.Tensor)


def as_while_tracing(graph: fx.Graph) -> AbstractContextManager[Any]:
    """Let torch find the mode of a graph's fake tensors, as it does while the graph is traced."""
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return tracing(TracingContext(mode))


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for two tensors that share a storage, as long as one of them lives.

    It is an address that storages of fake tensors have as well; their ``data_ptr`` is 0.
    """
    return storage._cdata


def is_ordinary(value: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and says nothing else, so that a loop can read it.

    For other dispatch keys a higher-order op has no kernel of its own.
    """
    keys = torch._C._dispatch_keys(value)
    return value.layout is torch.strided and not any(map(keys.has, _NOT_IN_LOOPS))


def without_storage(
    cls: type[Subclass], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Subclass:
    """A new instance of a subclass that has no memory and requires no gradient.

    All ops on it go to the subclass's ``__torch_dispatch__``.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=dtype, device=device, requires_grad=False
    )
    return made


# ---- sizes -------------------------------------------------------------------------------------
def set_hint(size: SymInt, hint: int) -> None:
    """Estimates take the size, which is a symbol of its own, as ``hint``; nothing is guarded."""
    size.node.shape_env.var_to_hint_override[size.node.expr] = hint


def binds_size(node: fx.Node) -> bool:
    """Whether the node makes a size that depends on data, and is the first to do so."""
    return bool(node.meta.get("unbacked_bindings"))


def bind_as(places: fx.Node, node: fx.Node, mode: FakeTensorMode) -> None:
    """Let a ``nonzero`` of a vector make the size that another node made, in its first dim.

    The result is laid out as torch's fake kernel lays it out. A new fake value would have a new
    size (torch/_subclasses/fake_impls.py).
    """
    size = node.meta["val"].shape[0]
    with mode:
        value = torch.empty_strided(
            (size, 1), (1, size), dtype=torch.int64, device=node.meta["val"].device
        )
    places.meta["val"] = value
    places.meta["unbacked_bindings"] = node.meta["unbacked_bindings"]


def first_expression(size: SymInt) -> sympy.Expr:
    """The size before its symbol turned out equal to another one. Inductor names inputs by it."""
    found: sympy.Expr = size.node._expr
    return found


def renamed(size: SymInt) -> SymInt:
    """The same size, named by the symbol that stands for it now."""
    node = size.node
    found: SymInt = node.shape_env.create_symintnode(node.expr, hint=node.hint)
    return found


@contextlib.contextmanager
def without_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Ops compute fake values of this mode, and no comparison of sizes becomes a guard."""
    shapes = mode.shape_env
    with mode, contextlib.nullcontext() if shapes is None else shapes.suppress_guards():
        yield
