"""Lower ``mst_loop`` to Inductor's ``while_loop`` with carries updated in place.

    i, *buffers = while_loop(i < num_chunks, step, (0, *buffers), (*sliced, *whole))

    step(i): rows = chunk i of every sliced input          # as_strided, no copy
             parts = body(*rows, *whole)
             a stacked buffer's rows <- part               # copy_
             a summed buffer        += part                # addmm_ where the part is a product

Where the token count N is symbolic, the loop counts rows instead, and a chunk's length is a size
that Inductor knows nothing of but its bounds: nothing can be specialized to a batch or to a chunk.

    start, *buffers = while_loop(start < N, step, (0, *buffers), (*sliced, *whole, *symbols))

    step(start): length = min(fitted_length, N - start), ...; return start + length

In place, the loop needs no second copy of an accumulator: measured at 0.97-1.02 times the time of
the unchunked graph against 1.21 for the functional form.

Inductor 2.11-2.14 pairs mutated carries with outputs in the order of their first write
(``torch/_inductor/ir.py``, ``WhileLoop.create``): ``step`` writes them in the order of their
positions. Equal buffers must not be merged by CSE: this runs after the last one, as Inductor's
``post_grad_custom_post_pass``.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.loop_op import STACK, OutputSpec, fitted_length, mst_loop
from mstpass.graph.sizes import Size, expression, is_size, symbols_of
from mstpass.torch_internals.lowerings import call_as_it_is, select_decomp_table

aten = torch.ops.aten

_CALLED_AS_THEY_ARE = (aten.addmm_.default, aten.abs_.default)


def lower_loops(graph: fx.Graph) -> int:
    """Lower every ``mst_loop`` of the graph in place. Returns how many there were."""
    calls = graph.find_nodes(op="call_function", target=mst_loop)
    if not calls:
        return 0
    for op in _CALLED_AS_THEY_ARE:
        call_as_it_is(op)
    lowering = _Lowering(graph)
    for call in calls:
        lowering.lower(call)
    graph.eliminate_dead_code()
    graph.lint()
    return len(calls)


class _Lowering:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.root = graph.owning_module
        self.traced: dict[Any, tuple[str, str]] = {}
        mode = fake_mode_of(graph.nodes)
        # For the steps' i.item(); Inductor's own passes over them need it too, so it stays on.
        mode.allow_scalar_outputs = True
        self.builder = Builder(graph, mode)

    def lower(self, call: fx.Node) -> None:
        args: Any = call.args
        body, *sizes, specs, sliced, whole = args
        with self.graph.inserting_before(call):
            sliced = tuple(map(self._at_offset_zero, sliced))
            call.args = (body, *sizes, specs, sliced, whole)
            buffers = [self._buffer(spec, call) for spec in specs]
            zero = self.builder.call(
                aten.full.default, [], 0, dtype=torch.int64, device=torch.device("cpu")
            )
            extra = (*sliced, *whole, *self._symbols((*buffers, *sliced, *whole)))
            names = self._subgraphs(call, (zero, *buffers, *extra))
            cond, step = (self.graph.get_attr(name) for name in names)
            loop = self.graph.call_function(
                torch.ops.higher_order.while_loop, (cond, step, (zero, *buffers), extra)
            )
            loop.meta["val"] = (zero.meta["val"], *(b.meta["val"] for b in buffers))
            self._let_go(loop)
        for user in list(call.users):
            with self.graph.inserting_before(user):
                item = self.graph.call_function(user.target, (loop, user.args[1] + 1))  # type: ignore[operator, arg-type]
            item.meta = dict(user.meta)
            user.replace_all_uses_with(item)
            self.graph.erase_node(user)
        self.graph.erase_node(call)

    def _let_go(self, loop: fx.Node) -> None:
        """Have Inductor drop the loop's list of results once the loop is done.

        Its code holds them in a list that is only deleted behind the last reader of an output that
        is not updated in place. Nobody reads the counter, and the buffers would stay alive to the
        end of the graph (2.11 and 2.13). ``abs_`` reads it: an op in place, which Inductor keeps.
        """
        counter = self.graph.call_function(operator.getitem, (loop, 0))
        counter.meta["val"] = loop.meta["val"][0]
        read = self.graph.call_function(aten.abs_.default, (counter,))
        read.meta["val"] = counter.meta["val"]

    def _at_offset_zero(self, node: fx.Node) -> fx.Node:
        """A copy of a value that starts inside its storage, such as shifted labels.

        Inductor 2.13 counts an ``as_strided`` offset of a subgraph's input from the start of the
        storage, 2.11 from the start of the input: at offset zero both are the same.
        """
        if expression(node.meta["val"].storage_offset()) == 0:
            return node
        return self.builder.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _buffer(self, spec: OutputSpec, call: fx.Node) -> fx.Node:
        kind, shape, dtype = spec
        device = call.meta["val"][0].device
        if kind == STACK:
            return self.builder.call(
                aten.empty.memory_format, list(shape), dtype=dtype, device=device
            )
        return self.builder.call(aten.full.default, list(shape), 0, dtype=dtype, device=device)

    def _symbols(self, operands: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes that hold the symbols of the operands' layouts; a subgraph needs them bound."""
        symbols = {symbol for n in operands for symbol in symbols_of(n.meta["val"])}
        # Symbols found equal have a node each, which Inductor keeps apart: all of them.
        inputs = self.graph.find_nodes(op="placeholder")
        return [n for n in inputs if is_size(n) and expression(n.meta["val"]) in symbols]

    def _subgraphs(self, call: fx.Node, operands: Sequence[fx.Node]) -> tuple[str, str]:
        """Names of the condition and the step; calls alike share them and compile once."""
        args: Any = call.args
        body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole = args
        values = [n.meta["val"] for n in operands]
        layouts = tuple(map(_layout, values))
        sizes = (num_chunks, chunk_tokens, str(num_tokens))
        key = (body.target, *sizes, tuple(specs), layouts)
        if key not in self.traced:
            body = getattr(self.root, body.target)
            loop = _Call(body, tuple(specs), len(sliced), len(whole))
            if num_chunks is None:
                cond, step = _fitted(loop, chunk_tokens)
            else:
                cond, step = _fixed(loop, num_chunks, chunk_tokens, num_tokens)
            table = select_decomp_table()
            with self.builder.mode:
                traced = [
                    # A counter of its own: a fake tensor remembers the symbol of its item().
                    make_fx(fn, decomposition_table=table)(
                        torch.empty([], dtype=torch.int64), *values[1:]
                    )
                    for fn in (cond, step)
                ]
            number = len(self.traced)
            names = (f"mst_cond_{number}", f"mst_step_{number}")
            for name, module in zip(names, traced, strict=True):
                setattr(self.root, name, module)
            self.traced[key] = names
        return self.traced[key]


def _layout(value: torch.Tensor | Size) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, str(value.shape), str(value.stride()), value.device
    return str(value)


Step = Callable[..., tuple[torch.Tensor, ...]]
Cond = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a step runs on one chunk, however its rows are found."""

    body: fx.GraphModule
    specs: tuple[OutputSpec, ...]
    num_sliced: int
    num_whole: int

    def run(
        self,
        operands: tuple[torch.Tensor, ...],
        start: Size,
        length: Size,
        before: tuple[Size, ...] = (),
        after: tuple[torch.Tensor, ...] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Write the chunk's results into the buffers, which come first among the operands."""

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            size, stride = (length, *tensor.shape[1:]), tensor.stride()
            return aten.as_strided.default(tensor, size, stride, start * stride[0])

        num_buffers = len(self.specs)
        buffers, inputs = operands[:num_buffers], operands[num_buffers:]
        sliced, whole = inputs[: self.num_sliced], inputs[self.num_sliced :][: self.num_whole]
        values = _run(self.body, (*before, *map(rows, sliced), *whole, *after))
        for (kind, _, _), buffer, value in zip(self.specs, buffers, values, strict=True):
            if kind == STACK:
                rows(buffer).copy_(value())
            else:
                value.add_to(buffer)
        return buffers


def _fixed(call: _Call, num_chunks: int, chunk_tokens: int, num_tokens: int) -> tuple[Cond, Step]:
    """Chunks of one length, counted; the last overlaps the one before it."""
    ragged = num_chunks * chunk_tokens != num_tokens

    def cond(i: torch.Tensor, *operands: torch.Tensor) -> Any:
        return i.item() < num_chunks

    def step(i: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = i.item()
        aten._assert_scalar.default(number >= 0, "mst_loop: negative chunk number")
        aten._assert_scalar.default(number < num_chunks, "mst_loop: chunk number out of range")
        first = number * chunk_tokens
        start: Any = torch.sym_min(first, num_tokens - chunk_tokens) if ragged else first
        valid: tuple[torch.Tensor, ...] = ()
        if ragged:
            device = operands[0].device
            valid = (torch.arange(chunk_tokens, device=device) + start >= first,)
        buffers = call.run(operands, start, chunk_tokens, after=valid)
        return (i + 1, *buffers)

    return cond, step


def _fitted(call: _Call, chunk_tokens: int) -> tuple[Cond, Step]:
    """Chunks that fit the tokens at hand; the counter is a chunk's first row."""

    def num_tokens(operands: tuple[torch.Tensor, ...]) -> int:
        return operands[len(call.specs)].shape[0]  # of the first sliced input

    def cond(i: torch.Tensor, *operands: torch.Tensor) -> Any:
        return i.item() < num_tokens(operands)

    def step(i: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start: Any = i.item()
        tokens = num_tokens(operands)
        aten._assert_scalar.default(start >= 0, "mst_loop: negative row")
        fitted = torch.sym_min(fitted_length(chunk_tokens, tokens), tokens - start)
        # By way of a tensor it becomes a symbol of its own, which nothing can be derived from.
        length: Any = torch.full([], fitted, dtype=torch.int64, device="cpu").item()
        aten._assert_scalar.default(length >= 1, "mst_loop: empty chunk")
        aten._assert_scalar.default(length <= chunk_tokens, "mst_loop: chunk too long")
        buffers = call.run(operands, start, length, before=(length,))
        return (i + length, *buffers)

    return cond, step


class _Result:
    """A body's output whose last op is not run yet: a product can then be summed in place."""

    def __init__(self, node: fx.Node, env: dict[fx.Node, Any]):
        self.node, self.env = node, env

    def __call__(self) -> torch.Tensor:
        if self.node not in self.env:
            args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), self.env.__getitem__)
            self.env[self.node] = self.node.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = self.env[self.node]
        return result

    def add_to(self, buffer: torch.Tensor) -> None:
        value = self.node.meta["val"]
        if (
            self.node.target is aten.mm.default
            and value.dtype == buffer.dtype
            and self.node not in self.env
        ):
            left, right = fx.map_arg(self.node.args, self.env.__getitem__)
            aten.addmm_.default(buffer, left, right)
        else:
            buffer.add_(self())


def _run(body: fx.GraphModule, inputs: tuple[torch.Tensor | Size, ...]) -> list[_Result]:
    """Run all of a body but the last op of each output that nothing else reads."""
    outputs = body.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    env: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "call_function" and not (node in outputs and len(node.users) == 1):
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    return [_Result(node, env) for node in outputs]  # type: ignore[arg-type]
