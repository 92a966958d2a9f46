"""What chunks cost on a device where it was measured: the relative time of a loop by rows.

Three things make a loop slower than the same computation in one piece:

- efficiency: a matmul with few rows leaves a part of the device idle;
- accumulators: every chunk reads and writes the gradient of the weight, which is a traffic of
  ``4 / rows`` bytes per floating point operation, whatever the shape of the weight;
- the loop itself: a constant time for each chunk.

The first two depend on the rows of a chunk alone. They are measured together, as a table of rows
and slowdowns. The third weighs more the less a chunk computes:

    relative time of a loop  =  slowdown(rows)  +  chunk_us / (rows * flops_per_row / flops_per_us)

The host of a GPU runs the loop while the GPU works, so there the larger of the two terms counts.

    time of a product    =  operations / rate  +  bytes moved / bandwidth
    time of other ops    =  (bytes moved while they are computed + bytes that they move) / bandwidth

In a loop, what a kernel moves lies in a cache, or at least in pages that were there before: memory
of 32 MiB and more is new for every value, and the system clears it first. Measured 2026-11-28 on 2
cores of an AMD EPYC, fp32, torch 2.13, two threads: ``x + 1`` takes 0.06 to 0.14 ns an element for
4 and 16 MiB, and 0.9 ns for 64 MiB, of which reading takes 0.1 ns; one thread takes twice as long.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar

import torch

from mstpass.gpus import Gpu
from mstpass.graph.call_work import AttentionWork, ExchangeWork
from mstpass.graph.gpu_costs import BANDWIDTH, GpuCosts
from mstpass.graph.loop_work import LoopWork, Product


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """The measurements of one device, as they are stored.

    Attributes:
        slowdown: pairs (rows of a chunk, time of the matmuls relative to one piece), by ascending
            rows. From twice the last rows on, the relative time is 1.
        chunk_us: the time in microseconds that the loop itself takes for each chunk.
        flops_per_us: the rate of matmuls in one piece.
        dtype: the name of the dtype in which all of these were measured.
        rates: the rate of matmuls in other dtypes, by name.
        copied_bytes_per_us: the rate of a copy; None: not measured.
    """

    slowdown: tuple[tuple[int, float], ...]
    chunk_us: float
    flops_per_us: float
    dtype: str = "float32"
    rates: tuple[tuple[str, float], ...] = ()
    copied_bytes_per_us: float | None = None

    def __post_init__(self) -> None:
        rows, slow = [r for r, _ in self.slowdown], [slow for _, slow in self.slowdown]
        copied = 1.0 if self.copied_bytes_per_us is None else self.copied_bytes_per_us
        numbers = *rows[:1], *slow, self.flops_per_us, *dict(self.rates).values(), copied
        fits = bool(rows) and rows == sorted(set(rows)) and all(number > 0 for number in numbers)
        if not (fits and self.chunk_us >= 0):
            raise ValueError(f"rows must be ascending, and rates and times positive: {self}")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype={self.dtype!r} is no dtype of torch")

    def rate(self, dtype: torch.dtype) -> float | None:
        """The rate of matmuls in a dtype; None if it was not measured."""
        name = str(dtype).removeprefix("torch.")
        return self.flops_per_us if name == self.dtype else dict(self.rates).get(name)

    def slowdown_at(self, rows: float) -> float:
        """Interpolated linearly in 1 / rows, to which the accumulators' traffic is proportional."""
        points = [*self.slowdown, (2 * self.slowdown[-1][0], 1.0)]
        if rows <= points[0][0]:
            return 1 + (points[0][1] - 1) * points[0][0] / rows
        for (short, slow), (long, fast) in itertools.pairwise(points):
            if rows <= long:
                share = (1 / rows - 1 / long) / (1 / short - 1 / long)
                return max(1.0, fast + (slow - fast) * share)
        return 1.0


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """The costs of a device without a model of its own, such as a CPU: all as measured."""

    grain: ClassVar[int] = 1
    tolerable: ClassVar[float] = 1.10
    table: ChunkCosts
    bytes_per_us: float
    threads: int = 1

    # ---- nodes ---------------------------------------------------------------------------------
    def product_us(self, product: Product) -> float:
        return product.operations / self.rate(product.dtype) + self._memory_us(product.moved_bytes)

    def attention_us(self, work: AttentionWork, moved_bytes: float) -> float:
        compute_us = work.computed * work.imbalance(self.threads) / self.rate(work.dtype)
        return compute_us + self._memory_us(moved_bytes)

    def exchange_us(self, work: ExchangeWork) -> float:
        """Ranks of one host share its memory."""
        return self._memory_us(work.sent_bytes)

    def other_us(self, computed_bytes: float, moved_bytes: float) -> float:
        """Other ops once they are fused: a core computes or waits for memory."""
        return self._memory_us(computed_bytes + moved_bytes)

    def _memory_us(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_us

    def rate(self, dtype: torch.dtype) -> float:
        return self.table.rate(dtype) or self.table.flops_per_us

    # ---- loops ---------------------------------------------------------------------------------
    def loop_us(self, work: LoopWork, rows: int) -> float:
        """Products are slower in chunks, and other ops find a chunk's values in the cache."""
        products_us = sum(self.product_us(p.whole) for p in work.products)
        loop_us = math.ceil(work.tokens / rows) * self.table.chunk_us
        pieces = max(1.0, work.tokens / rows) * max(1, work.kernels)
        moved_bytes = pieces * _uncached(work.moved_bytes / pieces)
        others_us = self._memory_us(work.computed_bytes + moved_bytes)
        return self.slowdown(work, rows) * products_us + others_us + loop_us

    def whole_us(self, work: LoopWork) -> float:
        products_us = sum(self.product_us(p.whole) for p in work.products)
        return products_us + self.other_us(work.computed_bytes, work.moved_bytes)

    def relative_time(self, work: LoopWork, rows: int) -> float:
        matmul_us = rows * work.operations_per_token / self.rate(work.dtype)
        return self.table.slowdown_at(rows) + self.table.chunk_us / max(matmul_us, _LEAST_US)

    def slowdown(self, work: LoopWork, rows: int) -> float:
        return self.table.slowdown_at(rows)


def _uncached(num_bytes: float) -> float:
    """The bytes from memory that take as long as those that one kernel of a chunk moves."""
    return num_bytes * max(_CACHED, min(1.0, num_bytes / _LARGE_BYTES))


@dataclasses.dataclass(frozen=True)
class MeasuredGpuCosts(GpuCosts):
    """A GPU's model with the rate, the bandwidth and the times of loops that were measured on it.

    Accumulators weigh less where products are slower. So rows in another dtype than the measured
    one count as more rows, in proportion to its rate.
    """

    table: ChunkCosts = dataclasses.field(kw_only=True)

    @staticmethod
    def of(gpu: Gpu, tf32: bool, table: ChunkCosts) -> MeasuredGpuCosts:
        dtype = getattr(torch, table.dtype)
        whole = GpuCosts(gpu, tf32, attainable=1.0)
        bandwidth = BANDWIDTH
        if table.copied_bytes_per_us is not None:  # a copy reads and writes
            bandwidth = 2 * table.copied_bytes_per_us / gpu.memory_bytes_per_us
        attainable = table.flops_per_us / whole.rate(dtype)
        return MeasuredGpuCosts(gpu, tf32, attainable, bandwidth, table=table)

    def rate(self, dtype: torch.dtype) -> float:
        return self.table.rate(dtype) or super().rate(dtype)

    def chunk_us(self, work: LoopWork, rows: int) -> float:
        busy_us = rows / work.tokens * self.whole_us(work) * self.slowdown(work, rows)
        return max(busy_us, self.table.chunk_us)

    def slowdown(self, work: LoopWork, rows: int) -> float:
        measured = self.table.flops_per_us / self.rate(work.dtype)
        return self.table.slowdown_at(rows * measured)


_LEAST_US = 1e-9
_CACHED = 0.25  # the time of what a cache holds, as a part of that from memory
_LARGE_BYTES = 2**26  # no cache holds so much
