"""The rows of `mstpass plan` that run in eager mode: steps on fake tensors.

The search for the longest sequence extrapolates the peak from copies of the model with one and with
two layers: where each further layer adds the same bytes, that is the peak of the whole model. The
whole step runs at the length that is found. If its peak is another one (layers differ, or the peak
lies elsewhere in the whole step), whole steps search again from there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from mstpass.planner.eager_recipes import (
    HEAD_TILES,
    TILE_TOKENS,
    checkpointed,
    minisequence,
    plain,
)
from mstpass.planner.eager_step import EagerStep, Recipe, eager_step
from mstpass.planner.longest_sequence import START, longest
from mstpass.planner.models import config_of, layer_count
from mstpass.planner.progress import Report, Steps
from mstpass.planner.request import CACHING, Request
from mstpass.planner.result import CHECKPOINT, EAGER, RECIPE, Row
from mstpass.planner.room import Room, traceable
from mstpass.tracing.devices import traced_for

_KEEPS = {
    EAGER: "keeps what autograd saves",
    CHECKPOINT: "keeps each layer's input; backward recomputes one layer at a time",
    RECIPE: f"keeps each layer's input; MLPs in tiles of {TILE_TOKENS} tokens, head and loss in "
    f"{HEAD_TILES} tiles",
}
_DEEP = 6  # layers from which on shallow copies take less time than the whole model
_EXPECTED = 6  # steps of a search


def eager_rows(room: Room, report: Report) -> tuple[Row, ...]:
    """The rows of `ways`, one after the other."""
    with traced_for(None, room.request.gpu):
        config = config_of(room.request.model)
        return tuple(
            _Search(room, config, recipe, Steps(report, name, _EXPECTED)).row(name)
            for name, recipe in ways(room.request).items()
        )


def ways(request: Request) -> Mapping[str, Recipe]:
    """The ways to train in eager mode."""
    loss: dict[str, Any] = {"logits": request.logits, "outputs": request.outputs}
    return {
        EAGER: functools.partial(plain, **loss),
        CHECKPOINT: functools.partial(checkpointed, **loss),
        RECIPE: functools.partial(minisequence, mlp_tiles=request.mlp_tiles),
    }


class _Search:
    """Steps of one way to train, at any length; each runs once."""

    def __init__(self, room: Room, config: Any, recipe: Recipe, steps: Steps):
        self.room, self.config, self.recipe, self.steps = room, config, recipe, steps
        self.step_at = functools.cache(self._step_at)
        checkpoints = getattr(recipe, "func", recipe) is not plain
        self.offload = checkpoints and room.request.host_bytes > 0
        self.is_known = False  # whether shallow copies have led to the peak of the whole step

    def row(self, name: str) -> Row:
        keeps = f"{_KEEPS[name]}; these inputs wait on the host" if self.offload else _KEEPS[name]
        row = self.room.searched_row(name, keeps, self.step_at, self._longest, self._curve_bytes)
        self.steps.end()
        return row

    def _longest(self) -> int:
        limit, guess = self.room.step_bytes, START
        if layer_count(self.config) >= _DEEP:
            with contextlib.suppress(Exception):  # a model's own code may need all of its layers
                guess = longest(self._guessed_bytes, limit, START)
                self.is_known = guess > 0 and self._bytes(guess) == self._guessed_bytes(guess)
                if self.is_known:
                    return guess
        return longest(self._bytes, limit, guess or START)

    def _bytes(self, length: int) -> int:
        step = self.step_at(length)
        return self._with_host(self.room.without_gaps(step.parts).total, step.host_bytes)

    def _with_host(self, total: int, host_bytes: float) -> int:
        """Bytes that are within those of the device if a step also fits on the host."""
        if not host_bytes:
            return total
        return max(total, int(self.room.step_bytes * host_bytes / self.room.request.host_bytes))

    def _curve_bytes(self, length: int) -> int:
        if self.is_known and self.room.request.allocator != CACHING:
            return self._guessed_bytes(length)
        return self.room.parts(self.step_at(length)).total

    def _guessed_bytes(self, length: int) -> int:
        """Each layer after the second adds what the second one adds."""
        one, two = (self._step_at(length, layers) for layers in (1, 2))
        more = layer_count(self.config) - 2
        total = two.parts.total + more * (two.parts.total - one.parts.total)
        host_bytes = two.host_bytes + more * (two.host_bytes - one.host_bytes)
        return self._with_host(max(total, self.room.at_end.total), host_bytes)

    def _step_at(self, length: int, layers: int | None = None) -> EagerStep:
        if layers != 1:
            self.steps.begin(f"{length:,} tokens")
        request = self.room.request
        with traceable(request):
            return eager_step(
                self.config, request.training, self.recipe, length, layers, self.offload
            )
