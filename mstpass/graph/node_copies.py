"""The names of nodes that run once more: they tell the original, by which reports know a node."""

from __future__ import annotations

import re

_SUFFIX = "__copy"
_COPY = re.compile(rf"(?P<original>.+?)(?:{_SUFFIX}(?:_\d+)?)+")


def copy_name(name: str) -> str:
    """The name to ask for when a node is copied; the graph adds a number if it is taken."""
    return f"{original_name(name)}{_SUFFIX}"


def original_name(name: str) -> str:
    """The name of the node that a copy was made from; any other name comes back as it is."""
    copy = _COPY.fullmatch(name)
    return copy["original"] if copy else name
