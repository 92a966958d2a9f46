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
import dataclasses
import logging
import math
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.captured import Captured, PlannedFor, has_backward
from mstpass.graph.sizes import hint
from mstpass.inductor_hooks import DoesNotFitError, SameForAllError, warn_of
from mstpass.length_ranges import Neighbours, RangePlan, Ranges, Values
from mstpass.limit import Limit
from mstpass.out_of_memory import Compiled, CompiledPlan, with_leaner_plans
from mstpass.progress import counted
from mstpass.torch_internals.aot_autograd import has_backward_hooks, traces_backward_again
from mstpass.torch_internals.batch_sizes import (
    TracingContext,
    at_sizes,
    fake_inputs,
    hold,
    preserve_rng_state,
    sources_of_numbers,
    symbols_among,
    symbols_of_sizes,
    tracing,
    with_sizes,
)
from mstpass.torch_internals.dynamo import EAGER, FAIL, compiles_nothing, current_backward, stance
from mstpass.torch_internals.plain_inductor import by_inductor_alone

log = logging.getLogger(__name__)

_OFTEN = 8  # calls of a range before it gets a plan beside that of a longer one
_MOST_PLANS = 8
_MOST_CHOICES = 100_000  # batches of which it is known which plan they take
_MOST_SIDES = 3  # plans up to the end of a range before a batch beyond guards has its own
_STATIC = (
    "its sizes are static. Compile with dynamic=True, or mark what varies: "
    "torch._dynamo.mark_dynamic(ids, 1)"
)

CompileOne = Callable[[Captured, Limit | None], CompiledPlan]


def plans_by_length(graph: Captured, compile_one: CompileOne) -> Any:
    """A function that calls the plan of each batch; None if the graph is to have one plan.

    It has one if its sizes are static, if it has no backward, and where its inputs cannot be made
    anew for other sizes.

    Args:
        compile_one: compiles a graph for the sizes of its inputs, within a limit; None: within
            that of the options.
    """
    context = TracingContext.try_get()
    if context is None or not _is_planned(graph.inputs):
        return None
    try:
        return _with_first_plan(graph, context, compile_one)
    except LookupError as why:
        log.debug("one plan for all sizes: %s", why)
        if graph.options.lengths:
            said = f"option 'lengths' has no effect on a graph, which has one plan: {why}"
            warnings.warn(f"mstpass: {said}", stacklevel=2)
        return None


def _with_first_plan(
    graph: Captured, context: TracingContext, compile_one: CompileOne
) -> PlansByLength:
    """The plans of a graph, of which there is one.

    Raises:
        LookupError: the graph is to have one plan.
    """
    if not any(isinstance(x, torch.SymInt) for x in graph.inputs):
        raise LookupError(_STATIC)
    inputs = fake_inputs(graph.module, graph.inputs)
    with_sizes(inputs)
    symbols = symbols_of_sizes(inputs)
    if not symbols:
        raise LookupError("its inputs have no symbolic size, or one that is no input itself")
    graph = dataclasses.replace(graph, inputs=tuple(inputs))
    plans = PlansByLength(graph, symbols, context, compile_one)
    plans.add_first()
    return plans


def _is_planned(inputs: Sequence[Any]) -> bool:
    """Whether the graph has a backward that is compiled with it."""
    return has_backward(inputs) and not (has_backward_hooks(inputs) or traces_backward_again())


class PlansByLength:
    """The plans of one graph; calling it calls the one for the sizes of the batch.

    Args:
        graph: with fake inputs.
        sized: the symbols of sizes. Others, of strides and numbers, count for conditions alone.
        context: in which Dynamo traced the graph.
        compile_one: as of ``plans_by_length``.
    """

    def __init__(
        self,
        graph: Captured,
        sized: frozenset[sympy.Symbol],
        context: TracingContext,
        compile_one: CompileOne,
    ):
        self.graph, self.sized, self.context = graph, sized, context
        self._sources = sources_of_numbers(context, graph.inputs)
        symbols = symbols_among(graph.inputs)
        self.symbols = tuple(symbols)
        self.compile_one = compile_one
        self.plans: list[RangePlan] = []
        self.environment: ShapeEnv = next(
            x.node.shape_env for x in graph.inputs if isinstance(x, torch.SymInt)
        )
        self._near = Neighbours(graph.inputs, sized, self.environment)
        self._sizes_of = operator.itemgetter(*symbols.values())
        traced = self._of_sizes(self._values(self._sizes_of(graph.inputs)))
        self.ranges = Ranges(self.environment, traced, graph.options.lengths)
        self._coming = self.ranges.coming()
        self._chosen: dict[Any, Compiled] = {}  # by the sizes of a batch: the last word
        self._latest: dict[Any, RangePlan] = {}
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
        self._add(self._values(self._sizes_of(self.graph.inputs)), traced=True)

    def _values(self, sizes: Any) -> Values:
        return dict(zip(self.symbols, map(hint, _as_tuple(sizes)), strict=True))

    def _of_sizes(self, values: Values) -> Values:
        return {symbol: value for symbol, value in values.items() if symbol in self.sized}

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
            if len(self._latest) >= _MOST_CHOICES:
                del self._latest[next(iter(self._latest))]
            self._latest[key] = plan
            if is_final and not is_symbolic:
                if len(self._chosen) >= _MOST_CHOICES:  # a number may count the steps
                    self._chosen.clear()
                self._chosen[sizes] = plan.run
            return plan.run

    def _plan_for(self, values: Values) -> tuple[RangePlan, bool]:
        """The plan for a batch, and whether later batches of these sizes will take it too."""
        ends = self.ranges.ends(self._of_sizes(values))
        serving = [plan for plan in self.plans if plan.serves(values)]
        own = [plan for plan in serving if plan.is_within(ends)]
        if own:
            return own[0], True
        key = tuple(ends.values())
        self._calls[key] += 1
        if serving:
            is_final = len(self.plans) >= _MOST_PLANS
            is_due = self._calls[key] % _OFTEN == 0 and not compiles_nothing()
            if is_final or not is_due or any(plan.waits_for_backward() for plan in serving):
                return min(serving, key=lambda plan: plan.room), is_final
        if stance() == EAGER:
            return RangePlan(self.graph.module, {}), False
        if stance() == FAIL:
            raise RuntimeError(
                f"mstpass has no plan for a batch with "
                f"{self.ranges.text(self._of_sizes(values))}, and the "
                f"stance {FAIL!r} forbids to compile one: run a batch of that length first"
            )
        return self._add(values), True

    # ---- compiling -----------------------------------------------------------------------------
    def _add(self, values: Values, traced: bool = False) -> RangePlan:
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

    def _first_that_serves(self, values: Values) -> RangePlan:
        bounded = len(self.plans) < _MOST_PLANS - 1
        for sizes, must_fit in self._to_plan_for(values):
            try:
                plan = self._up_to(sizes, values, bounded, must_fit)
            except DoesNotFitError:
                continue
            except SameForAllError:
                break
            if plan is not None:
                return plan
        plan = self._compiled(values, self._planned_for(values, bounded=False))
        if not plan.serves(values):
            raise LookupError(f"a guard is about more than inputs: {plan.conditions}")
        return plan

    def _to_plan_for(self, values: Values) -> Iterator[tuple[Values, bool]]:
        """Sizes to plan for, and whether the plan must be within the budget, until one serves.

        If none is within it, the least memory is planned for the whole range; where that is an
        error, for the batch, which the error is about then.
        """
        ends = self.ranges.ends(self._of_sizes(values))
        middle = {s: round(math.sqrt(values[s] * end)) for s, end in ends.items()}
        longer = (self._near.allowed(values, sizes) for sizes in (ends, middle))
        tried = [sizes for sizes in (*longer, values) if sizes is not None]
        at_last = reversed(tried) if self.graph.options.strict else tried
        for must_fit, several in ((True, tried), (False, at_last)):
            for sizes in several:
                yield sizes, must_fit

    def _up_to(
        self, sizes: Values, batch: Values, bounded: bool, must_fit: bool
    ) -> RangePlan | None:
        """The plan for these sizes, or for the largest smaller ones on the batch's side of guards.

        A guard that a compilation adds, such as on more than 4,096 tokens, divides a range. Plans
        for the other side serve other batches.

        Raises:
            DoesNotFitError: it must be within the budget and is not.
        """
        for _ in range(_MOST_SIDES):
            largest = self._of_sizes(sizes)
            plan = next((plan for plan in self.plans if plan.most == largest), None)
            if plan is None:
                planned_for = self._planned_for(sizes, bounded, must_fit)
                plan = self._compiled(sizes, planned_for)
                if plan.serves(batch):
                    return plan
                self.plans.append(plan)
            nearer = self._near.on_its_side(batch, sizes, plan.conditions)
            if nearer is None:
                return None
            sizes = nearer
        return None

    def _planned_for(self, sizes: Values, bounded: bool, must_fit: bool = False) -> PlannedFor:
        largest = tuple((str(symbol), size) for symbol, size in self._of_sizes(sizes).items())
        return PlannedFor(largest, bounded, must_fit)

    def _compiled(self, sizes: Values, planned_for: PlannedFor) -> RangePlan:
        """The plan for these sizes.

        Raises:
            DoesNotFitError: it must be within the budget and is not.
        """
        first, conditions = self._for_sizes(sizes, planned_for)

        def leaner(limit: Limit, args: Sequence[Any]) -> CompiledPlan:
            return self._leaner(run, sizes, planned_for, limit, args)

        run = with_leaner_plans(first, self.graph, leaner)
        return RangePlan(run, self._of_sizes(sizes) if planned_for.bounded else {}, conditions)

    def _for_sizes(
        self, sizes: Values, planned_for: PlannedFor, limit: Limit | None = None
    ) -> tuple[CompiledPlan, tuple[Any, ...]]:
        """The graph compiled for these sizes, and the conditions under which it is right."""
        own = self.graph if limit is None else self.graph.of_this_rank()  # after a failure
        most = self._of_sizes(sizes) if planned_for.bounded else {}
        with at_sizes(self.environment, sizes, most) as conditions:
            graph = dataclasses.replace(
                own,
                module=own.copied_module(),
                inputs=tuple(with_sizes(self.graph.inputs)),
                planned_for=planned_for,
            )
            compiled = self.compile_one(graph, limit)
        return compiled, tuple(conditions)

    def _leaner(
        self,
        run: Compiled,
        sizes: Values,
        planned_for: PlannedFor,
        limit: Limit,
        args: Sequence[Any],
    ) -> CompiledPlan:
        """What takes the place of a plan that ran out of memory with these arguments."""
        values = self._values(self._sizes_of(args))
        planned_for = dataclasses.replace(planned_for, must_fit=True)
        with self._lock, self._as_traced():
            compiled, conditions = self._for_sizes(sizes, planned_for, limit)
            if not hold(conditions, values):
                raise DoesNotFitError
            for number, plan in enumerate(self.plans):
                if plan.run is run:
                    self.plans[number] = dataclasses.replace(plan, conditions=conditions)
            self._chosen.clear()
        return compiled

    def _by_inductor_alone(self, values: Values) -> RangePlan:
        with at_sizes(self.environment, values) as conditions:
            inputs = with_sizes(self.graph.inputs)
            run = by_inductor_alone(self.graph.copied_module(), inputs, self.graph.users)
        return RangePlan(run, self.ranges.ends(self._of_sizes(values)), tuple(conditions))

    def _add_coming(self, values: Values) -> None:
        """Compile the plans for the lengths that the user says will come."""
        coming, self._coming = self._coming, []
        for length in counted(coming, "mstpass compiles for all lengths"):
            batch = self._longest_batch(values, length)
            if batch is not None:
                ends = self.ranges.ends(self._of_sizes(batch))
                if not any(plan.serves(batch) and plan.is_within(ends) for plan in self.plans):
                    self._add(batch)

    def _longest_batch(self, values: Values, most: int) -> Values | None:
        """The batch of at most this length that Dynamo's guards allow; None if none is near it."""
        sizes = self.ranges.of_length(self._of_sizes(values), most)
        batch = self._near.allowed(values, sizes)
        if batch is None:
            said = self.ranges.forbidden(most, self._near.forbidding(values, sizes))
            warnings.warn(said, stacklevel=2)
        return batch

    @contextlib.contextmanager
    def _as_traced(self) -> Iterator[None]:
        """As if Dynamo had just traced the graph."""
        self.context.tensor_to_context.update(self._sources)
        with tracing(self.context), preserve_rng_state():
            yield


def _as_tuple(sizes: Any) -> tuple[Any, ...]:
    """What ``itemgetter`` returns of several positions, or of one."""
    return sizes if isinstance(sizes, tuple) else (sizes,)
