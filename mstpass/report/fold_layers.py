"""Equal layers as one line: module paths with their numbers folded, and groups of equal items."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path


def folded(path: str, depth: int | None = None) -> str:
    """``model.layers.7.mlp`` as ``model.layers.*.mlp``.

    Args:
        depth: of parts that are kept; behind the first number one more is.
    """
    parts = _NUMBER.sub("*", path).split(".")
    if depth is not None:
        parts = parts[: parts.index("*") + 2 if "*" in parts else depth]
    return ".".join(parts)


def layers(paths: Iterable[str]) -> str:
    """Where equal parts are: ``model.layers.{0-30,32}.mlp``; one path as it is.

    Paths that differ in more than one number have these folded.
    """
    known = list(dict.fromkeys(filter(None, paths)))
    if len(known) < 2:
        return "".join(known)
    numbers = [list(map(int, _NUMBER.findall(path))) for path in known]
    shape = folded(known[0])
    if shape.count("*") != 1 or any(folded(path) != shape for path in known):
        names = list(dict.fromkeys(map(folded, known)))
        return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return shape.replace("*", "{" + _ranges(sorted(n for (n,) in numbers)) + "}")


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ",".join(shown[:4]) + (",..." if len(shown) > 4 else "")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """In the order of each group's first item."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
