"""What an op allocates while it runs, besides its results: the one place that knows.

Attention (attention_workspace.py) and matrix products on CUDA (cublas_workspace.py) are known;
other libraries' workspaces, such as those of convolutions, are not. Simulated peaks ask for nodes
of a graph, scheduled peaks for calls of Inductor's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.op_rows import row
from mstpass.graph.op_table import TABLE, row_of
from mstpass.graph.sizes import hint, hint_shape
from mstpass.memory import attention_workspace
from mstpass.memory.allocation import allocated_bytes
from mstpass.memory.attention_rows_workspace import rows_bytes
from mstpass.memory.cublas_workspace import product_workspace_bytes
from mstpass.memory.cuda_device import CudaDevice, cuda_device
from mstpass.torch_internals.graphs import Argument, OpCall, Operand, name_of, op_call

# The names are those of ``Op.workspace``.
ON_CUDA: Mapping[str, Callable[[OpCall, CudaDevice], int]] = {
    row.PRODUCT: product_workspace_bytes,
    row.FLASH: attention_workspace.flash_forward_bytes,
    row.FLASH_BACKWARD: attention_workspace.flash_backward_bytes,
    row.EFFICIENT: attention_workspace.efficient_forward_bytes,
    row.EFFICIENT_BACKWARD: attention_workspace.efficient_backward_bytes,
    row.CUDNN_BACKWARD: attention_workspace.cudnn_backward_bytes,
    row.FLEX_BACKWARD: attention_workspace.flex_backward_bytes,
}
ANYWHERE: Mapping[str, Callable[[OpCall], int]] = {
    row.CPU_FLASH: attention_workspace.cpu_flash_bytes,
    row.ROWS: rows_bytes,
    row.ROWS_BACKWARD: rows_bytes,
}
KNOWN = frozenset(name_of(op) for op, known in TABLE.items() if known.workspace)


def workspace_bytes(call: OpCall, device: torch.device | None = None) -> int:
    """The bytes of a call's workspace; 0 where none is known.

    Args:
        device: where the call runs; None: where its operands are.
    """
    workspace = row_of(call.op).workspace
    if workspace in ANYWHERE:
        return ANYWHERE[workspace](call)
    if device is None:
        device = next((a.device for a in call.arguments.values() if isinstance(a, Operand)), None)
    if not workspace or device is None or device.type != "cuda":
        return 0
    found = ON_CUDA[workspace](call, cuda_device(device))
    return allocated_bytes(found, device) if workspace == row.PRODUCT else found


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
