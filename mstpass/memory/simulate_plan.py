"""The memory and the time of the step that a plan makes: a simulation of its program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Set
from types import MappingProxyType

from mstpass.memory.host_copies import (
    OpsAndCopies,
    offloaded_name,
    with_offloads,
    with_reloads,
    with_rows_from_host,
)
from mstpass.memory.program import Program, backward_ops, forward_ops, is_cheap
from mstpass.memory.repeated_values import MOST_LOWERED, Repeated, repeated_values
from mstpass.memory.simulate_ops import GraphOps, StepMemory, Timeline, backward_of, simulate_ops
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import INPUT
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import must_offload

_NONE: Mapping[str, int] = MappingProxyType({})


class StepSimulation:
    """The step in which given values are saved. Each of its properties is computed when first read.

    The problem must have no open regions, and ``verify`` must accept the saved set.

    Args:
        saved: names of the values that cross from forward to backward.
        nested: the values that backward computes in passes of their own, with their levels.
        offloaded: names of the saved values that cross by way of the host, besides those that
            must.
        by_chunk: as of ``Plan``.
    """

    def __init__(
        self,
        problem: CutProblem,
        saved: Set[str],
        nested: Mapping[str, int] = _NONE,
        offloaded: Set[str] = frozenset(),
        by_chunk: Set[str] = frozenset(),
    ):
        self.problem, self.saved, self.nested = problem, saved, nested
        self.by_chunk = by_chunk
        self.offloaded = frozenset(offloaded) | (saved & must_offload(problem))

    @classmethod
    def of(cls, problem: CutProblem, plan: Plan) -> StepSimulation:
        """The step of a plan, for a problem in which its modes are chosen."""
        return cls(problem, plan.saved, plan.nested, plan.offloaded, plan.by_chunk)

    @functools.cached_property
    def forward_copies(self) -> OpsAndCopies:
        """The ops of the forward. Apart from ``program``: the backward's takes longer to find."""
        ops, host = forward_ops(self.problem, self.saved), self.problem.host
        if not self.offloaded or host is None:
            return ops, ()
        return with_offloads(ops, self.offloaded, host)

    @functools.cached_property
    def backward_copies(self) -> OpsAndCopies:
        """The ops of the backward, its inputs first."""
        host = self.problem.host
        every = backward_ops(self.problem, self.saved, self.nested)
        if not self.offloaded or host is None:
            return every, ()
        ops = with_rows_from_host(every, self.by_chunk & self.offloaded, host)
        cheap = {op.name for op in ops if is_cheap(op)}
        free = {value.name for value in self.problem.values if value.free}
        return with_reloads(ops, self.offloaded, cheap - set(self.problem.gradients), free, host)

    @functools.cached_property
    def program(self) -> Program:
        (forward, offloads), (backward, reloads) = self.forward_copies, self.backward_copies
        return Program(forward, backward, offloads, reloads)

    @functools.cached_property
    def forward(self) -> Timeline:
        waits = map(offloaded_name, self.offloaded)
        kept = [*self.problem.outputs, *(self.saved - self.offloaded), *waits]
        return simulate_ops(self.forward_copies[0], kept)

    @functools.cached_property
    def backward(self) -> Timeline:
        return self.backward_ops.simulated()

    @property
    def backward_ops(self) -> GraphOps:
        ops = self.program.backward
        tangents = [op.name for op in ops if op.kind == INPUT and op.name not in self.saved]
        free = {value.name for value in self.problem.values if value.free}
        outputs = [name for name in self.problem.outputs if name not in free]
        freed = (*(self.saved - self.offloaded), *(t for t in tangents if t not in free))
        forward, gradients = self.program.forward, self.problem.gradients
        return backward_of(forward, outputs, self.saved, ops, gradients, freed)

    @property
    def memory(self) -> StepMemory:
        return StepMemory(self.forward, self.backward)

    @functools.cached_property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @functools.cached_property
    def _lowered(self) -> Repeated:
        """Backward computes some cheap values twice."""
        return repeated_values(self.memory, self.backward_ops, self._cheap)

    @functools.cached_property
    def _cheap(self) -> frozenset[str]:
        """Names of the ops of the backward that may run twice."""
        ops = self.backward_ops.ops
        return frozenset(op.name for op in ops if isinstance(op, Value) and is_cheap(op))

    @property
    def lowered_memory(self) -> StepMemory:
        """The memory of ``lowered_program``."""
        return self._lowered.memory

    @property
    def lowered_peak_bytes(self) -> int:
        """The peak of ``lowered_program``."""
        return self.lowered_memory.peak_bytes

    @functools.cached_property
    def least_lowered_bytes(self) -> int:
        """The lowered peak is no lower: where the peak is, copies free cheap values alone."""
        cheap_bytes = sum(v.bytes for v in self.backward.alive if v.node in self._cheap)
        return max(self.forward.peak.bytes, self.backward.peak.bytes - cheap_bytes)

    @property
    def lowered_program(self) -> Program:
        """The program with some cheap values computed twice, where that lowers the peak."""
        held = {op.name for op in self.backward_ops.ops} - {op.name for op in self.program.backward}
        ops = self._lowered.backward.ops
        backward = tuple(op for op in ops if isinstance(op, Value) and op.name not in held)
        return dataclasses.replace(self.program, backward=backward)

    def lowered_within(self, limit_bytes: float) -> bool:
        """Whether the lowered peak is at most the limit; it is computed only if need be."""
        if self.forward.peak.bytes > limit_bytes or self.peak_bytes > MOST_LOWERED * limit_bytes:
            return False
        return self.peak_bytes <= limit_bytes or self.lowered_peak_bytes <= limit_bytes

    def is_lowered_below(self, peak_bytes: int) -> bool:
        """Whether the lowered peak is below another one; it is computed only if it may be."""
        return self.least_lowered_bytes < peak_bytes and self.lowered_peak_bytes < peak_bytes

    def within(self, limit_bytes: float) -> bool:
        """Whether the peak is at most the limit; the backward is simulated only if need be."""
        return self.forward.peak.bytes <= limit_bytes and self.peak_bytes <= limit_bytes

    def bytes_at(self) -> dict[str, int]:
        """The bytes alive while each kernel runs; the higher number if it runs in both graphs."""
        found: dict[str, int] = {}
        for name, size in (*self.forward.moments, *self.backward.moments):
            found[name] = max(size, found.get(name, 0))
        return found

    @functools.cached_property
    def us(self) -> float:
        """Time of forward and backward by the cost model: recomputation, waits for copies."""
        program = self.program
        ops_us = sum(value.us for value in (*program.forward, *program.backward))
        return ops_us + sum(copy.stall_us for copy in (*program.offloads, *program.reloads))


def simulate_plan(problem: CutProblem, plan: Plan) -> StepSimulation:
    """The step of a plan, for a problem with regions."""
    return StepSimulation.of(with_modes(problem, plan.modes), plan)


def step_memory(
    problem: CutProblem, saved: Set[str], nested: Mapping[str, int] = _NONE
) -> StepMemory:
    """The memory of a step; arguments as of ``StepSimulation``."""
    return StepSimulation(problem, saved, nested).memory


def step_us(problem: CutProblem, saved: Set[str], nested: Mapping[str, int] = _NONE) -> float:
    """The time of a step in microseconds; arguments as of ``StepSimulation``."""
    return StepSimulation(problem, saved, nested).us
