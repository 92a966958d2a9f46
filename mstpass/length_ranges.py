"""The ranges of lengths that share a plan, and batches near a given one.

Their ends are fixed, a factor ``ROOM`` apart, so that few compilations serve all lengths::

    1 .. 256 | 257 .. 1,024 | 1,025 .. 4,096 | 4,097 .. 16,384 | ...

The largest batch of a range has at most ``ROOM`` times the elements of its smallest one: of several
symbolic sizes, such as the number of sequences and their length, each has shorter ranges. The
option ``lengths`` gives the ends itself, and the last range ends at the bound that
``torch._dynamo.mark_dynamic`` gave.

``Neighbours`` are batches like a given one: longer ones that Dynamo's guards allow, or on its side
of a condition. A batch is known by the values of the symbols among a graph's inputs: sizes, strides
and numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.graph.sizes import expression
from mstpass.options import ROOM, OptionError
from mstpass.partition.solve import sizes_text
from mstpass.torch_internals.batch_sizes import bounds_of, guards_of, hold, may_hold, named

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
            _, bound = bounds_of(self.environment, symbol)
            found[symbol] = end if bound is None else max(value, min(end, bound))
        return found

    def coming(self) -> list[int]:
        """The lengths of the option, as far as the bounds of the longest size allow them."""
        least, most = bounds_of(self.environment, self.long)
        within = (n if most is None else min(n, most) for n in self.lengths)
        return [n for n in dict.fromkeys(within) if n >= least]

    def of_length(self, values: Values, length: int) -> Values:
        """A batch like this one with another length; sizes that equal it are lengths as well."""
        long = values[self.long]
        return {s: length if size == long else size for s, size in values.items()}

    def _all_ends(self, symbol: sympy.Symbol) -> Iterator[int]:
        given = self.lengths if symbol == self.long else ()
        last = given[-1] if given else 1
        yield from given
        yield from (end for k in itertools.count(1) if (end := round(self.room**k)) > last)

    def forbidden(self, length: int, guard: sympy.Expr) -> str:
        """What users are told of a length of the option that no batch of the graph can have."""
        return (
            f"mstpass: option 'lengths' has {length}, but no batch of "
            f"{self.text({self.long: length})} takes this graph, because of the guard "
            f"{guard}. Leave out lengths that do not come, or change what asks for it"
        )

    def text(self, values: Values) -> str:
        """Sizes in words, such as ``ids.size()[1] = 300``."""
        return sizes_text(named(self.environment, values))


@dataclasses.dataclass(frozen=True)
class RangePlan:
    """A compiled graph, and for which batches it is right.

    Attributes:
        most: the greatest value of each symbol; none, if any batch may take it.
        conditions: what holds for the symbols besides.
    """

    run: Callable[..., Any]
    most: Values
    conditions: tuple[Any, ...] = ()

    def serves(self, values: Values) -> bool:
        """Whether a batch of these sizes may take the plan."""
        if any(values[symbol] > most for symbol, most in self.most.items()):
            return False
        return hold(self.conditions, values)

    def waits_for_backward(self) -> bool:
        """Whether a checkpoint may yet run a forward of the plan again."""
        waits: Callable[[], bool] | None = getattr(self.run, "waits_for_backward", None)
        return waits is None or waits()

    def is_within(self, ends: Values) -> bool:
        """Whether the plan is made for a range up to these sizes, or for any."""
        return all(most <= ends[symbol] for symbol, most in self.most.items())

    @property
    def room(self) -> float:
        """Grows with the batches that it serves."""
        return math.prod(self.most.values()) if self.most else math.inf


_NEAR = 256  # how much shorter than asked for a batch may be
_PARTS = 1024  # of the way between two batches


class Neighbours:
    """Batches like a given one.

    Args:
        inputs: of the graph; fake tensors of symbolic sizes.
        sized: the symbols of sizes.
        environment: has the guards of Dynamo.
    """

    def __init__(
        self, inputs: Sequence[Any], sized: frozenset[sympy.Symbol], environment: ShapeEnv
    ):
        self._sized, self._environment = sized, environment
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
        guards = guards_of(self._environment)
        for less in range(_NEAR):
            near = {s: n if n == batch[s] else max(1, n - less) for s, n in sizes.items()}
            found = self.grown(batch, near)
            if may_hold(guards, found):
                return found
        return None

    def forbidding(self, batch: Values, sizes: Values) -> sympy.Basic:
        """The guard of Dynamo that no batch of these sizes passes."""
        longer = self.grown(batch, sizes)
        return next(
            guard for guard in guards_of(self._environment) if not may_hold([guard], longer)
        )

    def on_its_side(
        self, batch: Values, larger: Values, conditions: Sequence[Any]
    ) -> Values | None:
        """The largest batch on the way to a larger one for which the same conditions fail.

        None, if that is the batch itself or the larger one.
        """
        failing = [condition for condition in conditions if not hold([condition], batch)]
        old, ends = ({s: values[s] for s in self._sized} for values in (batch, larger))
        for part in reversed(range(1, _PARTS)):
            sizes = {s: old[s] + (ends[s] - old[s]) * part // _PARTS for s in ends}
            if any(hold([condition], self.grown(batch, sizes)) for condition in failing):
                continue
            found = self.allowed(batch, sizes)
            if found is None or any(hold([condition], found) for condition in failing):
                return None
            return found if {s: found[s] for s in ends} not in (old, ends) else None
        return None
