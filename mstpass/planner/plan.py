"""What fits on a device: each way to train, by one accounting.

The eager rows are steps run on fake tensors (eager.py), the compiled ones plans of the traced joint
graph, simulated (compiled.py). All add the same fixed bytes (accounting.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode

from mstpass.extras import UserError
from mstpass.partition.budget import SPARE
from mstpass.partition.problem import CutProblem, Plan
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.planner import recipes
from mstpass.planner.accounting import Fixed, Parts, Sizes, Training, fixed
from mstpass.planner.compiled import Traced, step_parts, trace
from mstpass.planner.eager import Recipe, eager_parts
from mstpass.planner.models import build, config_of, most_positions, sizes_of
from mstpass.planner.search import longest

EAGER, CHECKPOINT, INDUCTOR = "eager", "checkpoint per layer", "Inductor"
RECIPE, MST = "MST recipe", "mst"
_KEEPS = {
    EAGER: "keeps what autograd saves",
    CHECKPOINT: "keeps each layer's input; backward recomputes one layer at a time",
    RECIPE: f"keeps each layer's input; MLPs in {recipes.MLP_TILES} tiles, head and loss in "
    f"{recipes.HEAD_TILES}",
    INDUCTOR: "keeps the least bytes that need no matmul or attention again; fused",
}
_FREE, _LEAST = "free", 0.0
_START = 4096  # tokens of a first guess
_NEAR = (0.5, 16.0)  # times the traced length: beyond, it is traced anew
_SHRINK = 0.995
_TRIES = 6
_AGAIN = 3

T = TypeVar("T")


class DoesNotFit(UserError):
    """Not even a step without activations fits."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked: a model, how it is trained, and the device.

    Attributes:
        length: a given sequence length; None: the longest that fits.
        overhead_bytes: of the device, not to be had for tensors.
        logits: what the eager rows' loop holds (recipes.LOGITS).
        alone: without the rows to compare with.
    """

    model: str
    training: Training
    device_bytes: int
    overhead_bytes: int
    length: int | None = None
    logits: str = "model"
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, at one length.

    Attributes:
        length: 0 where nothing fits.
        total_bytes: of the device, overhead included.
        memory_budget: mst only: the option to compile with.
        extra_time: mst only: beyond Inductor's step, a fraction, by the cost model of a GPU.
    """

    name: str
    keeps: str
    length: int
    fits: bool
    parts: Parts
    total_bytes: int
    memory_budget: str = ""
    extra_time: float | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    request: Request
    sizes: Sizes
    fixed: Fixed
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def own(self) -> Row:
        return self.rows[-1]


def plan(request: Request, advance: Callable[[str], None] = lambda what: None) -> Planned:
    """Plan a request; ``advance`` hears what is done next.

    Raises:
        ModelError: there is no such model.
        DoesNotFit: weights, states and gradients alone are too large.
        UserError: the model's step cannot be traced.
    """
    config = config_of(request.model)
    with FakeTensorMode():
        sizes = _guarded(request, lambda: sizes_of(build(config, request.training.dtype)))
    planner = _Planner(request, config, sizes, advance)
    rows = () if request.alone else planner.rows_to_compare()
    own = planner.own(max((row.length for row in rows), default=_START))
    return Planned(request, sizes, planner.fixed, (*rows, own), _notes(request, config, own))


class _Planner:
    def __init__(self, request: Request, config: Any, sizes: Sizes, advance: Callable[[str], None]):
        self.request, self.config, self.advance = request, config, advance
        self.training = request.training
        self.fixed = fixed(sizes, self.training)
        self.around = self.fixed.total + request.overhead_bytes
        self.step_bytes = request.device_bytes - self.around
        least = self.step_bytes - _held_gradients(sizes, self.training)
        if least <= 0:
            raise DoesNotFit(_too_large(request, sizes))
        self.traces: dict[tuple[int, bool], Traced] = {}

    # ---- rows to compare with ------------------------------------------------------------------
    def rows_to_compare(self) -> tuple[Row, ...]:
        plain = functools.partial(recipes.plain, logits=self.request.logits)
        checkpointed = functools.partial(recipes.checkpointed, logits=self.request.logits)
        ways: tuple[tuple[str, Recipe], ...] = (
            (EAGER, plain),
            (CHECKPOINT, checkpointed),
            (RECIPE, recipes.minisequence),
        )
        eager, checkpoint, recipe = (self._eager(name, way) for name, way in ways)
        inductor = self._inductor(recipe.length or _START, checkpoint.length or _START)
        return eager, checkpoint, inductor, recipe

    def _eager(self, name: str, recipe: Recipe) -> Row:
        @functools.cache
        def parts_at(length: int) -> Parts:
            self.advance(f"{name}, {length} tokens")
            return _guarded(
                self.request, lambda: eager_parts(self.config, self.training, recipe, length)
            )

        return self._row(name, _KEEPS[name], parts_at, _START)

    def _inductor(self, traced_length: int, start: int) -> Row:
        """From mst's trace: without loops the problem of every length follows from it."""
        traced = self._traced(traced_length)

        def parts_at(length: int) -> Parts:
            self.advance(f"{INDUCTOR}, {length} tokens")
            return step_parts(traced, *_whole(traced.at(length, _FREE)), length)[0]

        return self._row(INDUCTOR, _KEEPS[INDUCTOR], parts_at, start)

    def _row(self, name: str, keeps: str, parts_at: Callable[[int], Parts], start: int) -> Row:
        length = self.request.length
        if length is None:
            length = longest(lambda n: parts_at(n).total, self.step_bytes, start)
        parts = parts_at(length) if length else Parts()
        fits = length > 0 and parts.total <= self.step_bytes
        return Row(name, keeps, length, fits, parts, self.around + parts.total)

    # ---- mst -----------------------------------------------------------------------------------
    def own(self, start: int) -> Row:
        """The cheapest plan that fits, at the given length or the longest one."""
        length = self.request.length
        if length is not None:
            return self._cheapest(length)
        length = self._longest_own(start)
        for _ in range(_TRIES):
            row = self._cheapest(length)
            if row.fits or length <= 1:
                return row
            length = int(length * min(_SHRINK, self.step_bytes / row.parts.total))
        return row

    def _longest_own(self, start: int) -> int:
        length = start
        for _ in range(_TRIES):
            traced = self._traced(length)

            def bytes_at(length: int, traced: Traced = traced) -> int:
                self.advance(f"{MST}, {length} tokens")
                problem = traced.at(length, _LEAST)
                return step_parts(traced, problem, SOLVERS[AUTO](problem, 0), length)[0].total

            length = longest(bytes_at, self.step_bytes, traced.length)
            if length == 0 or _NEAR[0] <= length / traced.length <= _NEAR[1]:
                break
        return max(1, length)

    def _cheapest(self, length: int) -> Row:
        """The first that fits of: the free plan, one within the room there is, the least one."""
        traced = self._traced(length, exact=True)
        inductor_us = step_parts(traced, *_whole(traced.at(length, _FREE)), length)[1]
        room = self.step_bytes
        for option in (_FREE, *[self.step_bytes] * _AGAIN, _LEAST):
            limit = {_FREE: None, _LEAST: 0}.get(option, int(room / SPARE))
            budget = room if limit else option
            self.advance(f"{MST}, {length} tokens, memory_budget={_text(budget)}")
            problem = traced.at(length, option)
            found = SOLVERS[AUTO](problem, limit)
            parts, us = step_parts(traced, problem, found, length)
            excess = parts.total - (int(self.step_bytes / SPARE) if limit else self.step_bytes)
            if excess <= 0:
                break
            if limit:  # what attention needs besides, which the solver does not see
                room = max(1, room - excess)
        fits, total = parts.total <= self.step_bytes, self.around + parts.total
        time, keeps = us / inductor_us - 1, _kept(problem, found)
        return Row(MST, keeps, length, fits, parts, total, _text(budget), time)

    def _traced(self, length: int, exact: bool = False) -> Traced:
        exact = exact or self.request.length is not None
        if (length, exact) not in self.traces:
            self.advance(f"tracing {length} tokens")
            budgets = (_FREE, self.step_bytes, _LEAST)
            self.traces[length, exact] = _guarded(
                self.request, lambda: trace(self.config, self.training, length, budgets, exact)
            )
        return self.traces[length, exact]


def _whole(problem: CutProblem) -> tuple[CutProblem, Plan]:
    """The problem without loops, cut as torch's partitioner would."""
    whole = dataclasses.replace(problem, regions=())
    return whole, Plan(min_cut(whole), {})


def _kept(problem: CutProblem, found: Plan) -> str:
    names = [found.modes.get(r.region, r.modes[0].name) for r in problem.regions]
    looped = collections.Counter(name for name in names if name != "whole")
    loops = ", ".join(f"{count} {name}" for name, count in looped.items())
    return f"keeps {len(found.saved)} values; loops: {loops or 'none'}"


def _text(memory_budget: object) -> str:
    if isinstance(memory_budget, int):
        return f"{memory_budget >> 20}MiB"
    return str(memory_budget)


def _held_gradients(sizes: Sizes, training: Training) -> int:
    """What the step's gradients come to at its end."""
    if training.optimizer_in_backward:
        return 0
    divided = training.ranks if training.gradients_divided else 1
    return training.weight_bytes * sizes.parameters // divided


def _guarded(request: Request, make: Callable[[], T]) -> T:
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # whatever a model's code raises
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--model {request.model}: its training step cannot be traced: "
            f"{type(error).__name__}: {reason}"
        ) from error


# ---- words -------------------------------------------------------------------------------------
def _too_large(request: Request, sizes: Sizes) -> str:
    training = request.training
    held, gradients = fixed(sizes, training), _held_gradients(sizes, training)
    need = held.total + gradients + request.overhead_bytes
    return (
        f"{request.model} does not fit on {gib(request.device_bytes)}: weights "
        f"{gib(held.weights)}, optimizer states {gib(held.optimizer_states)}, gradients "
        f"{gib(gradients)}, gathered {gib(held.gathered)} and overhead "
        f"{gib(request.overhead_bytes)} are "
        f"{gib(need - request.device_bytes)} too much, before any activation. "
        f"{_help(request, sizes)}"
    )


def _help(request: Request, sizes: Sizes) -> str:
    """What would fit, of what can be changed."""

    def fits(**changes: Any) -> bool:
        training = dataclasses.replace(request.training, **changes)
        need = fixed(sizes, training).total + _held_gradients(sizes, training)
        return need + request.overhead_bytes < request.device_bytes

    eightbit, bf16 = {"optimizer": "adamw-8bit"}, {"dtype": "bf16"}
    found = ["--optimizer adamw-8bit"] if fits(**eightbit) else []
    found += ["--dtype bf16"] if request.training.dtype != "bf16" and fits(**bf16) else []
    if not found and fits(**eightbit, **bf16, master_weights=False):
        found = ["--dtype bf16 --optimizer adamw-8bit without master weights"]
    ranks = next((n for n in (2**i for i in range(1, 13)) if fits(sharding="zero3", ranks=n)), None)
    if ranks is not None:
        found.append(f"--sharding zero3 --ranks {ranks}")
    return f"Would fit: {', or '.join(found)}." if found else "No sharding or optimizer helps."


def _notes(request: Request, config: Any, own: Row) -> tuple[str, ...]:
    training, most = request.training, most_positions(config)
    notes = [
        "Attention is FlashAttention-2 as CUDA runs it, with its backward's workspace; its windows "
        "and masks need no memory. Nothing was measured on the device.",
    ]
    if most is not None and own.length > most:
        notes.append(
            f"{own.length} tokens are more than the model's {most} positions: it needs other "
            "position embeddings (rope scaling) to make sense of them."
        )
    if training.optimizer_in_backward:
        notes.append(
            f"{INDUCTOR} and {MST} hold all gradients until backward is over, as a compiled "
            "backward returns them together; the other rows drop each once the optimizer used it."
        )
    if training.gradients_divided and training.ranks > 1:
        notes.append(
            f"{INDUCTOR} and {MST} are as if gradients were reduced where they are made. A graph "
            "with collectives in it is left to torch's partitioner."
        )
    if own.fits and own.memory_budget == str(_LEAST):
        notes.append("mst's plan is the one of least memory: there is no room for a measured peak "
                     "that is higher than the simulated one.")  # fmt: skip
    return tuple(notes)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
