"""The ranges of lengths that share a plan.

Their ends are fixed, a factor ``ROOM`` apart, so that few compilations serve all lengths::

    1 .. 256 | 257 .. 1,024 | 1,025 .. 4,096 | 4,097 .. 16,384 | ...

The largest batch of a range has at most ``ROOM`` times the elements of its smallest one: of several
symbolic sizes, such as the number of sequences and their length, each has shorter ranges. The
option ``lengths`` gives the ends itself, and the last range ends at the bound that
``torch._dynamo.mark_dynamic`` gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.options import ROOM, OptionError
from mstpass.torch_internals.batch_sizes import bound_of, named

_LEAST_ROOM = 2.0  # of one of several sizes

Values = Mapping[sympy.Symbol, int]


class Ranges:
    """The ranges of the symbolic sizes of one graph.

    Args:
        traced: the sizes of the first batch.
        lengths: as of the option: the ends of the ranges of the largest size; or none.

    Attributes:
        long: the symbol that these are about.

    Raises:
        OptionError: the first batch is longer than all lengths.
    """

    def __init__(self, environment: ShapeEnv, traced: Values, lengths: Sequence[int]):
        self.environment, self.traced, self.lengths = environment, traced, lengths
        self.long = max(traced, key=lambda symbol: traced[symbol])
        num_sizes = len(set(traced.values()))  # inputs and labels may have symbols of their own
        self.room = max(_LEAST_ROOM, ROOM ** (1 / num_sizes))
        if lengths and traced[self.long] > lengths[-1]:
            raise OptionError(
                f"option 'lengths' ends at {lengths[-1]}, but the first batch has "
                f"{self.text({self.long: traced[self.long]})}"
            )

    def ends(self, values: Values) -> dict[sympy.Symbol, int]:
        """The greatest sizes of the range that a batch is in."""
        found = {}
        for symbol, value in values.items():
            end = next(end for end in self._all_ends(symbol) if end >= value)
            bound = bound_of(self.environment, symbol)
            found[symbol] = end if bound is None else max(value, min(end, bound))
        return found

    def _all_ends(self, symbol: sympy.Symbol) -> Iterator[int]:
        given = self.lengths if symbol == self.long else ()
        last = given[-1] if given else 1
        yield from given
        yield from (end for k in itertools.count(1) if (end := round(self.room**k)) > last)

    def text(self, values: Values) -> str:
        """Sizes in words, such as ``ids.size()[1] = 300``."""
        return ", ".join(f"{name} = {size}" for name, size in named(self.environment, values))
