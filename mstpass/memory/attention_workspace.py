"""What attention allocates while it runs, besides its results, from the sources of its kernels.

For queries (B, H, S, D), keys (B, K, T, D) and values (B, K, T, E), each term is a tensor::

    flash, CUDA     forward    splits of the keys, where few blocks of queries are there for the
                               multiprocessors: 4 splits B H S D' and 4 splits B H S
                    backward   4 B S' H D' (sum of the queries' gradient), 4 B H S' (row sums),
                               where K < H also 2 x T H D of the keys' dtype
    efficient       forward    4 B S H E in half precision with more than 128 features
                    backward   4 B H S (row sums) and one workspace of tiles; in float32 first a
                               product of B S H E from which the row sums are computed
    cuDNN           backward   as flash, without rounding: an estimate, see below
    FlexAttention   backward   4 B H S (row sums); the templates need nothing else
    flash, CPU      both       a block of scores and of results in each thread

S' is S rounded up to 128, D' is D rounded up to 32, or to 64 from 128 on. Sequences in one row
(``varlen``) have S + 128 rows each. The backward of flash and of efficient attention copies a
gradient that is not contiguous. Workspaces of efficient attention are those of compute capability 8
and later.

Sources: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``,
``mha_varlen_bwd``), cuda/attention.cu and attention_backward.cu, cuda/mem_eff_attention/
kernel_backward.h (``workspace_size``), cpu/FlashAttentionKernel.cpp. cuDNN decides itself what it
allocates: the terms are those that its open frontend asks for
(scaled_dot_product_flash_attention.h, ``CompositeSDPABackwardNode``). Kernels that replace flash
attention at run time (``torch.nn.attention.activate_flash_attention_impl``) are not known.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from mstpass.graph.attention_sizes import AttentionSizes, ceil_div, padded_features, round_up
from mstpass.graph.device_costs import CudaDevice
from mstpass.graph.sizes import fills_memory
from mstpass.memory.allocation import rounded
from mstpass.torch_internals.graphs import OpCall

_FLOAT = torch.float32.itemsize


def _blocks(*tensors: int) -> int:
    """The bytes of several tensors in the allocator's blocks."""
    return sum(map(rounded, tensors))


def _copied(call: OpCall, sizes: AttentionSizes, *names: str) -> list[int]:
    """The bytes of those operands that the kernel copies, as it wants (B, S, H, D) contiguous."""
    found = filter(None, map(call.operand, names))
    swapped = (0, 2, 1, 3) if sizes.heads_first else (0, 1, 2, 3)
    pairs = ((o, swapped if len(o.shape) == 4 else range(len(o.shape))) for o in found)
    return [o.bytes for o, order in pairs if not fills_memory(o.shape, o.stride, order)]


def _is_deterministic() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


# ---- flash attention on CUDA -------------------------------------------------------------------
_ROWS = 128  # the most rows of queries in a block
_MOST_SPLITS = 128
_SPLIT_ROWS = 64  # of queries, in a kernel that splits the keys
_FEW_BLOCKS, _EFFICIENT = 0.8, 0.85  # of the multiprocessors; of the best efficiency


def flash_forward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    if sizes.rows != sizes.B * sizes.S or call.number("dropout_p"):
        return 0  # no splits of sequences in one row, and none with dropout
    H, S = sizes.H, sizes.S
    if S == 1 and sizes.K < H:  # query heads that share a key become rows
        H, S = sizes.K, H // sizes.K
    keys = 256 if sizes.D <= 64 else 128 if sizes.D <= 128 else 64
    splits = _splits(
        sizes.B * H * ceil_div(S, _SPLIT_ROWS),
        2 * device.multiprocessors,
        ceil_div(sizes.T, keys),
    )
    if splits == 1:
        return 0
    sums = _FLOAT * splits * sizes.B * H * S
    return _blocks(sums, sums * padded_features(sizes.D))


def _splits(blocks: int, slots: int, key_blocks: int) -> int:
    """Into how many parts the kernel splits the keys (``num_splits_heuristic``)."""
    if blocks >= _FEW_BLOCKS * slots:
        return 1
    efficiency = {}
    for splits in range(1, min(_MOST_SPLITS, slots, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = blocks * splits / slots
            efficiency[splits] = waves / ceil_div(blocks * splits, slots)
    best = max(efficiency.values(), default=0.0)
    return next((n for n, found in efficiency.items() if found >= _EFFICIENT * best), 1)


def flash_backward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    in_one_row = sizes.rows != sizes.B * sizes.S or call.operand("cum_seq_q") is not None
    rows = sizes.rows + _ROWS * sizes.B if in_one_row else sizes.B * round_up(sizes.S, _ROWS)
    sums = _FLOAT * rows * sizes.H
    gradients = sums * padded_features(sizes.D)
    if _is_deterministic():
        gradients *= ceil_div(device.multiprocessors, sizes.B * sizes.H)
    expanded = sizes.dtype.itemsize * sizes.key_rows * sizes.H * sizes.D
    return _blocks(
        sums,
        gradients,
        *([expanded, expanded] if sizes.K != sizes.H else []),
        *_copied(call, sizes, "grad_out", "out"),
    )


# ---- memory-efficient attention on CUDA ----------------------------------------------------------
_MOST_FEATURES_IN_REGISTERS = 128
_LARGE_SHARED_MEMORY = 160 * 2**10  # bytes of a block, for tiles of 128 x 128
_TILE_HEADER = 16  # bytes: a lock and a counter
_ENOUGH_BLOCKS, _MOST_SPLIT_BLOCKS = 256, 200
_WITH_96_FEATURES = ((8, 6), (8, 9))  # compute capabilities with a kernel for them


def efficient_forward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    if sizes.dtype.itemsize >= _FLOAT:
        return 0
    if max(sizes.D, sizes.E) <= _MOST_FEATURES_IN_REGISTERS:
        return 0
    return _blocks(_FLOAT * sizes.rows * sizes.H * sizes.E)


def efficient_backward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    starts = call.operand("cu_seqlens_q")
    if starts is not None:
        S = int(call.number("max_seqlen_q", sizes.S))
        T = int(call.number("max_seqlen_k", sizes.T))
        sizes = dataclasses.replace(sizes, B=max(1, starts.numel - 1), S=S, T=T)
    is_half = sizes.dtype.itemsize < _FLOAT
    copied = _copied(call, sizes, "grad_out", "grad_out_")
    sums = _FLOAT * sizes.rows * sizes.H
    running = _blocks(sums, _tiles_bytes(sizes, is_half, call, device), *copied)
    if is_half:
        return running
    return max(running, _blocks(sums, sums, sums * sizes.E, *copied))


def _tiles_bytes(sizes: AttentionSizes, is_half: bool, call: OpCall, device: CudaDevice) -> int:
    """``AttentionBackwardKernel::Params::workspace_size``."""
    dropout = bool(call.number("dropout_p"))
    tile = _tile(max(sizes.D, sizes.E), is_half, dropout, device)
    splits = ceil_div(sizes.T, tile.columns)
    num_splits = call.arguments.get("num_splits_key")
    if isinstance(num_splits, int):
        splits = min(splits, num_splits)
    else:
        if sizes.B * sizes.H >= _ENOUGH_BLOCKS and 2 * tile.columns >= sizes.T:
            splits = 1
        if tile.sums_in_memory:
            splits = min(splits, _MOST_SPLIT_BLOCKS // (sizes.B * sizes.H))
    splits = 1 if _is_deterministic() else max(1, splits)
    elements = 0
    if tile.sums_in_memory:
        widths = round_up(sizes.D, tile.rows) + round_up(sizes.E, tile.rows)
        elements += splits * tile.columns * widths
    tiles = ceil_div(sizes.S, tile.rows) * ceil_div(sizes.D, tile.columns)
    elements += tiles * (tile.rows * tile.columns + _TILE_HEADER // _FLOAT)
    return _FLOAT * sizes.B * sizes.H * round_up(elements, 4)


class _Tile(NamedTuple):
    """A block of scores: ``rows`` queries x ``columns`` keys.

    Attributes:
        sums_in_memory: the gradients of keys and values are summed in the workspace, because
            registers are too few and the results too narrow.
    """

    rows: int
    columns: int
    sums_in_memory: bool = False


def _tile(features: int, is_half: bool, dropout: bool, device: CudaDevice) -> _Tile:
    """The kernel that is chosen (kernels/cutlassB.h, for sm_80)."""
    large = device.shared_memory_per_block_bytes >= _LARGE_SHARED_MEMORY
    if features <= 64:
        return _Tile(64, 64)
    if not is_half:
        return _Tile(128 if large else 64, 64)
    if features <= 96 and not dropout and device.capability in _WITH_96_FEATURES:
        return _Tile(128, 64)
    if features <= 128 and large:
        return _Tile(128, 128)
    return _Tile(128 if large and features > 128 else 64, 64, sums_in_memory=True)


# ---- cuDNN and FlexAttention ---------------------------------------------------------------------
def cudnn_backward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    sums = _FLOAT * sizes.rows * sizes.H
    expanded = [sizes.dtype.itemsize * sizes.key_rows * sizes.H * n for n in (sizes.D, sizes.E)]
    return _blocks(sums, sums * sizes.D, *(expanded if sizes.K != sizes.H else []))


def flex_backward_bytes(call: OpCall, sizes: AttentionSizes, device: CudaDevice) -> int:
    return _blocks(_FLOAT * sizes.rows * sizes.H)


# ---- flash attention on the CPU ------------------------------------------------------------------
_MOST_KEYS = 512  # in a block
_QUERIES = ((768, 256), (192, 64), (0, 32))  # from so many queries on, so many in a block


def cpu_flash_bytes(sizes: AttentionSizes) -> int:
    """In all threads.

    A thread holds a block of scores, queries x keys in float32, and a block of results (forward) or
    of the scores' gradient (backward). Inputs of a narrower dtype need a copy of the scores in that
    dtype.
    """
    rows = min(sizes.S, next(block for least, block in _QUERIES if least <= sizes.S))
    keys = min(sizes.T, _MOST_KEYS)
    elements = rows * (2 * keys if sizes.backward else keys + sizes.D + 2)
    if sizes.dtype.itemsize < _FLOAT:
        elements += rows * keys // 2 * (2 if sizes.backward else 1)
    return torch.get_num_threads() * elements * _FLOAT
