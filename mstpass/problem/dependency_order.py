"""The order in which loops take their places: each thing after all that it needs.

The partition problem (apply_modes.py) and the joint graph (loops/apply_plans.py) are both written
anew with loops in the place of nodes. Both walk their old order this way, so that a loop has the
same place in both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DependencyCycle(Exception, Generic[T]):
    """Things that need each other; ``path`` leads from one of them back to it."""

    def __init__(self, path: Sequence[T]):
        super().__init__("these need each other: " + ", ".join(map(str, path)))
        self.path = path


def dependency_order(
    targets: Iterable[T], needs: Callable[[T], Iterable[T]], is_done: Callable[[T], bool]
) -> Iterator[T]:
    """The targets, in their order, each behind what it needs and is not done yet.

    Each thing is yielded once, and must be done before the next one is asked for. The walk is depth
    first, with a stack of its own: graphs are deeper than Python's recursion limit.

    Raises:
        DependencyCycle: a thing needs itself.
    """
    for target in targets:
        stack = [target]
        path: dict[T, None] = {}
        while stack:
            top = stack[-1]
            missing = [] if is_done(top) else [other for other in needs(top) if not is_done(other)]
            if any(other in path or other == top for other in missing):
                raise DependencyCycle([*path, top])
            if missing:
                path[top] = None
                stack.extend(reversed(missing))
                continue
            stack.pop()
            path.pop(top, None)
            if not is_done(top):
                yield top
