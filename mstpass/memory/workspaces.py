"""What an op allocates while it runs, besides its results: the one place that knows.

Attention (attention_workspace.py) and matrix products on CUDA (cublas_workspace.py) are known;
other libraries' workspaces, such as those of convolutions, are not. Simulated peaks ask for nodes
of a graph, scheduled peaks for calls of Inductor's schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.sizes import hint, hint_shape
from mstpass.memory.allocation import allocated_bytes
from mstpass.memory.attention_workspace import CPU_FLASH, ON_CUDA, cpu_flash_bytes
from mstpass.memory.cublas_workspace import PRODUCTS, product_workspace_bytes
from mstpass.memory.cuda_device import cuda_device
from mstpass.torch_internals.graphs import Argument, OpCall, Operand, name_of, op_call

KNOWN = CPU_FLASH | ON_CUDA.keys() | PRODUCTS


def workspace_bytes(call: OpCall, device: torch.device | None = None) -> int:
    """The bytes of a call's workspace; 0 where none is known.

    Args:
        device: where the call runs; None: where its operands are.
    """
    if call.op in CPU_FLASH:
        return cpu_flash_bytes(call)
    if device is None:
        device = next((a.device for a in call.arguments.values() if isinstance(a, Operand)), None)
    if call.op not in KNOWN or device is None or device.type != "cuda":
        return 0
    if call.op in PRODUCTS:
        return allocated_bytes(product_workspace_bytes(call, cuda_device(device)), device)
    return ON_CUDA[call.op](call, cuda_device(device))


def node_workspace_bytes(node: fx.Node) -> int:
    """The same for a node of a graph; its symbolic sizes count with their hints."""
    if node.op != "call_function" or name_of(node.target) not in KNOWN:
        return 0
    return workspace_bytes(op_call(node.target, node.args, node.kwargs, _argument_of))


def eager_workspace_bytes(target: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """The same for an op that is run on tensors, as if they were on a device."""
    if name_of(target) not in KNOWN:
        return 0
    return workspace_bytes(op_call(target, args, kwargs, _argument_of), device)


def _argument_of(given: Any) -> Argument:
    if isinstance(given, fx.Node):
        value = value_of(given)
        given = given.meta.get("val") if value is None else value
    if isinstance(given, torch.Tensor):
        stride = tuple(map(hint, given.stride()))
        return Operand(tuple(hint_shape(given)), stride, given.dtype, given.device)
    if isinstance(given, torch.SymInt):
        return hint(given)
    return given if isinstance(given, int | float) else None
