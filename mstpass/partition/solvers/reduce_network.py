"""Make the network of a minimum cut small before it is solved, with the same result.

A *vertex* may be cut at its capacity. What is *kept* can be reached from the source, what is
*needed* reaches the sink, and everything else flows along the inputs. Until no rule applies::

    kept and needed                          it is in every cut: cut it, take it out
    nothing comes in, or nothing leaves      take it out
    not needed, one user that costs no more  that one is cut instead: contract it into its user
    not kept, one input that costs less      that one is cut instead: contract it into its input

What flows through the vertex of the third rule (of the fourth) flows through its one user (input)
as well. In the third, where both cost the same, the user is closer to the sink, as is the cut that
min_cut.py asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# Of one vertex: its capacity, whether it is kept and needed, and its inputs by position in a part.
Vertex = tuple[float, bool, bool, tuple[int, ...]]


class Network:
    """Vertices by number, in topological order; ``left`` after ``contract``."""

    def __init__(
        self,
        capacity: list[float],
        kept: Iterable[int],
        needed: Iterable[int],
        inputs: list[set[int]],
    ):
        """
        Args:
            capacity: of each vertex; infinite: it cannot be cut.
            inputs: the vertices whose flow enters each.
        """
        self.capacity, self.inputs = capacity, inputs
        self.kept, self.needed = set(kept), set(needed)
        self.users: list[set[int]] = [set() for _ in inputs]
        for vertex, sources in enumerate(inputs):
            for source in sources:
                self.users[source].add(vertex)
        self.left = dict.fromkeys(range(len(inputs)))

    def contract(self) -> set[int]:
        """Apply the rules. Returns what every cut holds of the vertices that are gone."""
        cut: set[int] = set()
        stack = list(self.left)
        while stack:
            vertex = stack.pop()
            if vertex not in self.left:
                continue
            inputs, users = self.inputs[vertex], self.users[vertex]
            kept, needed = vertex in self.kept, vertex in self.needed
            price = self.capacity[vertex]
            if not (kept or inputs) or not (needed or users):
                self._remove(vertex)
            elif kept and needed and price < math.inf:
                cut.add(vertex)
                self._remove(vertex)
            elif not needed and len(users) == 1 and self.capacity[min(users)] <= price:
                self._remove(vertex)
                self._join(inputs, users, kept=kept)
            elif not kept and len(inputs) == 1 and self._costs_less(min(inputs), price):
                self._remove(vertex)
                self._join(inputs, users, needed=needed)
            else:
                continue
            stack += (*inputs, *users)
        return cut

    def parts(self) -> list[list[int]]:
        """The vertices that are left, those together that hang together, each part in order."""
        found: list[list[int]] = []
        seen: set[int] = set()
        for start in self.left:
            if start in seen:
                continue
            seen.add(start)
            part = [start]
            for vertex in part:
                new = (self.inputs[vertex] | self.users[vertex]) - seen
                seen |= new
                part += new
            found.append(sorted(part))
        return found

    def vertices(self, part: Sequence[int]) -> tuple[Vertex, ...]:
        """A part as plain data, equal for parts that are alike."""
        position = {vertex: i for i, vertex in enumerate(part)}
        return tuple(
            (
                self.capacity[vertex],
                vertex in self.kept,
                vertex in self.needed,
                tuple(sorted(position[source] for source in self.inputs[vertex])),
            )
            for vertex in part
        )

    def _costs_less(self, vertex: int, price: float) -> bool:
        return self.capacity[vertex] < price or self.capacity[vertex] == price == math.inf

    def _remove(self, vertex: int) -> None:
        del self.left[vertex]
        for source in self.inputs[vertex]:
            self.users[source].discard(vertex)
        for user in self.users[vertex]:
            self.inputs[user].discard(vertex)

    def _join(
        self, inputs: set[int], users: set[int], kept: bool = False, needed: bool = False
    ) -> None:
        """Let what entered a removed vertex flow to its users."""
        for source in inputs:
            self.users[source] |= users
        for user in users:
            self.inputs[user] |= inputs
        if kept:
            self.kept |= users
        if needed:
            self.needed |= inputs
