"""The ATen ops that a node of Dynamo's graph stands for, found by running it on fake tensors.

Dynamo's graph calls functions of Python: ``F.linear``, ``tensor.view``, a checkpointed function, a
custom autograd function. Their names do not say what they compute, so each node is run, alone, on
fake tensors of static shapes, and the ops that reach the dispatcher are recorded. A symbolic size
has its value at the generic point (graph/sizes.py), so nothing is guarded.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import generic, generic_shape, generic_stride
from mstpass.torch_internals.fake_tensors import FakeTensorMode, TorchDispatchMode
from mstpass.torch_internals.graphs import tree_leaves

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AtenCall:
    """One op, the shapes of its operands, and that of its first result."""

    op: Any
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AtenCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = _shapes(result)
        if results:  # not of questions such as prim.device
            self.calls.append(AtenCall(func, tuple(_shapes((args, kwargs or {}))), results[0]))
        return result


def _shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(v.shape) for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


class AtenCalls:
    """The ops of the nodes of one graph; each node is run at most once."""

    def __init__(self, gm: fx.GraphModule):
        self._gm = gm
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, tuple[AtenCall, ...] | None] = {}

    def of(self, node: fx.Node) -> tuple[AtenCall, ...] | None:
        """The ops in the order in which they run; None if the node cannot be run on its own."""
        if node not in self._known:
            try:
                self._known[node] = self._run(node)
            except Exception as error:  # whatever the user's function raises
                log.debug("what %s computes is not known: %s", node.name, error)
                self._known[node] = None
        return self._known[node]

    def _run(self, node: fx.Node) -> tuple[AtenCall, ...]:
        with torch.no_grad(), self._mode, _Recorder() as recorder:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            recorder.calls.clear()  # the operands were made
            if node.op == "call_function":
                node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_module":
                self._gm.get_submodule(str(node.target))(*args, **kwargs)
            else:
                raise ValueError(f"{node.name} is a {node.op}")
        return tuple(recorder.calls)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:
            owner, _, name = str(node.target).rpartition(".")
            return getattr(self._gm.get_submodule(owner), name)
        return _static(node.meta["example_value"])


def _static(value: Any) -> Any:
    """The value with each tensor and each size replaced by one of a static shape."""
    if isinstance(value, torch.Tensor):
        shape, stride = generic_shape(value), generic_stride(value)
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymInt):
        return generic(value)
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return value.node.hint
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(map(_static, value)) if type(value) in (tuple, list) else value
    return value


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node of Dynamo's graph; None if it is not one tensor."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def largest_of(node: fx.Node) -> torch.Tensor | None:
    """The largest floating-point tensor among a node's results."""
    floating = [t for t in tensors_of(node.meta.get("example_value")) if t.is_floating_point()]
    return max(floating, key=lambda t: generic_shape(t).numel(), default=None)
