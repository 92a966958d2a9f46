"""Take returned logits out of a graph, and put placeholders into what the compiled graph returns.

Dynamo does not look at what a backend's function returns: it unpacks the results and hands them to
the user's code. So a graph may be compiled without some of its outputs, and the function around it
puts something else in their places. AOTAutograd then never sees the logits as an output: there is
no gradient of them, and nothing keeps them.

An output is dropped only if the caller of the compiled function is all that can read it. It stays
if the graph ends at a graph break, or if another graph of DDP's buckets reads it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from mstpass.byte_sizes import bytes_text
from mstpass.graph.advice import LOGITS_AS_MADE, NO_DDP_SPLITS, ONE_GRAPH
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import Size, expression, hint, hint_numel
from mstpass.options import Options
from mstpass.plans import Outcome, Rejection
from mstpass.returned_logits.find_logits import find_logits, returned, value_of
from mstpass.returned_logits.placeholder import DroppedLogits
from mstpass.torch_internals.batch_sizes import symbols_among
from mstpass.torch_internals.collectives import bucket_being_compiled
from mstpass.torch_internals.dynamo import graph_break_after

_AFTER_BREAK = "the graph ends at a graph break, and the code behind it may read the logits"
_IN_OTHER_BUCKET = "another of the graphs that DDP splits this one into reads the logits"
_BY_DATA = "the size of the logits depends on data"
_ADVICE = {_AFTER_BREAK: ONE_GRAPH, _BY_DATA: ONE_GRAPH, _IN_OTHER_BUCKET: NO_DDP_SPLITS}

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class DroppedOutput:
    """An output that the graph no longer has: what the placeholder in its place looks like."""

    position: int
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    note: str


@dataclasses.dataclass(frozen=True)
class Drop:
    """What ``drop_logits`` did to a graph.

    Attributes:
        outputs: what it took out, by position.
        symbols: the positions of symbolic sizes among the graph's inputs.
    """

    outputs: tuple[DroppedOutput, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    symbols: Mapping[sympy.Symbol, int] = dataclasses.field(default_factory=dict)

    def added_to(self, outcome: Outcome) -> dict[str, Any]:
        """The notes and rejections of the graph that is left, with those of its logits."""
        notes = dict.fromkeys(output.note for output in self.outputs)
        return {
            "notes": (*outcome.notes, *notes),
            "rejections": (*outcome.rejections, *self.rejections),
        }

    @property
    def salt(self) -> str:
        """Tells the reports of equal graphs apart from which other logits were dropped."""
        return repr((self.outputs, self.rejections)) if self.outputs or self.rejections else ""

    def finish(self, compiled: Compiled) -> Compiled:
        """The compiled graph, with placeholders among its results."""
        if not self.outputs:
            return compiled

        def run(*args: Any) -> tuple[Any, ...]:
            results = list(compiled(*args))
            for output in self.outputs:  # by position, so that each finds its place
                results.insert(output.position, self._placeholder(output, args))
            return tuple(results)

        return run

    def _placeholder(self, output: DroppedOutput, args: Sequence[Any]) -> DroppedLogits:
        shape = [self._size(size, args) for size in output.shape]
        return DroppedLogits(shape, output.dtype, output.device)

    def _size(self, size: Size, args: Sequence[Any]) -> int:
        if isinstance(size, int):
            return size
        expr = expression(size)
        # still symbolic where DDP runs a bucket on fake tensors
        values = {s: sympy.Integer(hint(args[self.symbols[s]])) for s in expr.free_symbols}
        return int(expr.xreplace(values))


def drop_logits(gm: fx.GraphModule, options: Options) -> Drop:
    """Under ``logits="drop"``, take logits beside their loss out of what the graph returns.

    ``gm`` is changed in place, as backends may do.
    """
    if options.logits != "drop":
        return Drop()
    inputs = gm.graph.find_nodes(op="placeholder")
    symbols = symbols_among([node.meta.get("example_value") for node in inputs])
    nodes: list[fx.Node] = []
    rejections: list[Rejection] = []
    for node, unknown in find_logits(gm).items():
        if refusal := unknown or _refusal(gm, node, symbols.keys()):
            rejections.append(_rejection(node, refusal))
        else:
            nodes.append(node)
    outputs = _take_out(gm, nodes) if nodes else ()
    return Drop(outputs, tuple(rejections), symbols)


def _refusal(gm: fx.GraphModule, logits: fx.Node, known: Any) -> str:
    """Why logits beside their loss stay; empty if they can be dropped."""
    value = value_of(logits)
    assert value is not None, "the op gives one tensor"
    if not all(expression(size).free_symbols <= set(known) for size in value.shape):
        return _BY_DATA
    bucket = bucket_being_compiled()
    if bucket is not None:
        call, whole = bucket
        places = [i for i, item in enumerate(returned(gm)) if item is logits]
        if not _only_returned(call, places):
            return _IN_OTHER_BUCKET
        gm = whole
    return _AFTER_BREAK if graph_break_after(gm) is not None else ""


def _only_returned(call: fx.Node, positions: Sequence[int]) -> bool:
    """Whether these results of a bucket go nowhere but to the results of the whole graph."""
    for user in call.users:
        if user.target is not operator.getitem:
            return False
        if user.args[1] in positions and any(reader.op != "output" for reader in user.users):
            return False
    return True


def _take_out(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[DroppedOutput, ...]:
    places = [(i, item) for i, item in enumerate(returned(gm)) if item in nodes]
    dropped = [_dropped(position, item) for position, item in places]
    kept = tuple(item for item in returned(gm) if item not in nodes)
    gm.graph.output_node().args = (kept,)
    gm.recompile()
    return tuple(dropped)


def _dropped(position: int, node: fx.Node) -> DroppedOutput:
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    shape, size_bytes = tuple(value.shape), hint_numel(value) * value.element_size()
    note = (
        f"logits='drop': the step returns a placeholder for {node.name} "
        f"[{', '.join(map(str, shape))}], {bytes_text(size_bytes)}; "
        "reading it raises DroppedLogitsError"
    )
    return DroppedOutput(position, shape, value.dtype, value.device, note)


def _rejection(node: fx.Node, reason: str) -> Rejection:
    value = value_of(node)
    size_bytes = hint_numel(value) * value.element_size() if value is not None else 0
    advice = _ADVICE.get(reason, LOGITS_AS_MADE)
    reason = advice(f"logits='drop' keeps the logits that the step returns: {reason}")
    return Rejection("logits", node.name, reason, source_of(node), size_bytes)
