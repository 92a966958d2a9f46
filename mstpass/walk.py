"""Walks along graphs without recursion: a chain of nodes may be longer than Python's stack."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def walk(start: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """All that is reached from the start, depth first: what is reached twice comes twice."""
    stack = [*start][::-1]
    while stack:
        one = stack.pop()
        yield one
        stack.extend([*further(one)][::-1])


def walk_once(start: Iterable[Key], further: Callable[[Key], Iterable[Key]]) -> Iterator[Key]:
    """All that is reached from the start, in no certain order: what is reached twice comes once."""
    stack, seen = [*start], set[Key]()
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            yield one
            stack.extend(further(one))


class CircleError(Exception):
    """Things that need each other; ``path`` leads from one of them back to it."""

    def __init__(self, path: Sequence[Any]):
        super().__init__("these need each other: " + ", ".join(map(str, path)))
        self.path = path


def needed_first(
    key: Key, needs: Callable[[Key], Iterable[Key]], known: Container[Key]
) -> Iterator[Key]:
    """What is not known yet of all that a key needs, directly or not; each follows what it needs.

    The caller makes each known before it asks for the next one. The key itself comes last.

    Raises:
        CircleError: something needs itself.
    """
    stack, path = [key], dict[Key, None]()
    while stack:
        one = stack[-1]
        missing = [] if one in known else [other for other in needs(one) if other not in known]
        if missing:
            path[one] = None
            if not path.keys().isdisjoint(missing):
                raise CircleError([*path])
            stack += missing[::-1]
            continue
        stack.pop()
        path.pop(one, None)
        if one not in known:
            yield one
