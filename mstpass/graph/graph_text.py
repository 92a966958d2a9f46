"""A graph as short text that is the same in every run: for golden files and bug reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.torch_internals.graphs import OpOverload, dtype_abbrs


def graph_text(module: fx.GraphModule) -> str:
    """One line for each node, followed by the bodies of the graph's loops."""
    lines = [_line(node) for node in module.graph.nodes if node.op != "get_attr"]
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            lines += ["", f"{name}:", *(_line(node) for node in child.graph.nodes)]
    return "\n".join(lines) + "\n"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"  return {_arg(node.args[0])}"
    value = node.meta.get("val")
    shapes = ", ".join(_shape(t) for t in tensors_of(value))
    if isinstance(value, int | torch.SymInt):
        shapes = f"size {value}"
    if node.op == "placeholder":
        return f"  {node.name}: {shapes}"
    args = [_arg(a) for a in node.args]
    args += [f"{k}={_arg(v)}" for k, v in node.kwargs.items() if k not in ("device", "layout")]
    return f"  {node.name}: {shapes} = {_target(node.target)}({', '.join(args)})"


def _shape(tensor: torch.Tensor) -> str:
    return f"{dtype_abbrs.get(tensor.dtype, tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _arg(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_arg, value)) + "]"
    return str(value).removeprefix("torch.")
