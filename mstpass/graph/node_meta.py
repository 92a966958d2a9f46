"""The metadata of a node that one which replaces it must have as well, and the names of copies.

A node that runs once more is named by the original, by which reports know a node.
"""

from __future__ import annotations

import re
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_POLICY_KEYS = ("recompute", "ac_graph_id")  # of torch.utils.checkpoint
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


# ---- names of copies -----------------------------------------------------------------------------
_SUFFIX = "__copy"
_COPY = re.compile(rf"(?P<original>.+?)(?:{_SUFFIX}(?:_\d+)?)+")


def copy_name(name: str) -> str:
    """The name to ask for when a node is copied; the graph adds a number if it is taken."""
    return f"{original_name(name)}{_SUFFIX}"


def original_name(name: str) -> str:
    """The name of the node that a copy was made from; any other name comes back as it is."""
    copy = _COPY.fullmatch(name)
    return copy["original"] if copy else name
