"""A compiled graph that runs out of memory takes a leaner plan; the program goes on.

    forward    what it had allocated is freed, a leaner plan is compiled and runs in its place,
               with the same random numbers, and one warning says what to set
    backward   cannot run again, as its saved values are gone: the error says what it knows of the
               plan, and the next call takes a leaner one

*Leaner* is a lower limit: a budget in bytes that fits into what there is, then the least memory.
Where a peak was measured above the simulated one, the next limit is lower by that ratio.

A forward that cannot run twice fails as a backward does: one that writes to its inputs, waits for
other ranks, or is run again by a checkpoint, whose first run has saved another plan's values.

Until something fails, a call costs a ``try``, and the state of the random numbers if it draws any.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mstpass.byte_sizes import bytes_text
from mstpass.captured import Captured
from mstpass.inductor_hooks import DoesNotFitError, warn_of
from mstpass.limit import Limit
from mstpass.memory.device_budget import Failure, failure_of, is_out_of_memory
from mstpass.report.report import Report
from mstpass.report.store import summary
from mstpass.torch_internals.aot_autograd import CompiledFunctions, traces_backward_again
from mstpass.torch_internals.dynamo import compiles_nothing, current_backward, current_node
from mstpass.torch_internals.settings import inductor_setting

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A compiled graph and the plan that it follows.

    Attributes:
        functions: its autograd functions, which run its backward.
        report: it says so if the graph has no plan.
    """

    run: Compiled
    functions: CompiledFunctions
    limit: Limit
    report: Report

    @property
    def peak_bytes(self) -> int | None:
        return self.report.peak_bytes


Make = Callable[[Limit, Sequence[Any]], CompiledPlan]


def with_leaner_plans(plan: CompiledPlan, graph: Captured, make: Make | None) -> Compiled:
    """The plan's function, which compiles a leaner plan when it runs out of memory.

    Args:
        make: compiles the graph within a limit, for a call with these arguments. It raises
            ``DoesNotFitError`` if there is no such plan. None: the graph cannot be compiled again.
    """
    if plan.report.outcome.no_plan or _is_left_as_it_is(graph):
        return plan.run
    tensors = (x for x in graph.inputs if isinstance(x, torch.Tensor))
    devices = [x.device for x in tensors]
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    return LeanerPlans(plan, device, make, graph.options.strict)


def _is_left_as_it_is(graph: Captured) -> bool:
    """Whether torch replays a recording of the graph, or traces it again."""
    cudagraphs = graph.users.get("triton.cudagraphs", inductor_setting("triton.cudagraphs"))
    return bool(cudagraphs or traces_backward_again())


class LeanerPlans:
    """The plans of one graph, each leaner than the one before; a call runs the latest.

    Attributes:
        plan: the latest plan.
        earlier: those that ran out of memory.
    """

    def __init__(self, plan: CompiledPlan, device: torch.device, make: Make | None, strict: bool):
        vars(self).update(vars(plan.run))  # such as torch's function that stores it
        self.device, self.make, self.strict = device, make, strict
        self.earlier: list[CompiledPlan] = []
        self._draws = plan.report.outcome.draws_random_numbers
        self._lock = threading.RLock()
        self._due: Failure | None = None  # of the latest plan's backward
        self._take(plan)

    def __call__(self, *args: Any) -> Any:
        state = _random_state(self.device) if self._draws else ()
        failures: list[tuple[Failure, CompiledPlan]] = []
        while True:
            try:
                result = self._run(*args)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = failure_of(error, "forward", self.device)
                failures.append((failure, self.plan))
                why = self._why_not_again()
                if why:
                    self._take_leaner_next(failure)
                    error.args = (self._explained(failure, self.plan, why),)
                    raise
            else:
                if failures:
                    self._warn(*failures[0])
                return result
            self._take_leaner_now(failure, args)
            _set_random_state(state)

    def waits_for_backward(self) -> bool:
        """Whether a forward of one of the plans has not had its backward yet, nor was dropped."""
        gc.collect()  # nodes of steps that are over may be in cycles
        return any(map(_waits, (self.plan, *self.earlier)))

    def _take(self, plan: CompiledPlan) -> None:
        self.plan, self._due = plan, None
        self._is_least = plan.limit.is_least  # or no leaner plan was found
        collectives = plan.report.outcome.collectives
        if collectives is not None and collectives.repeated:
            self.make = None  # other ranks run this plan too
        plan.functions.on_error = functools.partial(self._backward_failed, plan)
        self._run: Compiled = self._run_after_failures if self.earlier else plan.run

    # ---- after failures ------------------------------------------------------------------------
    def _take_leaner_next(self, failure: Failure) -> None:
        """Have the next call take a leaner plan, if this graph can be compiled again."""
        if self.make is None:
            return
        with self._lock:
            self._due, self._run = failure, self._run_after_failures

    def _run_after_failures(self, *args: Any) -> Any:
        if current_backward() is not None:
            return self._plan_of_first_run().run(*args)
        failure = self._due
        if failure is not None and not compiles_nothing():
            self._due = None
            self._take_leaner(failure, args)
        return self.plan.run(*args)

    def _plan_of_first_run(self) -> CompiledPlan:
        """The plan with which a checkpoint ran its forward, now that it runs it again.

        Raises:
            RuntimeError: forwards of two plans wait for their backward, and nothing tells which of
                them this one is.
        """
        plans = (self.plan, *self.earlier)
        node = current_node()
        for plan in plans:
            if plan.functions.made(node):
                return plan
        waiting = [plan for plan in plans if _waits(plan)]
        if len(waiting) > 1:
            raise RuntimeError(
                "mstpass: a checkpoint runs a forward again, and a step that ran out of memory has "
                "changed the plan since its first run. Skip this batch, or set a memory_budget"
            )
        return waiting[0] if waiting else self.plan

    def _backward_failed(self, plan: CompiledPlan, error: Exception) -> None:
        if not is_out_of_memory(error):
            return
        failure = failure_of(error, "backward", self.device)
        error.args = (self._explained(failure, plan),)
        if plan is self.plan:
            self._take_leaner_next(failure)

    # ---- leaner plans --------------------------------------------------------------------------
    def _why_not_again(self) -> str:
        """Why a forward that failed cannot run again; "" if it can."""
        if self.make is None:
            return "it cannot be compiled again"
        if self._is_least:
            return "no plan needs less memory"
        if self.plan.functions.writes_inputs:
            return "it writes to its inputs, and may have done so"
        if self.plan.report.outcome.collectives is not None:
            return "it waits for other ranks"
        if current_backward() is not None:
            return "a checkpoint runs it, and must run the plan of its first run"
        if compiles_nothing():
            return "the stance of torch.compiler forbids to compile"
        return "a CUDA graph is captured" if _captures(self.device) else ""

    def _take_leaner_now(self, failure: Failure, args: Sequence[Any]) -> None:
        """Take a leaner plan.

        Raises:
            the error of the allocation, if there is none.
        """
        failed = self.plan
        if not self._take_leaner(failure, args):
            raise failure.kind(self._explained(failure, failed, "no plan needs less memory"))

    def _warn(self, failure: Failure, failed: CompiledPlan) -> None:
        """Say that a forward ran under the latest plan after the one that it began with failed."""
        warnings.warn(
            f"mstpass: a step ran out of memory in its forward, and ran again under a leaner plan, "
            f"of a peak of {_text(self.plan.peak_bytes)} in place of {_text(failed.peak_bytes)}; "
            f"later calls take it too. {failure.of_device()}{self._advice(failure, failed)}",
            stacklevel=3,
        )

    def _take_leaner(self, failure: Failure, args: Sequence[Any]) -> bool:
        """Compile and take the next leaner plan; whether there is one."""
        with self._lock:
            failed = self.plan
            for limit in self._limits(failure):
                try:
                    plan = self.make(limit, args) if self.make is not None else failed
                except DoesNotFitError:
                    continue
                except Exception as error:
                    if self.strict:
                        raise
                    warn_of(error, "kept the plan that ran out of memory")
                    return False
                if _is_leaner(plan, failed):
                    self.earlier.append(failed)
                    self._take(plan)
                    return True
            self._is_least = True
            return False

    def _limits(self, failure: Failure) -> Iterator[Limit]:
        """The limits of leaner plans, from the highest to the lowest."""
        if self._is_least:
            return
        fits = failure.fitting_bytes(self.plan.peak_bytes)
        if fits is not None and not self.earlier:
            yield Limit.in_bytes(fits)
        yield Limit(0.0)

    # ---- words ---------------------------------------------------------------------------------
    def _explained(self, failure: Failure, plan: CompiledPlan, why: str = "") -> str:
        """The message of an error, with what is known of the plan and what to do."""
        next_one = plan is self.plan and self.make is not None and not self._is_least
        return (
            f"{failure.text}\n"
            f"mstpass: this is the {failure.phase} of a compiled step. Its plan has a simulated "
            f"peak of {_text(plan.peak_bytes)} above what was allocated before it "
            f"({summary(plan.report, {})}). {failure.of_device()}"
            + (f"It was not run again: {why}. " if why else "")
            + ("The next call takes a leaner plan. " if next_one else "")
            + self._advice(failure, plan)
        )

    def _advice(self, failure: Failure, failed: CompiledPlan) -> str:
        if self._is_least and failed is self.plan:
            return "Use a smaller batch or shorter sequences"
        fits = failure.fitting_bytes(failed.peak_bytes)
        budget = f"'{bytes_text(fits)}'".replace(" ", "") if fits is not None else "0.0"
        return f"Set memory_budget={budget}, or 0.0 for the least memory, to plan for that at once"


def _waits(plan: CompiledPlan) -> bool:
    """Whether autograd's graph has a node of the plan."""
    return any(map(plan.functions.made, gc.get_objects()))


def _is_leaner(plan: CompiledPlan, other: CompiledPlan) -> bool:
    ours, theirs = plan.peak_bytes, other.peak_bytes
    return ours is None or theirs is None or ours < theirs


def _text(peak_bytes: int | None) -> str:
    return bytes_text(peak_bytes) if peak_bytes is not None else "an unknown size"


# ---- random numbers ------------------------------------------------------------------------------
def _random_state(device: torch.device) -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
    """The states of the generators that a step on this device draws from."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        if _captures(device):
            return ()
        generators.append(torch.cuda.default_generators[device.index or 0])
    return tuple((generator, generator.get_state()) for generator in generators)


def _set_random_state(state: tuple[tuple[torch.Generator, torch.Tensor], ...]) -> None:
    for generator, numbers in state:
        generator.set_state(numbers)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
