"""Why a plan leaves regions whole that could have loops, with the peaks that decide it.

A region stays whole if its loops would raise the simulated peak, by what they keep (sums over
chunks in float32, gradients that a fused loop holds until the backward), or if the peak lies where
the region is not. Each is told by a simulation: of the plan in which the region has loops, and of
the bytes that are alive while the region runs. Regions that are alike share one simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from mstpass.byte_sizes import bytes_text
from mstpass.loops.candidate_modes import RegionCandidates
from mstpass.loops.mode_costs import WHOLE
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.candidate import TIE, Candidate, fewest_saved_bytes
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan

_MOST_VALUES = 20_000  # of all simulations together: they would take seconds


def reasons_left_whole(
    problem: CutProblem, plan: Plan, left: Sequence[RegionCandidates], least: bool
) -> list[str]:
    """The reason for each region, in order.

    Args:
        left: regions that have no loops in the plan.
        least: the plan is that of the least memory.
    """
    if not left:
        return []
    simulation = Candidate(with_modes(problem, plan.modes), plan).simulation
    alike: dict[tuple[object, ...], list[RegionCandidates]] = {}
    for candidate in left:
        alike.setdefault(_kind(candidate), []).append(candidate)
    room = _MOST_VALUES
    found: dict[str, str] = {}
    for group in alike.values():
        room -= len(problem.values)
        raised = _raised_bytes(problem, plan, group[0]) if room > 0 else None
        reason = _reason(simulation, raised, group, least)
        found |= {candidate.region: reason for candidate in group}
    return [found[candidate.region] for candidate in left]


def _kind(candidate: RegionCandidates) -> tuple[object, ...]:
    modes = (
        (mode, p.kind, p.bytes_before, p.chunk_tokens, p.num_chunks) for mode, p in candidate.plans
    )
    return (candidate.optional, candidate.whole_first, *modes)


def _raised_bytes(problem: CutProblem, plan: Plan, candidate: RegionCandidates) -> tuple[int, int]:
    """The peaks without and with loops of the region, both with the fewest saved bytes."""
    whole = fewest_saved_bytes(problem, {**plan.modes, candidate.region: WHOLE}).peak_bytes
    peaks = []
    for mode, _ in candidate.plans:
        try:
            peaks.append(
                fewest_saved_bytes(problem, {**plan.modes, candidate.region: mode}).peak_bytes
            )
        except (Cycle, nx.NetworkXUnbounded):
            continue
    return whole, min(peaks, default=0)


def _reason(
    simulation: StepSimulation,
    raised: tuple[int, int] | None,
    group: Sequence[RegionCandidates],
    least: bool,
) -> str:
    if raised is not None and raised[1] > TIE * raised[0]:
        whole, chunked = map(bytes_text, raised)
        return (
            f"chunks here would raise the step's peak, from {whole} to {chunked}, by the sums and "
            "gradients that their loops keep"
        )
    if group[0].whole_first:
        return "chunks without recomputation save no memory, and the plan needs none here"
    memory = simulation.memory
    phase = "backward" if memory.peak is memory.backward else "forward"
    bytes_at = simulation.bytes_at()
    members = (name for c in group for name, _ in c.plans[0][1].members)
    here = max((bytes_at.get(name, 0) for name in members), default=0)
    peak = memory.peak.peak
    told = f"{bytes_text(peak.bytes)} at {peak.node} in {phase}, at most {bytes_text(here)} here"
    if here >= peak.bytes:  # it runs where the peak is, which other values make
        told = f"{bytes_text(peak.bytes)} at {peak.node} in {phase}, with chunks here as well"
    ending = ", at the least memory that was found" if least else ""
    return f"the step's peak lies elsewhere ({told}), so chunks here would not lower it{ending}"
