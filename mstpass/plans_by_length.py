"""Several compiled plans of one graph of symbolic sizes, each for a range of them.

A plan is made for one batch: chunks, modes and saved values that suit 300 tokens do not suit
30,000, and a budget that holds for the one need not hold for the other. So a graph whose sizes vary
is planned for the largest batch of a range, and compiled again when a call comes that is in no
range yet (length_ranges.py).

A call takes the plan of its range. While its range has none, it takes that of a longer one, if
there is one: it needs less memory than what that was made for. A range that calls come to often
gets a plan of its own.

Within a range everything is known to be at most as large as what the plan was made for
(torch_internals/batch_sizes.py). Guards that a compilation adds are conditions of its plan alone: a
call for which they do not hold takes another one. Dynamo's own guards are untouched.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.captured import Captured, PlannedFor
from mstpass.graph.sizes import expression, hint
from mstpass.inductor_hooks import DoesNotFitError, SameForAllError, warn_of
from mstpass.length_ranges import Ranges
from mstpass.progress import progress_bar
from mstpass.torch_internals.aot_autograd import has_backward_hooks, traces_backward_again
from mstpass.torch_internals.batch_sizes import (
    TracingContext,
    at_sizes,
    fake_inputs,
    guards_of,
    preserve_rng_state,
    tracing,
    with_sizes,
)
from mstpass.torch_internals.dynamo import current_backward, stance
from mstpass.torch_internals.plain_inductor import by_inductor_alone

log = logging.getLogger(__name__)

_OFTEN = 8  # calls of a range before it gets a plan beside that of a longer one
_MOST_PLANS = 8

EAGER, FAIL = "eager_on_recompile", "fail_on_recompile"
_COMPILES_NOTHING = (EAGER, FAIL)

Compiled = Callable[..., Any]
Values = Mapping[sympy.Symbol, int]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A compiled graph, and for which batches it is right.

    Attributes:
        most: the greatest value of each symbol; none, if any batch may take it.
        conditions: what holds for the symbols besides.
    """

    run: Compiled
    most: Values
    conditions: tuple[Any, ...] = ()

    def serves(self, values: Values) -> bool:
        """Whether a batch of these sizes may take the plan."""
        if any(values[symbol] > most for symbol, most in self.most.items()):
            return False
        return _hold(self.conditions, values)

    def is_within(self, ends: Values) -> bool:
        """Whether the plan is made for a range up to these sizes, or for any."""
        return all(most <= ends[symbol] for symbol, most in self.most.items())

    @property
    def room(self) -> float:
        """Grows with the batches that it serves."""
        return math.prod(self.most.values()) if self.most else math.inf


def plans_by_length(graph: Captured, compile_one: Callable[[Captured], Compiled]) -> Any:
    """A function that calls the plan of each batch; None if the graph is to have one plan.

    It has one if its sizes are static, if it has no backward, and where its inputs cannot be made
    anew for other sizes.

    Args:
        compile_one: compiles a graph for the sizes of its inputs.
    """
    context = TracingContext.try_get()
    if context is None or not _is_planned(graph.inputs):
        return None
    try:
        inputs = fake_inputs(graph.module, graph.inputs)
        with_sizes(inputs)
    except LookupError as why:
        log.debug("one plan for all sizes: %s", why)
        return None
    symbols = _symbols(inputs)
    if not symbols:
        return None
    graph = dataclasses.replace(graph, inputs=tuple(inputs))
    plans = PlansByLength(graph, symbols, context, compile_one)
    plans.add_first()
    return plans


def _symbols(inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The symbols of the inputs' sizes, with their positions among the inputs.

    None, if a size has another symbol. Strides and numbers that are no sizes do not count.
    """
    found: dict[sympy.Symbol, int] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, position)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    of_sizes = {s for x in tensors for size in x.shape for s in expression(size).free_symbols}
    if not of_sizes <= found.keys():
        return {}
    return {symbol: position for symbol, position in found.items() if symbol in of_sizes}


def _is_planned(inputs: Sequence[Any]) -> bool:
    """Whether the graph has a backward that is compiled with it."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return trains and not has_backward_hooks(inputs) and not traces_backward_again()


class PlansByLength:
    """The plans of one graph; calling it calls the one for the sizes of the batch.

    Args:
        graph: with fake inputs.
        symbols: the position of each symbol among the inputs.
        context: in which Dynamo traced the graph.
        compile_one: as of ``plans_by_length``.
    """

    def __init__(
        self,
        graph: Captured,
        symbols: Mapping[sympy.Symbol, int],
        context: TracingContext,
        compile_one: Callable[[Captured], Compiled],
    ):
        self.graph, self.symbols, self.context = graph, tuple(symbols), context
        self.compile_one = compile_one
        self.plans: list[_Plan] = []
        self.environment: ShapeEnv = next(
            x.node.shape_env for x in graph.inputs if isinstance(x, torch.SymInt)
        )
        self._sizes_of = operator.itemgetter(*symbols.values())
        traced = self._values(self._sizes_of(graph.inputs))
        self.ranges = Ranges(self.environment, traced, graph.options.lengths)
        self._coming = list(graph.options.lengths)
        self._chosen: dict[Any, Compiled] = {}  # by the sizes of a batch: the last word
        self._latest: dict[Any, _Plan] = {}
        self._calls: Counter[tuple[int, ...]] = Counter()  # by range
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        sizes = self._sizes_of(args)
        try:
            run = self._chosen.get(sizes)
        except TypeError:  # symbolic, where a wrapper runs the graph on fake tensors
            run = None
        return (run or self._choose(sizes))(*args)

    def add_first(self) -> None:
        """Compile the plan for the batch that was traced."""
        self._add(self.ranges.traced, traced=True)

    def _values(self, sizes: Any) -> Values:
        return dict(zip(self.symbols, map(hint, _as_tuple(sizes)), strict=True))

    # ---- choosing ------------------------------------------------------------------------------
    def _choose(self, sizes: Any) -> Compiled:
        """The plan for a batch.

        A checkpoint that runs its forward again, in the backward, takes the plan of the first run.
        """
        values = self._values(sizes)
        key = tuple(values.values())
        is_symbolic = not all(type(size) is int for size in _as_tuple(sizes))
        with self._lock:
            if self._coming:
                self._add_coming(values)
            if current_backward() is not None and key in self._latest:
                return self._latest[key].run
            plan, is_final = self._plan_for(values)
            self._latest[key] = plan
            if is_final and not is_symbolic:
                self._chosen[sizes] = plan.run
            return plan.run

    def _plan_for(self, values: Values) -> tuple[_Plan, bool]:
        """The plan for a batch, and whether later batches of these sizes will take it too."""
        ends = self.ranges.ends(values)
        serving = [plan for plan in self.plans if plan.serves(values)]
        own = [plan for plan in serving if plan.is_within(ends)]
        if own:
            return own[0], True
        key = tuple(ends.values())
        self._calls[key] += 1
        if serving:
            is_final = len(self.plans) >= _MOST_PLANS
            if is_final or self._calls[key] < _OFTEN or stance() in _COMPILES_NOTHING:
                return min(serving, key=lambda plan: plan.room), is_final
        if stance() == EAGER:
            return _Plan(self.graph.module, {}), False
        if stance() == FAIL:
            raise RuntimeError(
                f"mstpass has no plan for a batch with {self.ranges.text(values)}, and the "
                f"stance {FAIL!r} forbids to compile one: run a batch of that length first"
            )
        return self._add(values), True

    # ---- compiling -----------------------------------------------------------------------------
    def _add(self, values: Values, traced: bool = False) -> _Plan:
        """Compile a plan that serves a batch.

        Args:
            traced: Dynamo traces the graph right now.
        """
        with contextlib.nullcontext() if traced else self._as_traced():
            try:
                plan = self._first_that_serves(values)
            except Exception as error:
                if traced or self.graph.options.strict:
                    raise
                warn_of(error, "left batches of this length to Inductor")
                plan = self._by_inductor_alone(values)
        self.plans.append(plan)
        return plan

    def _first_that_serves(self, values: Values) -> _Plan:
        for sizes, bounded, must_fit in self._to_plan_for(values):
            try:
                plan = self._compiled(sizes, bounded, must_fit)
            except DoesNotFitError:
                continue
            except SameForAllError:
                break
            if plan.serves(values):
                return plan
        return self._compiled(values, bounded=False, must_fit=False)

    def _to_plan_for(self, values: Values) -> Iterator[tuple[Values, bool, bool]]:
        """Sizes to plan for, until a plan is within the budget and serves the batch.

        Yields:
            The sizes, whether they are the largest that the plan serves, and whether it must be
            within the budget. If none is, the least memory is planned for the whole range.
        """
        ends = self.ranges.ends(values)
        middle = {s: round(math.sqrt(values[s] * end)) for s, end in ends.items()}
        tried = [sizes for sizes in (ends, middle, values) if self._is_allowed(sizes)]
        bounded = len(self.plans) < _MOST_PLANS - 1
        if bounded:
            yield from ((sizes, True, True) for sizes in tried)
        yield from ((sizes, bounded, False) for sizes in tried)

    def _compiled(self, sizes: Values, bounded: bool, must_fit: bool) -> _Plan:
        """The plan for these sizes.

        Raises:
            DoesNotFitError: it must be within the budget and is not.
        """
        named = tuple((str(symbol), size) for symbol, size in sizes.items())
        most = sizes if bounded else {}
        values = {**self._strides(sizes), **sizes}
        with at_sizes(self.environment, values, most) as conditions:
            graph = dataclasses.replace(
                self.graph,
                module=_copy(self.graph.module),
                inputs=tuple(with_sizes(self.graph.inputs)),
                planned_for=PlannedFor(named, bounded, must_fit),
            )
            run = self.compile_one(graph)
        return _Plan(run, most, tuple(conditions))

    def _by_inductor_alone(self, values: Values) -> _Plan:
        sizes = {**self._strides(values), **values}
        with at_sizes(self.environment, sizes) as conditions:
            inputs = with_sizes(self.graph.inputs)
            run = by_inductor_alone(_copy(self.graph.module), inputs, self.graph.users)
        return _Plan(run, self.ranges.ends(values), tuple(conditions))

    def _add_coming(self, values: Values) -> None:
        """Compile the plans for the lengths that the user says will come."""
        coming, self._coming = self._coming, []
        with _progress(len(coming)) as advance:
            for length in coming:
                batch = {**values, self.ranges.long: length}
                ends = self.ranges.ends(batch)
                if not any(plan.serves(batch) and plan.is_within(ends) for plan in self.plans):
                    self._add(batch)
                advance()

    def _strides(self, sizes: Values) -> Values:
        """Values of the symbols in strides: no element of an input lies on another one."""
        grown = math.prod(sizes.values()) / math.prod(self.ranges.traced.values())
        growth = max(1.0, grown)
        tensors = (x for x in self.graph.inputs if isinstance(x, torch.Tensor))
        strides = (stride for x in tensors for stride in x.stride())
        symbols = {s: stride for stride in strides for s in [expression(stride)] if s.is_Symbol}
        return {s: math.ceil(hint(size) * growth) for s, size in symbols.items()}

    @contextlib.contextmanager
    def _as_traced(self) -> Iterator[None]:
        """As if Dynamo had just traced the graph."""
        with tracing(self.context), preserve_rng_state():
            yield

    def _is_allowed(self, sizes: Values) -> bool:
        return _hold(guards_of(self.environment), sizes)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar over compilations; the function that is yielded counts one."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn  # rich is optional

        bar = progress_bar("mstpass compiles for all lengths", BarColumn(), MofNCompleteColumn())
    except ImportError:
        yield lambda: None
        return
    with bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph of its own: a compilation changes the one that it is given."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    copied.meta = dict(module.meta)
    return copied


def _as_tuple(sizes: Any) -> tuple[Any, ...]:
    """What ``itemgetter`` returns of several positions, or of one."""
    return sizes if isinstance(sizes, tuple) else (sizes,)


def _hold(conditions: Sequence[Any], values: Values) -> bool:
    """Whether conditions on symbols hold; those on other symbols do not count."""
    return all(condition.xreplace(dict(values)) != False for condition in conditions)  # noqa: E712
