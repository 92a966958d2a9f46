"""What work costs on a GPU, from first principles: for GPUs that were not measured.

    time of a product   =  max(compute, memory) + KERNEL_US
    memory              =  bytes moved / (BANDWIDTH * peak bandwidth)
    time of a sum       =  (max(compute, memory) ** p + adding ** p) ** (1 / p) + KERNEL_US
    adding              =  bytes of the sum read and written / (ADDING * peak bandwidth)
    compute             =  waves * operations of a tile / rate of a multiprocessor
    exchange            =  bytes sent / (LINK * peak rate of the links), of ranks or of nodes
    time of other ops   =  bytes that fused kernels move (call_work.py) / bandwidth
    time of a loop      =  chunks * max(time of a chunk on the GPU, time of the host for a chunk)

A product's result is computed in *tiles* of at most 128 x 256 elements. A multiprocessor computes
one tile at a time, so the tiles run in *waves* of as many as there are multiprocessors. A tile at
the edge of the result, and a last wave that fills a part of the GPU, take as long as full ones.
Smaller tiles waste less at the edges, but read more for each operation. *Split-K* divides the
contracted dim among several tiles and adds their results, which fills the GPU where there are few
tiles. The fastest of all these ways counts, because cuBLAS chooses among them too.

While a tile is computed, memory gives what the next one reads. But a tile is added to the float32
*sum* of a weight's gradient once it is computed. All multiprocessors add their tiles of a wave at
about the same time, and compute little meanwhile. The longer the contracted dim, the further apart
the multiprocessors are, and the more of it is hidden: so p lies between 1, where nothing is hidden,
and infinity, where the longer of both times counts.

A loop is a Python ``while`` loop on the host, which launches the kernels of one chunk after another
while the GPU works. Its own time shows only where the GPU is faster than the host.

The constants marked *measured* are from an H200 (docs/results/gpu.md, torch 2.11, 2026-11-27); the
others are round numbers from what others published. ``mstpass bench loops --store`` measures the
device at hand, and measured costs take the place of these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from mstpass.gpus import TF32, Gpu
from mstpass.graph.attention_sizes import ceil_div
from mstpass.graph.call_work import AttentionWork, ExchangeWork
from mstpass.graph.loop_work import LoopWork, Product

ATTAINABLE = 0.8  # of the peak rate, by large products; measured: 787 of 989 TFLOP/s
BANDWIDTH = 0.81  # of the peak, by large kernels; measured: a copy, 2 * 1953 of 4800 GB/s
# Products that add to a sum. Both measured: fitted to the times of three products of a head in
# chunks of 128 to 4096 rows, and of heads of Llama-3 in 2 to 16 chunks; all are within 12 %.
ADDING = 0.6  # of the peak bandwidth
LINK = 0.8  # of the peak rate of links between GPUs, by large exchanges; assumed
_OVERLAP = 1.5  # p
KERNEL_US = 2.0  # of the GPU: from the end of one kernel to full speed of the next
HOST_KERNEL_US = 6.0  # of the host: one launch from Inductor's Python wrapper
# Of the host, for each chunk: condition, counter, views, and ops of mst called through torch's
# dispatcher. Measured: 143.5 us, of which five launches are 30.
HOST_CHUNK_US = 110.0
# The rate of attention, as a part of that of products of the same dtype. Measured, causal, 16,384
# tokens, heads of 128: 0.53 in the forward and 0.64 in the backward of cuDNN's kernel.
ATTENTION = 0.6
# The same of torch's memory-efficient kernel, which it takes where there is a mask, in the forward
# and in the backward. Measured, the same heads with a mask.
EFFICIENT_ATTENTION = (0.19, 0.145)
# That kernel's instructions are those of compute capability 8.0. From 9.0 on, products have others,
# which do twice as much in a cycle (the makers' tables of operations per multiprocessor).
_SHARE_OF_OLD_INSTRUCTIONS = 0.5
GRAIN = 16  # chunk lengths are multiples of it

# rows and columns of a tile, and the rate of such tiles as a part of that of the largest
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.9),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.5),
)
_TILE_DEPTH = 64  # a tile reads the contracted dim in steps of this many elements
_FILL = 64  # the time to fill and drain a tile's pipeline, in elements of the contracted dim
_MOST_SPLITS = 16
_QUERIES_OF_BLOCK = 128  # of attention; a multiprocessor computes at least one block at a time
_LEAST_SPLIT_DEPTH = 256


@dataclasses.dataclass(frozen=True)
class GpuCosts:
    """The estimated costs of one kind of GPU. Those of other devices answer the same questions.

    Attributes:
        tolerable: the limit of a loop's products, relative to those in one piece.
        grain: lengths of chunks are multiples of it.
        tf32: float32 products are rounded to TF32.
        attainable: the rate of large products, as a part of the peak.
        bandwidth: the same of large kernels that move memory.
    """

    # Accumulators weigh more than on a CPU: chunks of half the length that 1.1 would ask for cost
    # 1.2.
    tolerable: ClassVar[float] = 1.2
    grain: ClassVar[int] = GRAIN
    gpu: Gpu
    tf32: bool = False
    attainable: float = ATTAINABLE
    bandwidth: float = BANDWIDTH

    # ---- nodes ---------------------------------------------------------------------------------
    def product_us(self, product: Product) -> float:
        return KERNEL_US + _busy_us(self, product)

    def attention_us(self, work: AttentionWork, moved_bytes: float) -> float:
        blocks = work.heads * math.ceil(work.queries / _QUERIES_OF_BLOCK)
        idle = max(1.0, self.gpu.multiprocessors / max(1, blocks))
        compute_us = idle * work.computed / (self._attention_share(work) * self.rate(work.dtype))
        return KERNEL_US + max(compute_us, self.memory_us(moved_bytes))

    def _attention_share(self, work: AttentionWork) -> float:
        """The rate of attention, as a part of that of products."""
        if not work.efficient:
            return ATTENTION
        newer = self.gpu.capability >= (9, 0)
        share = EFFICIENT_ATTENTION[work.backward]
        return share if newer else share / _SHARE_OF_OLD_INSTRUCTIONS

    def exchange_us(self, work: ExchangeWork) -> float:
        """The slower one of what goes to GPUs of the same node, and to those of others."""
        links = self.gpu.links
        crosses = work.ranks > links.gpus
        if work.in_turn:  # as slow as the slowest link on the way round
            rate = links.between_bytes_per_us if crosses else links.inside_bytes_per_us
            return KERNEL_US + work.sent_bytes / (LINK * rate)
        near = (min(work.ranks, links.gpus) - 1) / max(1, work.ranks - 1)
        inside_us = near * work.sent_bytes / links.inside_bytes_per_us
        between_us = (1 - near) * work.sent_bytes / links.between_bytes_per_us
        return KERNEL_US + max(inside_us, between_us) / LINK

    def other_us(self, computed_bytes: float, moved_bytes: float) -> float:
        """The time of other ops: by what they compute and move once they are fused."""
        return self.memory_us(moved_bytes)

    def memory_us(self, num_bytes: float) -> float:
        return num_bytes / (self.bandwidth * self.gpu.memory_bytes_per_us)

    def rate(self, dtype: torch.dtype) -> float:
        """Operations per microsecond that large products of matrices of this dtype reach."""
        rates = self.gpu.flops_per_us
        single = rates[torch.float32]
        if dtype == torch.float32 and self.tf32:
            peak = rates.get(TF32, single)
        elif dtype.itemsize == 1:
            peak = rates.get(torch.float8_e4m3fn, rates[torch.float16])
        else:  # without units for this dtype, products run on those for float32, or on halves
            peak = rates.get(dtype, single * min(1.0, 4 / dtype.itemsize))
        return self.attainable * peak

    # ---- loops ---------------------------------------------------------------------------------
    def chunk_us(self, work: LoopWork, rows: int) -> float:
        """The time of one chunk of ``rows`` tokens."""
        products_us = sum(map(self.product_us, work.products_of_chunk(rows)))
        share = rows / work.tokens
        others_us = self.other_us(work.computed_bytes * share, work.moved_bytes * share)
        others_us += KERNEL_US * (work.kernels - len(work.products))
        return max(products_us + others_us, HOST_CHUNK_US + HOST_KERNEL_US * work.kernels)

    def loop_us(self, work: LoopWork, rows: int) -> float:
        """The time of the loop in chunks of ``rows`` tokens, the last of which may overlap."""
        return math.ceil(work.tokens / rows) * self.chunk_us(work, rows)

    def whole_us(self, work: LoopWork) -> float:
        """The time of the same work in one piece."""
        products_us = sum(self.product_us(p.whole) for p in work.products)
        return products_us + self.other_us(work.computed_bytes, work.moved_bytes)

    def relative_time(self, work: LoopWork, rows: int) -> float:
        """The time of the loop for a token, relative to that in one piece."""
        chunks = work.tokens / rows
        return chunks * self.chunk_us(work, rows) / max(self.whole_us(work), _LEAST_US)

    def slowdown(self, work: LoopWork, rows: int) -> float:
        """The same for the products alone, without the time of the loop itself."""
        chunks_us = sum(_busy_us(self, p) for p in work.products_of_chunk(rows))
        whole_us = sum(_busy_us(self, p.whole) for p in work.products)
        return chunks_us * work.tokens / rows / max(whole_us, _LEAST_US)


_LEAST_US = 1e-9


@functools.lru_cache(maxsize=4096)
def least_rows(time: Callable[[LoopWork, int], float], work: LoopWork, limit: float) -> int:
    """The fewest rows of a chunk with at most this time; all tokens if fewer do not reach it.

    Args:
        time: of a loop in chunks of so many rows, relative to one piece.
    """
    lengths = (rows for rows in _lengths() if rows >= work.tokens or time(work, rows) <= limit)
    return next(lengths)


def _lengths() -> Iterator[int]:
    """Multiples of 16, later of 32, 64, ...: about eight for each doubling."""
    rows = GRAIN
    while True:
        yield rows
        rows += max(GRAIN, 2 ** (rows.bit_length() - 4))


@functools.lru_cache(maxsize=65536)
def _busy_us(costs: GpuCosts, product: Product) -> float:
    """The time of a product without that of its launch."""
    compute_us = min(_ways_us(costs, product))
    added_bytes = product.accumulated_bytes
    memory_us = costs.memory_us(product.moved_bytes - added_bytes)
    adding_us = added_bytes / (ADDING * costs.gpu.memory_bytes_per_us)
    busy_us = max(compute_us, memory_us)
    return float((busy_us**_OVERLAP + adding_us**_OVERLAP) ** (1 / _OVERLAP))


def _ways_us(costs: GpuCosts, product: Product) -> Iterator[float]:
    """The time to compute a product, for each kind of tile and number of splits."""
    processors = costs.gpu.multiprocessors
    rate = costs.rate(product.dtype) / processors
    for tile_rows, tile_columns, share in _TILES:
        tiles = product.batch * ceil_div(product.rows, tile_rows)
        tiles *= ceil_div(product.columns, tile_columns)
        for splits in _splits(tiles, product.contracted, processors):
            depth = ceil_div(ceil_div(product.contracted, splits), _TILE_DEPTH) * _TILE_DEPTH
            tile_us = 2 * tile_rows * tile_columns * (depth + _FILL) / (rate * share)
            yield ceil_div(tiles * splits, processors) * tile_us + _added_us(costs, product, splits)


def _splits(tiles: int, contracted: int, processors: int) -> Iterator[int]:
    """Numbers of parts of the contracted dim that may pay off."""
    yield 1
    if tiles < 4 * processors:
        yield from range(2, 1 + min(_MOST_SPLITS, contracted // _LEAST_SPLIT_DEPTH))


def _added_us(costs: GpuCosts, product: Product, splits: int) -> float:
    """The time to write and to add the results of all splits, in float32."""
    if splits == 1:
        return 0.0
    partial_bytes = 4 * splits * product.batch * product.rows * product.columns
    return KERNEL_US + costs.memory_us(2 * partial_bytes)
