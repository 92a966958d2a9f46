"""``mst_loop``: an op that runs a loop over chunks of tokens. The loop has no side effects.

    outputs = mst_loop(body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole)

Let N be ``num_tokens`` and c be ``chunk_tokens``. The tensors in ``sliced`` have the tokens first:
``[N, ...]``. Chunk i holds the c rows from ``min(i * c, N - c)`` on, so the last chunk overlaps the
one before it if c does not divide N. The values in ``whole`` are passed to every chunk.
``body(*chunks, *whole[, valid])`` returns one tensor for each of ``specs``:

    ("stack", shape, dtype)  the rows of an output ``[N, ...]``; rows in the overlap are written
                             twice, and are as the last chunk writes them
    (("stack", d), ...)      the same of an output that has its rows in dim d, as the part has
    (("over", k), ...)       the same, in the place of sliced tensor k, which no one reads later
                             (graph/loop_op.py); such outputs come last. Rows in the overlap
                             are written by the last chunk alone
    ("sum", shape, dtype)    a summand of the output, perhaps in a wider dtype. ``valid``, a bool
                             ``[c]`` that is passed only if c does not divide N, is False for rows
                             that the last chunk sums. It is the last one for all outputs, as two
                             computations of a row may differ in their last bits, and what equals
                             a maximum is looked for in another loop
    ("max", shape, dtype)    a part of the output, which is the maximum of all parts; so are "min"
                             and, of bools, "any"
    (("sum", m), ...)        a sum of exponentials relative to the chunk's part of output m, which
                             is a maximum: exp(m_i - m) times it is a summand of the output

If N is symbolic, ``num_chunks`` is None, and the chunks fit the batch at hand: as few chunks of at
most c rows as hold N tokens, all of equal length except for the last, which ends with the tokens
(one chunk of N rows if N < c). The length is a multiple of 16 if c is one, so that rows of half
precision stay aligned to 32 bytes. No chunks overlap, so there is no ``valid``. The first argument
of the body is the length of the chunk: ``body(rows, *chunks, *whole)``.

A body that has an input of the name ``start`` gets the number of the chunk's first row for it,
before the chunks.

Unlike ``while_loop`` the op is cacheable: FxGraphCache and AOTAutogradCache accept graphs that hold
it. loops/lowering.py turns it into an in-place ``while_loop`` later.

*Operands* may be on the host, or where the loop's own results are written. Nodes copy a value to
the host and back (torch_internals/host_copy_ops.py).

A loop can copy an operand from the host itself, the rows of one chunk at a time. ::

    mstpass::rows_on_host(host, device) -> value

stands for a value whose rows wait on the host. A loop that reads it, itself or through views,
copies what a chunk needs (loops/lowering.py). Called as it is, the op copies all of it.

Results of a loop may be written over one of its operands, row by row. A chunk reads its rows of an
operand and writes rows of a result of the same layout: the gradient of a block's output, for
example, and that of its input. If nothing else reads the operand, both need one buffer. A plan
foresees that (loops/region_loops.py); of a finished graph it is asked here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import nbytes, numel, value_of
from mstpass.graph.sizes import fills_memory, generic_shape, generic_stride, hint
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.graphs import HigherOrderOperator, implement

STACK, OVER, SUM, MAX, MIN, ANY = "stack", "over", "sum", "max", "min", "any"
START = "start"  # the name of an input of a body
CONDITION = "mst_cond_"  # what the names of the conditions of lowered loops begin with
_ALIGNED = 16  # tokens
# The pairs: a dim of rows, the position of a maximum, or that of a sliced tensor
Kind = str | tuple[str, int]
OutputSpec = tuple[Kind, tuple[Any, ...], torch.dtype]  # a size is an int, or a node of a graph


class MstLoop(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("mst_loop", cacheable=True)

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = super().__call__(*args)
        return result


mst_loop = MstLoop()


def _fake(mode: FakeTensorMode, *args: Any) -> tuple[torch.Tensor, ...]:
    *_, specs, sliced, _ = args
    device = sliced[0].device
    with mode:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in specs)


def run_eagerly(
    body: Callable[..., Any],
    num_chunks: int | None,
    chunk_tokens: int,
    num_tokens: int,
    specs: tuple[OutputSpec, ...],
    sliced: tuple[torch.Tensor, ...],
    whole: tuple[torch.Tensor | int, ...],
) -> tuple[torch.Tensor, ...]:
    """Run the loop as its definition says. Backends other than Inductor use this."""
    device = sliced[0].device
    results = [
        torch.full(shape, initial(kind, dtype), dtype=dtype, device=device)
        for kind, shape, dtype in specs
    ]
    for start, rows, sizes, valid in _chunks(num_chunks, chunk_tokens, num_tokens, device):
        chunks = [tensor.narrow(0, start, rows) for tensor in sliced]
        first = (start,) if takes_start(body) else ()
        parts = body(*sizes, *first, *chunks, *whole, *valid)
        new = {  # before the maxima that they read are written
            n: combined(kind, n, results, parts)
            for n, (kind, _, _) in enumerate(specs)
            if stacked_dim(kind) is None
        }
        for position, (kind, _, _) in enumerate(specs):
            dim = stacked_dim(kind)
            if dim is None:
                results[position].copy_(new[position])
            else:
                results[position].narrow(dim, start, rows).copy_(parts[position])
    return tuple(results)


def takes_start(body: Any) -> bool:
    """Whether the body of a loop is given the number of the chunk's first row."""
    graph = getattr(body, "graph", None)
    return graph is not None and any(
        node.target == START for node in graph.find_nodes(op="placeholder")
    )


def stacked_dim(kind: Kind) -> int | None:
    """The dim of a stacked output that its rows are in; None for other outputs."""
    if isinstance(kind, str):
        return 0 if kind == STACK else None
    name, number = kind
    return {STACK: number, OVER: 0}.get(name)


def overwritten(kind: Kind) -> int | None:
    """The position of the sliced tensor that an output is written over; None for other outputs."""
    return kind[1] if not isinstance(kind, str) and kind[0] == OVER else None


# ---- parts of chunks -----------------------------------------------------------------------------
def initial(kind: Kind, dtype: torch.dtype) -> float:
    """What an output holds before the first chunk; of no matter for stacked rows."""
    if kind not in (MAX, MIN):
        return 0
    if dtype.is_floating_point:
        return float("-inf" if kind == MAX else "inf")
    bounds = torch.iinfo(dtype)
    return bounds.min if kind == MAX else bounds.max


def combined(
    kind: Kind, position: int, results: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What output ``position`` is after a chunk.

    Args:
        results: all outputs before the chunk.
        parts: what the chunk gives.
    """
    result, part = results[position], parts[position]
    if isinstance(kind, str):
        return _COMBINE[kind](result, part)
    old, new = (of[kind[1]].to(result.dtype) for of in (results, parts))
    maximum = torch.maximum(old, new)
    # as long as all values are -inf, there is nothing to be relative to
    pivot = torch.where(maximum.abs() == float("inf"), 0, maximum)
    shape = result.shape  # with or without the dims of size 1 that the maximum has
    return result * (old - pivot).exp().view(shape) + part * (new - pivot).exp().view(shape)


_COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {
    SUM: torch.add,
    MAX: torch.maximum,
    MIN: torch.minimum,
    ANY: torch.logical_or,
}


implement(mst_loop, eager=run_eagerly, fake=_fake)

_Chunk = tuple[int, int, tuple[int, ...], tuple[torch.Tensor, ...]]


def _chunks(
    num_chunks: int | None, chunk_tokens: int, num_tokens: int, device: torch.device
) -> Iterator[_Chunk]:
    """Of each chunk: first row, length, and the body's arguments before and after its tensors."""
    if num_chunks is None:
        length = fitted_length(chunk_tokens, num_tokens) if num_tokens else 1
        for start in range(0, num_tokens, length):
            rows = min(length, num_tokens - start)
            yield start, rows, (rows,), ()
        return
    ragged, last = num_chunks * chunk_tokens != num_tokens, num_tokens - chunk_tokens
    for i in range(num_chunks):
        start = min(i * chunk_tokens, last)
        rows_of_chunk = torch.arange(start, start + chunk_tokens, device=device)
        valid = ((rows_of_chunk < last) | (i == num_chunks - 1),) if ragged else ()
        yield start, chunk_tokens, (), valid


def fitted_length(chunk_tokens: int, num_tokens: int) -> int:
    """The length of equal chunks of at most ``chunk_tokens`` rows; ``num_tokens`` may be symbolic.

    It may exceed ``num_tokens``, by less than ``_ALIGNED``.
    """
    num_chunks = (num_tokens + chunk_tokens - 1) // chunk_tokens
    multiple = 1 if chunk_tokens % _ALIGNED else _ALIGNED
    # In one division: rounding ceil(N / chunks) up to a multiple is ceil(N / (chunks * multiple)).
    parts = num_chunks * multiple
    return (num_tokens + parts - 1) // parts * multiple


# ---- operands of loops ---------------------------------------------------------------------------
DEVICE_TYPE = "cuda"  # of the devices whose values may wait on the host


def is_host_copy(node: fx.Node) -> bool:
    """Whether the node begins a copy or waits for one."""
    return node.op == "call_function" and node.target in host_copy_ops.all_ops()


def is_wait_for_reload(node: fx.Node) -> bool:
    """Whether the node waits until a value is back on the device: it is a view of the copy."""
    return _is_wait(node) and node.all_input_nodes[0].target is host_copy_ops.RELOAD


def is_rows_on_host(node: fx.Node) -> bool:
    """Whether the node stands for a value on the host of which loops copy rows."""
    return node.op == "call_function" and node.target is host_copy_ops.ROWS_ON_HOST


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a graph for a GPU lies in the host's memory: what the copies return
    there, and the input that a backward copies back."""
    if node.op == "placeholder":
        return any(
            user.target in (host_copy_ops.RELOAD, host_copy_ops.ROWS_ON_HOST) for user in node.users
        )
    if is_rows_on_host(node):
        return True
    if _is_wait(node):
        return not is_wait_for_reload(node)
    return node.target is host_copy_ops.OFFLOAD


def _is_wait(node: fx.Node) -> bool:
    return node.target is host_copy_ops.WAIT


def rows_on_host(node: fx.Node) -> bool:
    """Whether the value is one whose rows wait on the host, or a view of it."""
    return is_rows_on_host(ops.base_of(node))


def is_in_rows(node: fx.Node) -> bool:
    """Whether a value and its storage lie in memory row by row.

    So they do on the host, where the same views show the same elements, and rows are one run of
    memory.
    """
    values = node, ops.base_of(node)
    return all(value_of(n) is not None and is_row_by_row(n) for n in values)


def bytes_of_rows(node: fx.Node, total: Any, length: int) -> int:
    """The bytes of so many rows of a value that has ``total`` rows, in the batch at hand."""
    rows = max(1, hint(total))
    return nbytes(node) * min(length, rows) // rows


def operands_in_rows(call: fx.Node) -> tuple[tuple[str, int], ...]:
    """``Op.in_rows`` of a node: empty unless it is a loop."""
    if call.target is not mst_loop:
        return ()
    arguments: Any = call.args
    _, _, length, total, _, sliced, whole = arguments
    total = total.meta["val"] if isinstance(total, fx.Node) else total
    return tuple(
        (node.name, bytes_of_rows(node, total, length))
        for node in dict.fromkeys(sliced)
        if node not in whole and is_in_rows(node)
    )


# ---- operands that results are written over ------------------------------------------------------
def written_over(node: fx.Node) -> fx.Node | None:
    """The operand that a result of a loop is written over; None for all other nodes."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    if call is None or call.target is not mst_loop:
        return None
    specs, sliced = call.args[4:6]
    position = overwritten(specs[node.args[1]][0])
    if position is None or not is_last_reader(call, sliced[position]):
        return None
    operand: fx.Node = sliced[position]
    return operand


def is_last_reader(call: fx.Node, operand: fx.Node) -> bool:
    """Whether a loop may write over an operand: the graph computes it for the loop alone."""
    base = ops.base_of(operand)
    return (
        base.op == "call_function"
        and numel(base) == numel(operand)
        and is_row_by_row(operand)
        and ops.readers_through_views(base) == [call]
    )


def is_row_by_row(node: fx.Node) -> bool:
    """Whether the rows lie one behind the other, as those of a loop's results do."""
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    return fills_memory(generic_shape(value), generic_stride(value), range(value.dim()))
