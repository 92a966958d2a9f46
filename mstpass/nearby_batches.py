"""Batches like a given one: longer ones that Dynamo's guards allow, or on its side of a condition.

A batch is known by the values of the symbols among a graph's inputs: sizes, strides and numbers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from mstpass.graph.sizes import expression
from mstpass.torch_internals.batch_sizes import hold, may_hold

Values = Mapping[sympy.Symbol, int]

_NEAR = 256  # how much shorter than asked for a batch may be
_PARTS = 1024  # of the way between two batches


class Neighbours:
    """Batches like a given one.

    Args:
        inputs: of the graph; fake tensors of symbolic sizes.
        sized: the symbols of sizes.
        guards: of Dynamo, as sympy expressions at the time of a call.
    """

    def __init__(
        self, inputs: Sequence[Any], sized: frozenset[sympy.Symbol], guards: Callable[[], list[Any]]
    ):
        self._sized, self._guards = sized, guards
        tensors = (x for x in inputs if isinstance(x, torch.Tensor))
        self._strides = {expression(stride) for x in tensors for stride in x.stride()}

    def grown(self, batch: Values, sizes: Values) -> Values:
        """A batch like this one, of other sizes.

        Its strides grow as well, so that no element of an input lies on another one.
        """
        old = math.prod(batch[symbol] for symbol in self._sized)
        growth = max(1.0, math.prod(sizes.values()) / old)
        longer = {s: math.ceil(batch[s] * growth) for s in self._strides.intersection(batch)}
        return {**batch, **longer, **sizes}

    def allowed(self, batch: Values, sizes: Values) -> Values | None:
        """The largest batch of these sizes, or somewhat smaller, that Dynamo's guards allow."""
        guards = self._guards()
        for less in range(_NEAR):
            near = {s: n if n == batch[s] else max(1, n - less) for s, n in sizes.items()}
            found = self.grown(batch, near)
            if may_hold(guards, found):
                return found
        return None

    def forbidding(self, batch: Values, sizes: Values) -> sympy.Basic:
        """The guard of Dynamo that no batch of these sizes passes."""
        longer = self.grown(batch, sizes)
        return next(guard for guard in self._guards() if not may_hold([guard], longer))

    def on_its_side(
        self, batch: Values, larger: Values, conditions: Sequence[Any]
    ) -> Values | None:
        """The largest batch on the way to a larger one for which the same conditions fail.

        None, if that is the batch itself or the larger one.
        """
        failing = [condition for condition in conditions if not hold([condition], batch)]

        def on_the_way(part: int) -> Values:
            share = part / _PARTS
            sizes = {s: batch[s] + int((larger[s] - batch[s]) * share) for s in self._sized}
            return self.grown(batch, sizes)

        def is_beyond(part: int) -> bool:
            there = on_the_way(part)
            return any(hold([condition], there) for condition in failing)

        first_beyond = bisect.bisect_left(range(1, _PARTS), True, key=is_beyond) + 1
        found = self.allowed(batch, {s: on_the_way(first_beyond - 1)[s] for s in self._sized})
        if found is None or any(hold([condition], found) for condition in failing):
            return None
        sizes, ends = ([values[s] for s in self._sized] for values in (batch, larger))
        return found if [found[s] for s in self._sized] not in (sizes, ends) else None
