"""The orders in which a lowered loop may run the ops of its body (loops/while_loop_step.py).

The last op of a result, unless another op reads it, runs when the result is written to the loop's
buffer, and so do products that go straight into it. Results are written one after the other behind
all other ops; those before the gradients that attention's backward adds up, before it runs.

So it is on a CPU, unless the peak is lower in the graph's own order: Inductor chooses the order of
the lowest peak of several (``reorder_for_peak_memory`` in torch/_inductor/memory.py). Peaks of code
for a GPU are nearer to those of the graph's own order: for a gated MLP compiled for an H100, 48.2
MB scheduled, 51.4 simulated in that order and 53.0 in this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from mstpass.graph.buffer_ops import adding_attention, parts_in_place
from mstpass.graph.joint import tensors_of


def orders_of_body(graph: fx.Graph, results: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The inputs and ops of a body in these orders; for a GPU, in the graph's alone."""
    run = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    if all(tensor.is_cuda for node in results for tensor in tensors_of(node.meta.get("val"))):
        return [run]
    last = {result: _last_ops(result) for result in results}
    left = {node for nodes in last.values() for node in nodes}
    adding: dict[fx.Node, int] = {}  # where the first result stands that attention adds to
    for position, result in enumerate(results):
        if (attention := adding_attention(result)) is not None:
            adding.setdefault(attention, position)
    ordered: dict[fx.Node, None] = {}

    def write_until(end: int) -> None:
        for result in results[:end]:
            ordered.update(dict.fromkeys(n for n in graph.nodes if n in last[result]))

    for node in run:
        if node in left:
            continue
        before = results[: adding.get(node, 0)]
        if all(_is_ready(last[result], ordered) for result in before):
            write_until(len(before))
        ordered[node] = None
    write_until(len(results))
    return [list(ordered), run]


def _last_ops(result: fx.Node) -> list[fx.Node]:
    parts = parts_in_place(result)
    return parts or ([result] if len(result.users) == 1 and result.op == "call_function" else [])


def _is_ready(last: Sequence[fx.Node], ordered: Mapping[fx.Node, None]) -> bool:
    """Whether all that a result's last ops read has run."""
    inside = set(last)
    return all(n in ordered or n in inside for node in last for n in node.all_input_nodes)
