"""The simulated peak of finished graphs for batches of other sizes than those planned for.

The graphs stay what they are: the same values cross, and a loop of symbolic length makes the chunks
of each batch. So the peak is that of the same simulation, with other values of the symbols. Only
the bodies of loops hold plain ints, of one chunk; they are sized anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.graph.builder import Builder
from mstpass.graph.joint import Modules
from mstpass.graph.loop_op import fitted_length, mst_loop, takes_start
from mstpass.graph.sizes import Size, hint, is_static
from mstpass.memory.simulate_graph import simulate_step
from mstpass.plans import PeakAt
from mstpass.torch_internals.batch_sizes import at_sizes, named

_STEPS = 32  # to which a length is found

Sizes = Mapping[sympy.Symbol, int]
Named = tuple[tuple[str, int], ...]  # the values of symbols, by where they come from


@dataclasses.dataclass(frozen=True)
class PeaksByLength:
    """The peaks of one plan.

    Args:
        modules: the forward and the backward graph; they are not changed.
        most: the value of each symbol in the largest batch that the plan is made for.
        batch: their values in the batch that it is made for now.
        scatters_delayed: as of ``simulate_step``.
    """

    modules: Modules
    environment: ShapeEnv
    most: Sizes
    batch: Sizes
    scatters_delayed: bool

    def table(self) -> tuple[PeakAt, ...]:
        """The peaks of the largest batch, of half of it and of a quarter."""
        return tuple(self.peak_at(self._scaled(1 / parts)) for parts in (1, 2, 4))

    def largest_within(self, budget_bytes: int) -> Named:
        """The sizes of the largest batch with a peak of at most this; empty if none is."""
        return self._last_within(budget_bytes, self._scaled)

    def longest_within(self, budget_bytes: int, batch: Sizes) -> Named:
        """The sizes of the longest batch with a peak of at most this; empty if none is.

        Args:
            batch: only its largest size varies, together with those that equal it.
        """
        longest = max(batch.values())

        def shorter(factor: float) -> Sizes:
            length = max(2, int(longest * factor))
            return {s: length if size == longest else size for s, size in batch.items()}

        return self._last_within(budget_bytes, shorter)

    def _last_within(self, budget_bytes: int, sizes_at: Callable[[float], Sizes]) -> Named:
        low, high = 0, _STEPS
        while low < high:  # a longer batch needs no less memory
            step = (low + high + 1) // 2
            if self.peak_at(sizes_at(step / _STEPS)).peak_bytes <= budget_bytes:
                low = step
            else:
                high = step - 1
        return named(self.environment, sizes_at(low / _STEPS)) if low else ()

    def _scaled(self, factor: float) -> Sizes:
        return {symbol: max(2, int(size * factor)) for symbol, size in self.most.items()}

    def peak_at(self, sizes: Sizes) -> PeakAt:
        """The peak for a batch of these sizes."""
        with at_sizes(self.environment, sizes), contextlib.ExitStack() as sized:
            for module in self.modules:
                for loop in module.graph.find_nodes(op="call_function", target=mst_loop):
                    sized.enter_context(_body_sized(loop))
            forward, backward = (module.graph for module in self.modules)
            memory = simulate_step(forward, backward, self.scatters_delayed)
        return PeakAt(named(self.environment, sizes), memory.peak_bytes)


@contextlib.contextmanager
def _body_sized(loop: fx.Node) -> Iterator[None]:
    """The values of a loop's body are those of a chunk of the batch at hand."""
    body: Any = loop.args[0]
    graph: fx.Graph = getattr(loop.graph.owning_module, str(body.target)).graph
    before = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    inputs = _inputs(loop, graph.find_nodes(op="placeholder"))
    try:
        if inputs:
            Builder(graph, loop.meta["val"][0].fake_mode).compute_values(inputs)
        yield
    finally:
        for node, value in before.items():
            node.meta["val"] = value


def _inputs(loop: fx.Node, placeholders: list[fx.Node]) -> dict[fx.Node, torch.Tensor | int]:
    """The inputs of a body for one chunk; none, if they are the same for every batch."""
    args: Any = loop.args
    body, num_chunks, chunk_tokens, _, _, sliced, whole = args
    is_symbolic = num_chunks is None
    builder = Builder(loop.graph, loop.meta["val"][0].fake_mode)
    values: list[torch.Tensor | int] = []
    rows = chunk_tokens
    if is_symbolic:
        total = hint(sliced[0].meta["val"].shape[0])
        rows = min(total, fitted_length(chunk_tokens, total))
        values.append(rows)
    if takes_start(getattr(loop.graph.owning_module, str(body.target))):
        values.append(0)
    for node in sliced:
        value = builder.sized(node.meta["val"], hint)
        assert isinstance(value, torch.Tensor), "the value is a tensor"
        values.append(builder.empty([rows, *value.shape[1:]], value))
    values += [builder.sized(node.meta["val"], hint) for node in whole]
    if all(_is_static(node.meta["val"]) for node in (*sliced, *whole)):
        return {}
    return dict(zip(placeholders, values, strict=False))  # the mask of valid rows stays


def _is_static(value: torch.Tensor | Size) -> bool:
    return is_static(value) if isinstance(value, torch.Tensor) else isinstance(value, int)
