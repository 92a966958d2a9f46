"""Equal layers in one line: module paths whose layer numbers are folded, and groups of items."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
_MOST_RANGES = 4


def fold_numbers(path: str, depth: int | None = None) -> str:
    """``model.layers.7.mlp`` as ``model.layers.*.mlp``.

    Args:
        depth: how many parts of the path are kept. A path with a number is kept up to the part
            after its first number instead.
    """
    parts = _NUMBER.sub("*", path).split(".")
    if depth is not None:
        parts = parts[: parts.index("*") + 2 if "*" in parts else depth]
    return ".".join(parts)


def join_layers(paths: Iterable[str]) -> str:
    """Paths that differ in one number as one: ``model.layers.{0-30,32}.mlp``.

    One path is returned as it is. Other paths are listed with their numbers folded.
    """
    known = list(dict.fromkeys(filter(None, paths)))
    if len(known) < 2:
        return "".join(known)
    numbers = [list(map(int, _NUMBER.findall(path))) for path in known]
    pattern = fold_numbers(known[0])
    if pattern.count("*") != 1 or any(fold_numbers(path) != pattern for path in known):
        names = list(dict.fromkeys(map(fold_numbers, known)))
        return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return pattern.replace("*", "{" + _ranges(sorted(n for (n,) in numbers)) + "}")


def _ranges(numbers: Sequence[int]) -> str:
    """``0-30,32`` of sorted numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MOST_RANGES]]
    return ",".join([*shown, *(["..."] if len(ranges) > _MOST_RANGES else [])])


def group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, in the order of each group's first item."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
