"""The simulated peak of finished graphs for batches of other sizes than those planned for.

The graphs stay what they are: the same values cross, and a loop of symbolic length makes the chunks
of each batch. So the peak is that of the same simulation, with other values of the symbols. Only
the bodies of loops hold plain ints, of a chunk of the largest batch: what a loop needs inside
counts as there, which no shorter batch exceeds.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.graph.joint import Modules
from mstpass.memory.simulate_graph import simulate_step
from mstpass.plans import PeakAt
from mstpass.torch_internals.batch_sizes import at_sizes, named

_STEPS = 32  # to which a length is found

Sizes = Mapping[sympy.Symbol, int]
Named = tuple[tuple[str, int], ...]  # the values of symbols, by where they come from


@dataclasses.dataclass(frozen=True)
class PeaksByLength:
    """The peaks of one plan.

    Args:
        most: the value of each symbol in the largest batch that the plan is made for.
        scatters_delayed: as of ``simulate_step``.
    """

    modules: Modules
    environment: ShapeEnv
    most: Sizes
    scatters_delayed: bool

    def table(self) -> tuple[PeakAt, ...]:
        """The peaks of the largest batch, of half of it and of a quarter."""
        return tuple(self.peak_at(self._scaled(1 / parts)) for parts in (1, 2, 4))

    def largest_within(self, budget_bytes: int) -> Named:
        """The sizes of the largest batch with a peak of at most this; empty if none is."""
        peak_of = lambda step: self.peak_at(self._scaled(step / _STEPS)).peak_bytes
        # a longer batch needs no less memory
        most = bisect.bisect_right(range(1, _STEPS + 1), budget_bytes, key=peak_of)
        return named(self.environment, self._scaled(most / _STEPS)) if most else ()

    def _scaled(self, factor: float) -> Sizes:
        return {symbol: max(2, int(size * factor)) for symbol, size in self.most.items()}

    def peak_at(self, sizes: Sizes) -> PeakAt:
        """The peak for a batch of these sizes."""
        forward, backward = (module.graph for module in self.modules)
        with at_sizes(self.environment, sizes):
            memory = simulate_step(forward, backward, self.scatters_delayed)
        return PeakAt(named(self.environment, sizes), memory.peak_bytes)
