"""What attention of a chunk of queries allocates while it runs, besides its results.

Of graph/attention_rows.py, for a block of keys, where a row is a query of all heads:

    forward    the rows of the queries, copied so that heads which share keys are rows, those of the
               block's result, and those of the results so far, in float32
    backward   copies of the rows of queries, results and their gradients; the gradient of the
               queries by the block, and so far; the gradients of the block's keys and values
    kernels    those of flash attention for these rows (attention_workspace.py), on CUDA with the
               gradients of a causal block's keys for all heads of the queries
"""

from __future__ import annotations

import dataclasses
import math

import torch

from mstpass.graph.attention_rows import keys_of_block
from mstpass.graph.op_table import row_of
from mstpass.memory.attention_workspace import cpu_flash_bytes
from mstpass.torch_internals.graphs import OpCall, Operand

_FLOAT = torch.float32.itemsize


def rows_bytes(call: OpCall) -> int:
    """The bytes of a call for the rows of one chunk."""
    query, key, value = map(call.operand, ("query", "key", "value"))
    attention = row_of(call.op).attention
    if query is None or key is None or value is None or attention is None:
        return 0
    rows = math.prod(query.shape)
    size = query.dtype.itemsize
    wide = max(size, _FLOAT)
    block = min(key.shape[2], keys_of_block(query.shape[2])) if attention.backward else key.shape[2]
    of_block = {"query": _folded(query, key.shape[1]), "key": _first(key, block)}
    of_block["value"] = _first(value, block)
    on_block = dataclasses.replace(call, arguments={**call.arguments, **of_block})
    kernels = cpu_flash_bytes(on_block) if query.device.type == "cpu" else 0
    if not attention.backward:
        merged = rows * wide if size < wide else 0
        return rows * (2 * size + wide) + merged + kernels
    features = key.shape[3] + value.shape[3]
    of_keys = key.shape[0] * key.shape[1] * block * features * size
    if query.device.type == "cuda":
        heads, length = query.shape[1:3]
        of_keys = max(of_keys, heads * min(length, block) * features * size)
        kernels = rows * _FLOAT + heads * length * _FLOAT  # sums of the queries' gradient, of rows
    return rows * (4 * size + wide) + of_keys + kernels


def _first(operand: Operand, keys: int) -> Operand:
    shape = (*operand.shape[:2], keys, *operand.shape[3:])
    return dataclasses.replace(operand, shape=shape)


def _folded(query: Operand, heads: int) -> Operand:
    """The queries of all heads that read one head of keys, as its rows."""
    _, all_heads, rows, features = query.shape
    return dataclasses.replace(query, shape=(1, heads, all_heads // heads * rows, features))
