"""Lower ``mst_loop`` to Inductor's ``while_loop``, with accumulators that are updated in place.

    buffers = empty for each output that the first chunk writes, zeros for each other sum, and for
              all sums if the loop may have no chunk; -inf for maxima; for outputs that are written
              over a sliced input that one, or a copy of it if something else reads it
    i, *buffers = while_loop(cond, step, (0, *buffers), (*sliced, *whole, *symbols))

``cond`` and ``step`` are the graphs of loops/while_loop_step.py. ``symbols`` are the inputs that
hold symbolic sizes of the operands, because a subgraph sees nothing that it is not given. The
buffers are carried and written in place, so the loop needs no second copy of an accumulator:
measured at 0.97-1.02 times the time of the unchunked graph, against 1.21 for the functional form.

Two facts about Inductor that this file depends on:

- Older versions pair the carries that a step writes with the loop's outputs in the order of their
  first write (``torch/_inductor/ir.py``, ``WhileLoop.create``), so the step writes them in the
  order of their positions.
- CSE would merge the equal initial buffers of two loops. This rewrite runs after the last CSE, as
  Inductor's ``post_grad_custom_post_pass``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph import ops
from mstpass.graph.buffer_ops import call_buffer_ops_as_they_are, counter, done
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.grouped_products import GROUPED_OPS
from mstpass.graph.joint import value_of
from mstpass.graph.loop_op import (
    CONDITION,
    OutputSpec,
    initial,
    is_last_reader,
    is_rows_on_host,
    mst_loop,
    overwritten,
    rows_on_host,
)
from mstpass.graph.own_ops import REALIZE
from mstpass.graph.sizes import expression, is_size, symbols_of
from mstpass.loops.operand_layout import layout_of
from mstpass.loops.while_loop_step import LoopCall
from mstpass.torch_internals.fake_tensors import first_expression, renamed
from mstpass.torch_internals.inductor import select_decomp_table, write_to_memory

aten = torch.ops.aten
# Ops that Inductor may run in place on their first argument (_inductor/fx_passes/reinplace.py)
_RUN_IN_PLACE = (aten.index_put.default, aten._unsafe_index_put.default)


def lower_loops(graph: fx.Graph) -> int:
    """Lower every ``mst_loop`` of the graph in place. Returns how many there were."""
    calls = graph.find_nodes(op="call_function", target=mst_loop)
    if calls or any(graph.find_nodes(op="call_function", target=op) for op in GROUPED_OPS):
        call_buffer_ops_as_they_are()
    if not calls:
        return 0
    lowering = _Lowering(graph)
    for call in calls:
        lowering.lower(call)
    graph.eliminate_dead_code()
    graph.lint()
    return len(calls)


class _Lowering:
    """Lowers the loops of one graph; loops that are alike share the traced condition and step."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.root = graph.owning_module
        self.traced: dict[Any, tuple[str, str]] = {}
        mode = fake_mode_of(graph.nodes)
        # Steps call i.item(). Inductor's own passes over them need this too, so it stays on.
        mode.allow_scalar_outputs = True
        self.builder = Builder(graph, mode)

    def lower(self, call: fx.Node) -> None:
        args: Any = call.args
        body, *sizes, specs, sliced, whole = args
        on_host = tuple(n for n, node in enumerate(sliced) if rows_on_host(node))
        loop_call = LoopCall(
            getattr(self.root, body.target), tuple(specs), len(sliced), len(whole), on_host, *sizes
        )
        with self.graph.inserting_before(call):
            sliced = tuple(
                self._on_host(node)
                if n in on_host
                else self._written(
                    self._at_offset_zero(node, call if n in loop_call.over else None)
                )
                for n, node in enumerate(sliced)
            )
            whole = tuple(map(self._written, whole))
            call.args = (body, *sizes, specs, sliced, whole)
            device = call.meta["val"][0].device
            # Before the buffers: on the CPU, Inductor writes out the kernels so far where a call
            # stands. What these read is freed then, and the buffers are allocated after that.
            zero = self.builder.call(counter, 0)
            buffers = [
                self._buffer(spec, device, loop_call.starts_empty(position))
                if (n := overwritten(spec[0])) is None
                else sliced[n]
                for position, spec in enumerate(specs)
            ]
            sliced = tuple(node for n, node in enumerate(sliced) if n not in loop_call.over)
            extra = (*sliced, *whole, *self._symbols((*buffers, *sliced, *whole)))
            names = self._subgraphs(call, loop_call, (zero, *buffers, *extra))
            cond, step = (self.graph.get_attr(name) for name in names)
            loop = self.graph.call_function(
                torch.ops.higher_order.while_loop, (cond, step, (zero, *buffers), extra)
            )
            loop.meta["val"] = (zero.meta["val"], *call.meta["val"])  # as its items have them
            self._read_counter_after(loop)
        for user in list(call.users):
            user.args = (loop, user.args[1] + 1)  # type: ignore[operator]
            self._copy_before_writes(user)
        self.graph.erase_node(call)

    def _read_counter_after(self, loop: fx.Node) -> None:
        """Read the loop's counter once the loop is done, for two reasons.

        Inductor's code holds all results in a list, and deletes it after the last reader of a
        result that is not updated in place. The counter is the only one, and nothing else reads
        it: all buffers would stay alive to the end of the graph. And what waits for
        the loop (schedule/delay_recomputation.py) waits for this reader, because the results have
        the names of the buffers that the loop was given. Inductor does not remove an ``abs_``, as
        it works in place, nor what it works on.
        """
        counter = self.graph.call_function(operator.getitem, (loop, 0))
        counter.meta["val"] = loop.meta["val"][0]
        self.builder.call(aten.abs_.default, self.builder.call(done, counter))

    def _copy_before_writes(self, item: fx.Node) -> None:
        """Copy a result of the loop for the ops that Inductor may run in place on it.

        Where Inductor runs one of them in place, it gives the result's buffer the data of another
        one (``mutate_to`` in torch/_inductor/lowering.py). The loop has that buffer
        as its operand, so that it would read what is computed from its own results.
        """
        for reader in ops.readers_through_views(item):
            if reader.target in _RUN_IN_PLACE:
                written = reader.args[0]
                assert isinstance(written, fx.Node), "what is written is a node"
                if ops.base_of(written) is ops.base_of(item):
                    with self.graph.inserting_before(reader):
                        copy = self.builder.call(aten.clone.default, written)
                    reader.args = (copy, *reader.args[1:])

    def _on_host(self, node: fx.Node) -> fx.Node:
        """The value on the host of which the node is the one on the device, or a view."""
        views = []
        while not is_rows_on_host(node):
            views.append(node)
            node = node.all_input_nodes[0]
        found = node.all_input_nodes[0]
        for view in reversed(views):
            found = self.builder.call(view.target, found, *view.args[1:], **view.kwargs)
        return found

    def _at_offset_zero(self, node: fx.Node, writer: fx.Node | None) -> fx.Node:
        """The value; a copy if it starts inside its storage, as shifted labels do.

        Inductor counts the offset of ``as_strided`` on a subgraph's input from the start of the
        storage, in old versions from the start of the input. At offset zero both agree.

        Args:
            writer: a loop that writes over it, and has a copy unless it is the last to read it.
        """
        is_free = writer is None or is_last_reader(writer, node)
        if is_free and expression(node.meta["val"].storage_offset()) == 0:
            return node
        contiguous = torch.contiguous_format
        return self.builder.call(aten.clone.default, node, memory_format=contiguous)

    def _written(self, node: fx.Node) -> fx.Node:
        """The operand, written to memory before the loop's buffers are allocated.

        Inductor computes a pointwise operand only once it comes to the loop. What the kernel reads
        would then be alive beside the buffers.
        """
        if not ops.is_pointwise(ops.base_of(node)):
            return node
        write_to_memory(REALIZE)
        written = self.graph.call_function(REALIZE, (node,))
        written.meta = dict(node.meta)
        return written

    def _buffer(self, spec: OutputSpec, device: torch.device, is_empty: bool) -> fx.Node:
        """What an output is written into; it holds nothing if the first chunk overwrites it."""
        kind, shape, dtype = spec
        of_value: dict[str, Any] = {"dtype": dtype, "device": device}
        if is_empty:
            return self.builder.call(aten.empty.memory_format, list(shape), **of_value)
        first = initial(kind, dtype)
        return self.builder.call(aten.full.default, list(shape), first, **of_value)

    def _symbols(self, operands: Sequence[fx.Node]) -> list[fx.Node]:
        """Nodes that hold the symbols in the operands' sizes and strides.

        A symbol is an input of the graph, or else the size of one, or of an operand. Two symbols
        may have turned out equal. Inductor keeps their nodes apart, and knows each by its own name.
        """
        symbols = {symbol for n in operands for symbol in symbols_of(n.meta["val"])}
        inputs = self.graph.find_nodes(op="placeholder")
        found = [n for n in inputs if is_size(n) and expression(n.meta["val"]) in symbols]
        symbols -= {first_expression(n.meta["val"]) for n in found}
        tensors = [node for node in (*inputs, *operands) if value_of(node) is not None]
        for node, dim in ((n, dim) for n in tensors for dim in range(n.meta["val"].dim())):
            size = expression(node.meta["val"].shape[dim])
            if size in symbols:
                symbols.remove(size)
                held = self.builder.call(aten.sym_size.int, node, dim)
                held.meta["val"] = renamed(held.meta["val"])
                found.append(held)
        return found

    def _subgraphs(
        self, call: fx.Node, loop: LoopCall, operands: Sequence[fx.Node]
    ) -> tuple[str, str]:
        """The names of the condition and the step; equal ones are traced and compiled once."""
        args: Any = call.args
        values = [n.meta["val"] for n in operands]
        layouts = tuple(map(layout_of, values))
        sizes = (loop.num_chunks, loop.chunk_tokens, str(loop.num_tokens))
        key = (args[0].target, *sizes, loop.specs, layouts, loop.on_host)
        if key not in self.traced:
            table = select_decomp_table()
            with self.builder.mode:
                traced = [
                    # Each has a counter of its own: a fake tensor remembers its item()'s symbol.
                    make_fx(fn, decomposition_table=table)(
                        torch.empty([], dtype=torch.int64), *values[1:]
                    )
                    for fn in (loop.cond, loop.step)
                ]
            number = len(self.traced)
            names = (f"{CONDITION}{number}", f"mst_step_{number}")
            for name, module in zip(names, traced, strict=True):
                setattr(self.root, name, module)
            self.traced[key] = names
        return self.traced[key]
