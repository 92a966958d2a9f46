"""Nodes that copy a value to the host and back (torch_internals/host_copy_ops.py)."""

from __future__ import annotations

from torch import fx

from mstpass.torch_internals.host_copy_ops import OFFLOAD, RELOAD, WAIT

_COPIES = (OFFLOAD, RELOAD)


def is_host_copy(node: fx.Node) -> bool:
    """Whether the node begins a copy or waits for one."""
    return node.op == "call_function" and (node.target in _COPIES or node.target is WAIT)


def is_wait_for_reload(node: fx.Node) -> bool:
    """Whether the node waits until a value is back on the device: it is a view of the copy."""
    return node.target is WAIT and node.all_input_nodes[0].target is RELOAD


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a graph for a GPU lies in the host's memory: what the copies return
    there, and the input that a backward copies back."""
    if node.op == "placeholder":
        return any(user.target is RELOAD for user in node.users)
    if node.target is WAIT:
        return not is_wait_for_reload(node)
    return node.target is OFFLOAD
