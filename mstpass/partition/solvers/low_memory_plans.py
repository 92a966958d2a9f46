"""The plans that keep little in memory, from which ``peak_search`` makes its sequence.

| plan | regions | saved |
|---|---|---|
| ``least_memory_loops`` | loops that return fewest bytes, in the shortest chunks | fewest bytes |
| ``checkpointed`` | the same | what is alive at the checkpoints |
| ``with_slow_results`` | the same | that, and the results of ops that are slow for their bytes |
| ``checkpointed_by_host`` | the same | what is alive at checkpoints that are chosen for the host |
| ``every_checkpointed`` | the same | what is alive at each set of checkpoints that is looked at |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mstpass.partition.solvers.candidate import TIE, Candidate, fewest_saved_bytes
from mstpass.partition.solvers.checkpoints import (
    Checkpoints,
    checkpoints,
    checkpoints_by_host,
    every_checkpoints,
)
from mstpass.partition.solvers.choose_modes import least_memory_modes
from mstpass.partition.solvers.offload import all_offloaded
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import read_by_backward, recomputed_heavy_ops


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    """A plan with checkpoints, and where in the forward they are."""

    candidate: Candidate
    found: Checkpoints


def least_memory_loops(problem: CutProblem) -> Candidate:
    """Every region in the mode that needs least memory; no heavy op outside loops is repeated."""
    return fewest_saved_bytes(problem, least_memory_modes(problem))


def checkpointed(problem: CutProblem) -> Checkpointed | None:
    """The same modes, with the values saved that are alive at checkpoints.

    None if the peak without checkpoints is made of the backward's own values, gradients above all:
    no saved set can lower it.
    """
    loops = problem.cached(least_memory_loops)
    if loops.peak_bytes <= TIE * _own_bytes_at_peak(loops):
        return None
    closed = loops.problem.allowing(recompute_heavy=True)
    found = checkpoints(closed)
    return Checkpointed(from_checkpoints(closed, loops.plan.modes, found), found)


def checkpointed_by_host(problem: CutProblem) -> Candidate | None:
    """The same modes with checkpoints whose values may wait on the host, where they cost next to
    nothing: there are more of them. None if checkpoints do not lower the peak."""
    one_level = problem.cached(checkpointed)
    if one_level is None:
        return None
    closed, modes = one_level.candidate.problem, one_level.candidate.plan.modes

    def peak_and_time(found: Checkpoints) -> tuple[int, float]:
        step = all_offloaded(Candidate(closed, Plan(found.saved, modes))).simulation
        return step.peak_bytes, step.us

    return from_checkpoints(closed, modes, checkpoints_by_host(closed, peak_and_time))


def every_checkpointed(problem: CutProblem) -> Iterator[Candidate]:
    """The same modes with each set of checkpoints that the ones for the host are chosen from.

    Each comes without and with the results of slow ops.
    """
    one_level = problem.cached(checkpointed)
    if one_level is not None:
        closed, modes = one_level.candidate.problem, one_level.candidate.plan.modes
        for found in every_checkpoints(closed):
            candidate = from_checkpoints(closed, modes, found)
            yield candidate
            yield with_slow_results(candidate)


def with_slow_results(checkpoint_plan: Candidate) -> Candidate:
    """A plan with checkpoints that also saves the results of ops which are slow for their bytes.

    These are the heavy ops whose time per byte is above the average of all that backward repeats:
    attention above all.
    """
    problem, plan = checkpoint_plan.problem, checkpoint_plan.plan
    ops = recomputed_heavy_ops(problem, plan.saved)
    average_us_per_byte = sum(op.us for op in ops) / max(1, sum(op.bytes for op in ops))
    slow = (op.results for op in ops if op.us_per_byte > average_us_per_byte)
    return Candidate(problem, Plan(read_by_backward(problem, plan.saved.union(*slow)), plan.modes))


def from_checkpoints(closed: CutProblem, modes: Mapping[str, str], found: Checkpoints) -> Candidate:
    """The plan of a set of checkpoints, for a problem in which ``modes`` are chosen."""
    return Candidate(closed, Plan(found.saved, modes))


def _own_bytes_at_peak(candidate: Candidate) -> int:
    """Bytes of the backward's own values at the peak, which are there whatever crosses."""
    peak = candidate.simulation.memory.peak
    own = {value.name for value in candidate.problem.backward}
    return sum(moment.bytes for moment in peak.alive if moment.node in own)
