"""Nodes that copy a value to the host and back (torch_internals/host_copy_ops.py)."""

from __future__ import annotations

from torch import fx

from mstpass.torch_internals import host_copy_ops

DEVICE_TYPE = "cuda"  # of the devices whose values may wait on the host


def is_host_copy(node: fx.Node) -> bool:
    """Whether the node begins a copy or waits for one."""
    return node.op == "call_function" and node.target in host_copy_ops.all_ops()


def is_wait_for_reload(node: fx.Node) -> bool:
    """Whether the node waits until a value is back on the device: it is a view of the copy."""
    return _is_wait(node) and node.all_input_nodes[0].target is host_copy_ops.RELOAD


def is_rows_on_host(node: fx.Node) -> bool:
    """Whether the node stands for a value on the host of which loops copy rows."""
    return node.op == "call_function" and node.target is host_copy_ops.ROWS_ON_HOST


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a graph for a GPU lies in the host's memory: what the copies return
    there, and the input that a backward copies back."""
    if node.op == "placeholder":
        return any(
            user.target in (host_copy_ops.RELOAD, host_copy_ops.ROWS_ON_HOST) for user in node.users
        )
    if is_rows_on_host(node):
        return True
    if _is_wait(node):
        return not is_wait_for_reload(node)
    return node.target is host_copy_ops.OFFLOAD


def _is_wait(node: fx.Node) -> bool:
    return node.target is host_copy_ops.WAIT
