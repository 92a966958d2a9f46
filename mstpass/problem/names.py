"""Names of values and loops, in the problem and in the graph with loops, and in equal regions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

LOOP = "mst_loop_"  # prefix of a name: see loop_name()
UNFINISHED = "_unfinished"  # suffix of a name: see unfinished()

T = TypeVar("T")


def loop_name(first: str) -> str:
    """The name of the loop whose first result stands for the node ``first``."""
    return f"{LOOP}{first}"


def is_loop(name: str) -> bool:
    """Whether the name is that of a loop, not of one of the results that a loop returns."""
    return name.startswith(LOOP)


def unfinished(name: str) -> str:
    """The name of the buffer that a loop returns for a node that is scaled or cast afterwards."""
    return f"{name}{UNFINISHED}"


def at_one(name: str) -> str:
    """The name of a node of a loop's prelude, as it is before the loop: with a unit of 1."""
    return f"{name}_at_one"


def value_name(node: str) -> str:
    """The node of the graph before loops, or the loop, that a node of the graph with loops is."""
    return node.removesuffix(UNFINISHED)


_WORDS = {"accumulate", "axis", "chunks", "combine", "kind"}  # fields whose text names no node
_WORDS |= {"mode", "narrow", "note", "phase", "source"}


def renamed(record: T, name_of: Callable[[str], str], is_name: bool = False) -> T:
    """A record of regions or loops that is equal but for the names of nodes."""
    known: Any = record
    kind: Any = type(known)
    if kind is str:
        if not (known and is_name):
            return record
        prefix = LOOP if is_loop(known) else ""
        found: Any = prefix + name_of(known.removeprefix(prefix))
    elif kind is tuple or kind is frozenset:
        found = kind([renamed(item, name_of, is_name) for item in known])
    elif names := _texts(kind):  # all of a step's regions: without the checks of __init__
        found = object.__new__(kind)
        fields = vars(found)
        for name, holds_names in names:
            fields[name] = renamed(getattr(known, name), name_of, holds_names)
    else:
        return record
    result: T = found
    return result


@functools.cache
def _texts(kind: type) -> tuple[tuple[str, bool], ...]:
    """The fields of a dataclass, each with whether its texts are names of nodes."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple((field.name, field.name not in _WORDS) for field in fields)
