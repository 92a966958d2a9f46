"""What mstpass hooks into Inductor: the partitioner of the joint graph, and the last graph pass.

``Partitioner`` turns the joint graph into forward and backward. ``LowerLoops`` lowers their loops
after Inductor has computed its cache keys. Both have keys of their own in the compile caches. An
error in either ends the compilation, so that no cache keeps the graph under these keys; backend.py
then leaves the graph to Inductor.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass import pipeline
from mstpass.captured import OF_INPUTS, PlannedFor
from mstpass.errors import please_report, told
from mstpass.graph import device_costs
from mstpass.graph.advice import REPORT
from mstpass.graph.collectives import collectives_in
from mstpass.graph.loop_op import is_host_copy, mst_loop
from mstpass.graph.recompute_rules import draws_random_numbers
from mstpass.limit import Limit
from mstpass.loops.lowering import lower_loops
from mstpass.memory.peaks_by_length import PeaksByLength
from mstpass.options import OptionError, Options
from mstpass.partition.solve import BudgetError
from mstpass.passes.runner import InPlacePass, PassRunner, failures
from mstpass.plans import Outcome, Rejection
from mstpass.problem.solver_registry import is_own
from mstpass.report.collect_details import collect_details
from mstpass.report.report import Report
from mstpass.schedule.delay_recomputation import (
    delay_recomputation,
    host_copy_waits,
    is_inlined_operand,
    joined,
)
from mstpass.schedule.finished_graphs import delay_scatters, materialize_masks
from mstpass.torch_internals.aot_autograd import (
    is_backward,
    keep_donations_from_subgraphs,
    merge_equal_nodes,
    traces_backward_again,
)
from mstpass.torch_internals.batch_sizes import symbols_of_inputs
from mstpass.torch_internals.inductor import (
    CustomGraphPass,
    CustomPartitionerFn,
    call_with_aligned_result,
    make_wait,
)
from mstpass.torch_internals.versions import TorchChangedError, installed

log = logging.getLogger(__name__)
_NESTED = (
    "this is a nested compile region: it is planned by itself, once for all calls of it, and what "
    "it saves counts once for each call in the graph that calls it"
)


class MstpassError(RuntimeError):
    """A failure inside mstpass, raised only under ``strict=True``."""


class DoesNotFitError(Exception):
    """The plan needs more memory than the device has left."""


class SameForAllError(Exception):
    """The graph has no parts that could run in chunks: one plan suits batches of all sizes."""


def warn_of(error: Exception, done: str = "left it to Inductor: the step has no chunks") -> None:
    warnings.warn(please_report(told(error), done), stacklevel=3)
    log.debug("mstpass failed", exc_info=error)


def failed(error: Exception) -> Outcome:
    return Outcome(rejections=(Rejection("error", "graph", REPORT(told(error))),))


def check_fit(outcome: Outcome, limit: Limit) -> None:
    """Raise `DoesNotFitError` if a free plan needs more than the device has left."""
    if limit.is_free and not limit.allows(outcome):
        raise DoesNotFitError


@functools.cache
def _sources_hash() -> str:
    """A hash of all our sources: a changed pass must not get graphs that an older one compiled."""
    digest = hashlib.sha256(installed().encode())
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def uuid(
    options: Options,
    limit: Limit | None = None,
    loops_in_backward: bool = True,
    planned_for: PlannedFor = OF_INPUTS,
) -> str:
    """A cache key of all that decides a plan besides the graph: sources, options, stored costs,
    and the sizes that it is made for.

    What the device has left does not decide a free plan, so that later processes find it.

    So does the number of threads, with which attention's workspace grows on the CPU.
    """
    limit = limit or Limit.of(options)
    budget = None if limit.is_free else limit.budget_bytes
    decided = f"{limit.share}-{budget}-{limit.peak_bytes}"
    others = dataclasses.replace(options, memory_budget="free").fingerprint()
    plan = f"{others}-{decided}-{device_costs.fingerprint()}"
    key = f"mstpass-{_sources_hash()}-{torch.get_num_threads()}-{plan}-{planned_for.key}"
    return key if loops_in_backward else f"{key}-forward-loops"


class Partitioner(CustomPartitionerFn):
    """The partitioner that AOTAutograd calls with the joint graph.

    Attributes:
        limit: what the plan may take. A free plan that is not within the budget in bytes is an
            error.
        cached: the compile caches may give the graph, and keep it.
        planned_for: the batch that the plan is made for.
        report: the plan of the graph; None until the partitioner is called. It is not called for a
            graph that comes from a compile cache.
        nested: the plans of regions under ``torch.compiler.nested_compile_region``, with which the
            partitioner is called before the graph that calls them.
        seconds: the time that each stage of the pipeline took.
        pass_seconds: the time that each pass took, by name.
        loops: how many loops the graphs have that it returned.
    """

    def __init__(
        self,
        options: Options,
        limit: Limit | None = None,
        cached: bool = True,
        planned_for: PlannedFor = OF_INPUTS,
    ):
        self.options, self.limit, self.cached = options, limit or Limit.of(options), cached
        self.planned_for = planned_for
        self.loops_in_backward = not traces_backward_again()
        self.report: Report | None = None
        self.nested: list[Report] = []
        self.seconds: Mapping[str, float] = {}
        self.pass_seconds: Mapping[str, float] = {}
        self.loops = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], *more: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if more or "num_fwd_outputs" not in kwargs:
            raise TorchChangedError("custom_partitioner_fn is called with other arguments")
        if self.report is not None:  # of a region that this graph, or another region, calls
            notes = (*self.report.outcome.notes, _NESTED)
            self.nested.append(self.report.with_outcome(notes=notes))
        merge_equal_nodes(gm)
        try:
            result = pipeline.run(
                gm,
                self.options,
                limit=self.limit,
                loops_in_backward=self.loops_in_backward,
                must_fit=self.planned_for.must_fit,
                before_schedule=True,
                **pipeline_kwargs(kwargs),
            )
        except BudgetError as error:
            raise DoesNotFitError from error
        except OptionError:
            raise
        except Exception as error:
            if self.options.strict:
                raise MstpassError(f"mstpass failed (strict=True): {error}") from error
            raise
        assert result.modules is not None, "the modules are known"
        check_fit(result.outcome, self.limit)
        if not (result.outcome.regions or result.outcome.rejections) and self.planned_for.bounded:
            raise SameForAllError
        runner, by_length, details = PassRunner.of(self.options), dict[str, Any](), None
        with runner.left_out("the peaks of other lengths"):
            by_length = self._by_length(result, gm.graph)
        with runner.left_out("the picture of the step"):
            details = collect_details(result)
        outcome = dataclasses.replace(result.outcome, **by_length, **_what_runs_once(gm, result))
        self.report = Report(outcome, details=details)
        self.refused(runner)
        self.seconds, self.pass_seconds = result.seconds, result.pass_seconds
        emitted = _nodes([module.graph for module in result.modules])
        self.loops += sum(node.target is mst_loop for node in emitted)
        return result.modules

    def _by_length(self, result: pipeline.Result, graph: fx.Graph) -> dict[str, Any]:
        """The plan's peaks for batches of other sizes; nothing if it serves one."""
        if not self.planned_for.sizes or result.modules is None:
            return {}
        environment, symbols = symbols_of_inputs(graph)
        most = {symbols[name]: size for name, size in self.planned_for.sizes}
        takes_time, budget_bytes = not self.limit.is_free, self.limit.budget_bytes
        peaks = PeaksByLength(result.modules, environment, most, takes_time)
        holds_for = peaks.largest_within(budget_bytes) if budget_bytes is not None else ()
        return {"peaks": peaks.table(), "budget_holds_for": holds_for}

    def refused(self, runner: PassRunner) -> None:
        """Add what was refused once there was a plan to the report, and warn of what failed."""
        known = self.report.rejections if self.report is not None else ()
        new = [r for r in runner.refused if r not in known]
        if self.report is not None and new:
            self.report = self.report.with_outcome(rejections=(*known, *new))
        if failed_passes := failures(new):
            warnings.warn(failed_passes, stacklevel=2)

    def uuid(self) -> str | None:
        # None means not cacheable: a user's solver may change while its name stays
        if not self.cached or not is_own(self.options.solver):
            return None
        return uuid(self.options, self.limit, self.loops_in_backward, self.planned_for)


def _what_runs_once(gm: fx.GraphModule, result: pipeline.Result) -> dict[str, Any]:
    """What a second run of the step would have to know: random draws, and waits for ranks."""
    assert result.modules is not None, "the modules are known"
    traced, *emitted = (list(_graphs_of(module)) for module in (gm, *result.modules))
    return {
        "draws_random_numbers": any(map(draws_random_numbers, _nodes(traced))),
        "collectives": collectives_in(_nodes(traced), map(_nodes, emitted)),
    }


def _graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    return (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))


def _nodes(graphs: Sequence[fx.Graph]) -> list[fx.Node]:
    return [node for graph in graphs for node in graph.nodes]


def pipeline_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``pipeline.run`` takes of the arguments that AOTAutograd gives to a partitioner."""
    names = ("num_fwd_outputs", "static_lifetime_input_indices")
    return {name: kwargs[name] for name in names if name in kwargs}


def _wait(graph: fx.Graph, takes_time: bool) -> None:
    """Have recomputations, gradients and copies to the host wait for others."""
    waits = host_copy_waits(graph)
    for op in {node.target for node in graph.nodes if is_host_copy(node)}:
        call_with_aligned_result(op)
    waits = joined(delay_recomputation(graph, takes_time), waits)
    make_wait(graph, waits, is_inlined_operand)


class LowerLoops(CustomGraphPass):
    """Inductor's last graph pass over forward and backward: our lowering, then the user's pass.

    Args:
        cached: the compile caches may keep the graph. Of all hooks, Inductor asks only a pass over
            graphs whether they may: that of another one may have no key, and the caches are used.

    Attributes:
        graphs: how many it was called with.
        loops: how many it has lowered.
    """

    def __init__(self, users_pass: Any, takes_time: bool, partitioner: Partitioner, cached: bool):
        self.users_pass, self.takes_time = users_pass, takes_time
        self.partitioner, self.cached = partitioner, cached
        self.graphs = self.loops = 0

    def __call__(self, graph: fx.Graph, *more: Any) -> None:
        if more or not isinstance(graph, fx.Graph):
            raise TorchChangedError("post_grad_custom_post_pass is called with other arguments")
        if self.partitioner.report is None and is_backward(graph):
            raise TorchChangedError("custom_partitioner_fn is not called")
        self.graphs += 1
        runner = PassRunner.of(self.partitioner.options)
        lower = InPlacePass("lower_loops", lower_loops, required=True)
        self.loops += runner.run_in_place(lower, graph)
        for step in self._passes():
            runner.run_in_place(step, graph)
        self.partitioner.refused(runner)
        keep_donations_from_subgraphs(graph)
        if self.users_pass is not None:
            self.users_pass(graph)

    def _passes(self) -> Iterator[InPlacePass]:
        """The passes over a graph whose loops are lowered."""
        if self.takes_time:
            yield InPlacePass("delay_scatters", delay_scatters)
        yield InPlacePass("wait", functools.partial(_wait, takes_time=self.takes_time))
        yield InPlacePass("materialize_masks", materialize_masks)

    def uuid(self) -> Any:
        theirs = self.users_pass.uuid() if isinstance(self.users_pass, CustomGraphPass) else None
        if not self.cached or (self.users_pass is not None and theirs is None):
            return None  # the user's pass has no key: not cacheable, as without mstpass
        planned_for = self.partitioner.planned_for.key
        return f"mstpass-{_sources_hash()}-{self.takes_time}-{theirs}-{planned_for}"
