"""The metadata of a node that a node which replaces it must have as well."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_POLICY_KEYS = ("recompute", "ac_graph_id")  # of torch.utils.checkpoint, see checkpoint_policies.py
_ORIGIN_KEYS = ("seq_nr", "partitioner_tag", "stack_trace", "nn_module_stack")


def policy_meta(node: fx.Node) -> dict[str, Any]:
    """The node's checkpoint policy and the number of its checkpointed region, if it has them."""
    return _selected(node, _POLICY_KEYS)


def inside_meta(node: fx.Node) -> dict[str, Any]:
    """The node's checkpointed region, if it has one, without what its policy asks for.

    With it a view that stands between two nodes of a region does not let the first one leave it.
    """
    policy = policy_meta(node)
    return {**policy, "recompute": CheckpointPolicy.PREFER_SAVE} if policy else {}


def origin_meta(node: fx.Node) -> dict[str, Any]:
    """The place in the user's code, and what torch's partitioner reads besides a policy."""
    return _selected(node, _ORIGIN_KEYS)


def replacement_meta(node: fx.Node) -> dict[str, Any]:
    """The checkpoint policy, the place in the user's code, and what torch's partitioner reads."""
    return _selected(node, (*_ORIGIN_KEYS, *_POLICY_KEYS))


def _selected(node: fx.Node, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: node.meta[key] for key in keys if key in node.meta}
