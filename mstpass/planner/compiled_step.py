"""A compiled step's memory and time: a plan of the traced partition problem, simulated."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator

from mstpass.memory.program import Program
from mstpass.memory.simulate_ops import StepMemory
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.pipeline import collector_paused
from mstpass.planner.request import Parts
from mstpass.planner.traced_step import TracedStep
from mstpass.problem.apply_modes import modes_of
from mstpass.problem.names import is_loop, value_name
from mstpass.problem.op import POINTWISE, VIEW
from mstpass.problem.problem import CutProblem, Mode, Plan, Value, pinned_bytes
from mstpass.walk import walk_once

FREE, LEAST = "free", 0.0  # values of memory_budget


class CompiledStep:
    """A traced step as ``plan`` has it compiled.

    Args:
        limit_bytes: of the peak; above it, backward computes cheap values twice, as the backend
            has it. None: it does not.
    """

    def __init__(
        self, traced: TracedStep, problem: CutProblem, plan: Plan, limit_bytes: int | None = None
    ):
        self.traced, self.problem, self.plan = traced, problem, plan
        self._simulation = simulate_plan(problem, plan)
        self._limit_bytes = limit_bytes

    @functools.cached_property
    def _is_lowered(self) -> bool:
        """Whether backward computes cheap values twice."""
        step, limit = self._simulation, self._limit_bytes
        above = limit is not None and step.peak_bytes > limit
        return above and step.is_lowered_below(step.peak_bytes)

    @property
    def _program(self) -> Program:
        return self._simulation.lowered_program if self._is_lowered else self._simulation.program

    @property
    def _memory(self) -> StepMemory:
        return self._simulation.lowered_memory if self._is_lowered else self._simulation.memory

    @functools.cached_property
    def us(self) -> float:
        """Time of the step in microseconds, by the cost model."""
        step = self._simulation
        repeated_us = _us(self._program.backward) - _us(step.program.backward)
        return step.us + (repeated_us if self._is_lowered else 0.0)

    @functools.cached_property
    def exchange_us(self) -> float:
        """The part of it in which ranks exchange what attention needs."""
        program, exchanges = self._program, self.traced.exchanges
        ops = (*program.forward, *program.backward)
        return _us(op for op in ops if op.node_name in exchanges)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory that saved values take."""
        offloaded = self._simulation.offloaded
        return pinned_bytes(v.bytes for v in self._simulation.problem.values if v.name in offloaded)

    @property
    def _modes(self) -> list[Mode]:
        """The mode of each region."""
        return modes_of(self.problem, self.plan.modes)

    @property
    def narrow(self) -> tuple[str, ...]:
        """What is wrong with calls whose kernels are not made for tensors so large."""
        ops = (*self._program.forward, *self._program.backward)
        whole = (self.traced.narrow.get(op.node_name, "") for op in ops)
        in_loops = (text for mode in self._modes for loop in mode.loops for text in loop.narrow)
        return tuple(filter(None, dict.fromkeys((*whole, *in_loops))))

    @property
    def peak_bytes(self) -> int:
        """Bytes that the step holds at its peak."""
        return self._memory.peak_bytes

    @functools.cached_property
    def parts(self) -> Parts:
        """Bytes that the step holds at its peak."""
        timeline, gradients = self._memory.peak, _gradients(self.problem)
        bytes_of = dict.fromkeys(("gradients", "logits", "saved", "loops", "other"), 0)
        for name, size in timeline.alive:
            name = value_name(name.partition(":")[0])
            if name in gradients:
                bytes_of["gradients"] += size
            elif name in self.traced.logits:
                bytes_of["logits"] += size
            else:
                bytes_of["saved" if name in self.plan.saved else "other"] += size
        inner = timeline.peak.bytes - sum(moment.bytes for moment in timeline.alive)
        in_loop = is_loop(timeline.peak.node)
        bytes_of["loops" if in_loop else "other"] += inner
        return Parts(**bytes_of)

    @property
    def kept(self) -> str:
        """What the plan keeps and runs in loops, in words."""
        looped = collections.Counter(mode.name for mode in self._modes if mode.loops)
        loops = ", ".join(f"{count} {mode}" for mode, count in looped.items())
        return f"keeps {len(self.plan.saved)} values; loops: {loops or 'none'}"


def planned(
    traced: TracedStep, length: int, option: object, limit_bytes: int | None
) -> CompiledStep:
    """The step that the default solver plans."""
    problem = traced.problem_at(length, option)
    with collector_paused():
        return CompiledStep(traced, problem, SOLVERS[AUTO](problem, limit_bytes), limit_bytes)


def inductor_step(traced: TracedStep, length: int) -> CompiledStep:
    """The step without loops, cut as torch's partitioner would."""
    whole = dataclasses.replace(traced.problem_at(length, FREE), regions=())
    return CompiledStep(traced, whole, Plan(min_cut(whole), {}))


def step_of_plan(
    traced: TracedStep, length: int, option: object, plan: Plan, batch: int | None = None
) -> CompiledStep:
    """The step of a plan that was made for another length or another batch."""
    limit_bytes = None if option == FREE else 0
    return CompiledStep(traced, traced.problem_at(length, option, batch), plan, limit_bytes)


def _us(ops: Iterable[Value]) -> float:
    return sum(op.us for op in ops)


def _gradients(problem: CutProblem) -> set[str]:
    """Names of the parameters' gradients, and of the summands of one (tied weights have two)."""
    by_name: dict[str, Value] = problem.cached(_by_name)

    def summands(name: str) -> Iterator[str]:
        value = by_name[name]
        for operand in value.inputs if value.kind in (VIEW, POINTWISE) else ():
            other = by_name.get(operand)
            if other is not None and other.bytes == value.bytes and not other.forward:
                yield operand

    return set(walk_once(problem.gradients, summands))


def _by_name(problem: CutProblem) -> dict[str, Value]:
    return {value.name: value for value in (*problem.values, *problem.backward)}
