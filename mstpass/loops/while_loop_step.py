"""One iteration of a lowered loop: the functions that loops/lowering.py traces for ``while_loop``.

With c tokens in a chunk, n chunks and N tokens in all::

    cond(i):  i < n

    step(i):  start = min(i c, N - c)                       # the last chunk may overlap
              rows(t) = t[start : start + c]                # as_strided; a copy if t is on the host
              parts = body(*map(rows, sliced), *whole[, valid])
              for each output, in order:
                  stacked: rows(buffer) <- part             # over an input: where valid
                  summed:  buffer += part                   # first chunk: buffer <- part
                  other:   buffer <- combined(buffer, part) # graph/loop_op.py
              return i + 1

A product that nothing else reads is written into its buffer at once (graph/buffer_ops.py).

If N is symbolic, the loop counts rows instead, and the length of a chunk is a size of which
Inductor knows only the bounds, so that nothing is specialized to one batch or one chunk::

    cond(start):  start < N

    step(start):  length = min(fitted_length(c, N), N - start)
                  ... the same on rows start to start + length ...
                  return start + length
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention_rows import add_attend_rows_backward_
from mstpass.graph.buffer_ops import (
    add_product_,
    adding_attention,
    counter,
    is_product,
    is_written_in_place,
    item_position,
    parts_in_place,
)
from mstpass.graph.grouped_products import add_grouped_, grouped_sums
from mstpass.graph.loop_op import (
    SUM,
    OutputSpec,
    combined,
    fitted_length,
    overwritten,
    stacked_dim,
    takes_start,
)
from mstpass.graph.sizes import Size, hint, is_static
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.fake_tensors import set_hint

aten = torch.ops.aten

# counter, its step, first row, length, and the body's arguments before and after its tensors
_Chunk = tuple[Any, Any, Any, Any, tuple[Size, ...], tuple[torch.Tensor, ...]]


def _rows(tensor: torch.Tensor, start: Size, length: Size, dim: int = 0) -> torch.Tensor:
    shape, stride = tensor.shape, tensor.stride()
    size = (*shape[:dim], length, *shape[dim + 1 :])
    return aten.as_strided.default(tensor, size, stride, start * stride[dim])


@dataclasses.dataclass(frozen=True)
class LoopCall:
    """The call of an ``mst_loop``: what a step runs on the rows of one chunk.

    The operands of a step are the buffers, the sliced inputs, the whole inputs and the symbols. A
    sliced input that an output is written over is that output's buffer.

    Attributes:
        on_host: the sliced inputs of which a step copies the rows from the host.
        num_chunks: None for a symbolic N; the counter is then the first row of a chunk, otherwise
            the number of the chunk.
    """

    body: fx.GraphModule
    specs: tuple[OutputSpec, ...]
    num_sliced: int
    num_whole: int
    on_host: tuple[int, ...]
    num_chunks: int | None
    chunk_tokens: int
    num_tokens: Any

    def cond(self, i: torch.Tensor, *operands: torch.Tensor) -> Any:
        """Whether there is one more chunk."""
        fixed = self.num_chunks
        return i.item() < (self._rows_at_hand(operands) if fixed is None else fixed)

    def step(self, i: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The counter and the buffers after a chunk."""
        find = self._fitted_chunk if self.is_fitted else self._fixed_chunk
        counted, by, *chunk = find(i.item(), operands)
        buffers = self._run(operands, *chunk)
        return (counter(counted + by), *buffers)

    @property
    def is_fitted(self) -> bool:
        """Whether the chunks fit the batch at hand, as N is symbolic."""
        return self.num_chunks is None

    def _fixed_chunk(self, number: Any, operands: tuple[torch.Tensor, ...]) -> _Chunk:
        """The chunk of this number, of chunks of one length."""
        count, length = self.num_chunks, self.chunk_tokens
        assert count is not None, "the chunks are of one length"
        aten._assert_scalar.default(number >= 0, "mst_loop: negative chunk number")
        aten._assert_scalar.default(number < count, "mst_loop: chunk number out of range")
        start = number * length
        if count * length == self.num_tokens:
            return number, 1, start, length, (), ()
        last = self.num_tokens - length
        start = torch.sym_min(start, last)
        end = last + number // (count - 1) * length  # the last chunk has all rows
        valid = torch.arange(length, device=operands[0].device) + start < end
        return number, 1, start, length, (), (valid,)

    def _fitted_chunk(self, start: Any, operands: tuple[torch.Tensor, ...]) -> _Chunk:
        """The chunk that begins with this row."""
        tokens, most = self._rows_at_hand(operands), self.chunk_tokens
        aten._assert_scalar.default(start >= 0, "mst_loop: negative row")
        fitted = torch.sym_min(fitted_length(most, tokens), tokens - start)
        # As an item() of a tensor it is a new symbol, from which nothing can be derived. Inductor
        # fuses kernels by the bytes that they share: it has to know about how large it is.
        length: Any = counter(fitted).item()
        set_hint(length, min(hint(tokens), fitted_length(most, hint(tokens))))
        aten._assert_scalar.default(length >= 1, "mst_loop: empty chunk")
        aten._assert_scalar.default(length <= most, "mst_loop: chunk too long")
        return start, length, start, length, (length,), ()

    def _rows_at_hand(self, operands: tuple[torch.Tensor, ...]) -> int:
        return self.sliced(operands)[0].shape[0]

    def _run(
        self,
        operands: tuple[torch.Tensor, ...],
        start: Size,
        length: Size,
        before: tuple[Size, ...],
        after: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Write the chunk's results into the buffers, and return these.

        Args:
            start: the first row of the chunk, which has ``length`` rows; 0 for the first chunk.
            before: what the body gets before the chunks: its length, if that is not fixed.
            after: what it gets after the whole inputs: ``valid``, if chunks overlap.
        """

        num_buffers = len(self.specs)
        buffers = operands[:num_buffers]
        behind = num_buffers + self.num_sliced - len(self.over)
        whole = operands[behind:][: self.num_whole]
        kept = after if self.over else ()  # rows that only their first chunk writes
        first = (start,) if takes_start(self.body) else ()
        env: dict[fx.Node, Any] = {}
        results = self._results(env)
        written = 0  # of the outputs, in their order

        def write_until(end: int) -> None:
            nonlocal written
            for position in range(written, end):
                (kind, _, _), buffer = self.specs[position], buffers[position]
                result, dim = results[position], stacked_dim(kind)
                if dim is not None:
                    result.write_to(_rows(buffer, start, length, dim), dim, *kept)
                elif kind == SUM:
                    result.add_to(buffer, start)
                else:
                    buffer.copy_(new[position])
            written = max(written, end)

        attention = self._adding_attention()
        chunks = self._chunks(operands, start, length)
        for node in self._ops((*before, *first, *chunks, *whole, *after), env, results):
            positions = attention.get(node, [])
            if positions and all(result.is_ready for result in results[: min(positions)]):
                write_until(min(positions))  # what they read is freed before attention runs
                arguments = fx.map_arg(node.args, env.__getitem__)
                totals = (buffers[position] for position in positions)
                env[node] = (add_attend_rows_backward_(*totals, *arguments),)
                for position in positions:
                    results[position].is_added = True
            else:
                env[node] = _call(node, env)
        new = self._combined(buffers, results)  # before the maxima that they read are written
        write_until(num_buffers)
        return buffers

    def _chunks(
        self, operands: tuple[torch.Tensor, ...], start: Size, length: Size
    ) -> Iterator[torch.Tensor]:
        """The rows of a chunk of each sliced input."""
        device = operands[0].device  # of a buffer
        for number, tensor in enumerate(self.sliced(operands)):
            if number in self.on_host:
                yield host_copy_ops.COPY_ROWS(tensor, start, length, device)
            else:
                yield _rows(tensor, start, length)

    @property
    def over(self) -> dict[int, int]:
        """The sliced inputs that outputs are written over, with the positions of these."""
        found = {overwritten(kind): position for position, (kind, _, _) in enumerate(self.specs)}
        return {number: position for number, position in found.items() if number is not None}

    @property
    def outputs(self) -> Any:
        """What the body returns."""
        return self.body.graph.output_node().args[0]

    def sliced(self, operands: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The sliced inputs among the operands."""
        others = iter(operands[len(self.specs) :])
        return [
            operands[self.over[number]] if number in self.over else next(others)
            for number in range(self.num_sliced)
        ]

    def _results(self, env: dict[fx.Node, Any]) -> list[_Result]:
        """The outputs of the body, whose values are in ``env`` once it has run."""
        dims = [stacked_dim(kind) for kind, _, _ in self.specs]
        # Rows that are written over, or not all written, are no place for the parts of a result.
        return [
            _Result(n, [] if self.over and d is not None else _parts_in_place(n, d), env)
            for n, d in zip(self.outputs, dims, strict=True)
        ]

    def _ops(
        self,
        inputs: tuple[torch.Tensor | Size, ...],
        env: dict[fx.Node, Any],
        results: list[_Result],
    ) -> Iterator[fx.Node]:
        """The ops of the body that are to run, but for what goes straight into the loop's buffers.

        The last op of an output, unless another op reads it, runs when the output is written.
        """
        left = {part for result in results for part in result.parts}
        left |= {result.node for result in results if len(result.node.users) == 1}
        remaining = iter(inputs)
        for node in self.body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "get_attr":
                env[node] = getattr(self.body, str(node.target))
            elif node.op == "call_function" and node not in left:
                yield node

    def _adding_attention(self) -> dict[fx.Node, list[int]]:
        """Of each backward of attention that adds results to their buffers, their positions.

        These are those of the gradients of the keys and of the values.
        """
        if any(kind != SUM and stacked_dim(kind) is None for kind, _, _ in self.specs):
            return {}
        found: dict[fx.Node, list[int]] = {}
        for node in sorted(filter(adding_attention, self.outputs), key=item_position):
            found.setdefault(adding_attention(node), []).append(self.outputs.index(node))  # type: ignore[arg-type]
        return found

    def _combined(
        self, buffers: tuple[torch.Tensor, ...], results: list[_Result]
    ) -> dict[int, torch.Tensor]:
        """The new values of the outputs that are neither stacked nor plain sums."""
        kinds = {
            n: kind
            for n, (kind, _, _) in enumerate(self.specs)
            if kind != SUM and stacked_dim(kind) is None
        }
        if not kinds:
            return {}
        parts = [result.value() if n in kinds else None for n, result in enumerate(results)]
        return {n: combined(kind, n, buffers, parts) for n, kind in kinds.items()}  # type: ignore[arg-type]

    def starts_empty(self, position: int) -> bool:
        """Whether an output's buffer may hold anything, because the first chunk overwrites it.

        A batch of any length may have no tokens, and no chunk.
        """
        kind = self.specs[position][0]
        if kind != SUM:
            return stacked_dim(kind) is not None
        return not self.is_fitted and is_written_in_place(self.outputs[position])


class _Result:
    """An output of the body, whose last op has not run, nor what goes straight into the buffer."""

    def __init__(self, node: fx.Node, parts: list[fx.Node], env: dict[fx.Node, Any]):
        self.node, self.parts, self.env = node, parts, env
        self.is_added = False  # what computed it has added it to its buffer

    @property
    def is_ready(self) -> bool:
        """Whether all that it is computed from has run."""
        inside = {self.node, *self.parts}
        return self.node in self.env or all(
            operand in self.env or operand in inside
            for node in inside
            for operand in node.all_input_nodes
        )

    def value(self) -> torch.Tensor:
        if self.node not in self.env:
            self.env[self.node] = _call(self.node, self.env)
        result: torch.Tensor = self.env[self.node]
        return result

    def write_to(self, rows: torch.Tensor, dim: int, *where: torch.Tensor) -> None:
        """Write a stacked output into its rows of the buffer, those in ``dim``.

        Args:
            where: which rows are written, if not all are.
        """
        for valid in where:
            shape = [1] * dim + [-1] + [1] * (rows.dim() - dim - 1)
            rows.copy_(torch.where(valid.view(shape), self.value(), rows))
            return
        if not self._add_products(rows, 0):
            rows.copy_(self.value())

    def add_to(self, buffer: torch.Tensor, start: Size) -> None:
        """Add a summed output to its buffer, into which the chunk at 0 writes it."""
        if not self.is_added and not self._add_products(buffer, start):
            buffer.add_(self.value())

    def _add_products(self, buffer: torch.Tensor, start: Size) -> bool:
        """Add the products that go straight into the buffer, if any; at 0 the first is written."""
        products = [] if self.node in self.env else list(filter(is_product, self.parts))
        for product in products:
            is_grouped = product.target is grouped_sums
            operands: Any = fx.map_arg(product.args[: 4 if is_grouped else 2], self.env.__getitem__)
            if is_grouped:
                add_grouped_(buffer, *operands, start)
            else:
                add_product_(_like_product(buffer, *operands), *operands, start)
            start = 1
        return bool(products)


def _like_product(buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The buffer in the shape of a product that is added to it."""
    if buffer.dim() == left.dim():
        return buffer
    return aten.view.default(buffer, [*left.shape[:-1], right.shape[-1]])


def _parts_in_place(result: fx.Node, dim: int | None) -> list[fx.Node]:
    """The nodes that run when a result is written; it is stacked along ``dim``, if at all.

    A chunk's rows in a later dim are apart from each other, so that they have no other view.
    """
    parts = parts_in_place(result)
    return [] if dim and any(map(ops.is_view_by_shape, parts)) else parts


def _call(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    """What a node of a body computes.

    On the CPU, Inductor asks of a ``bmm`` whether a matrix has one row, which fails for a length
    that only the running program knows (``is_preferred_layout_as_bmm_input`` in
    torch/_inductor/kernel/bmm.py). It does not ask of ``baddbmm``.
    """
    mapped: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    args, kwargs = mapped
    if node.target is aten.bmm.default:
        left, right = args
        if left.device.type == "cpu" and not (is_static(left) and is_static(right)):
            return aten.baddbmm.default(left.new_zeros([1, 1, 1]), left, right, beta=0)
    return node.target(*args, **kwargs)  # type: ignore[operator]
