"""The copies of a plan beside the computation: what runs when, by the cost model's estimates."""

from __future__ import annotations

import dataclasses

from mstpass.plans import SavePlan, Transfer
from mstpass.report.details import BACKWARD, FORWARD


@dataclasses.dataclass(frozen=True)
class PhaseTimes:
    """The forward, which copies to the host, or the backward, which copies back.

    Attributes:
        copies: in the order in which they run; their times count from the phase's beginning.
        compute_us: the time of the phase's ops.
    """

    phase: str
    copies: tuple[Transfer, ...]
    compute_us: float

    @property
    def copy_us(self) -> float:
        return sum(copy.end_us - copy.start_us for copy in self.copies)

    @property
    def wait_us(self) -> float:
        """How long the device waits for copies; it computes beside the rest of them."""
        return sum(copy.stall_us for copy in self.copies)

    @property
    def end_us(self) -> float:
        return self.compute_us + self.wait_us


def phase_times(plan: SavePlan) -> tuple[PhaseTimes, ...]:
    """The phases of a plan with copies, forward first; nothing for a plan without copies."""
    if not plan.transfers:
        return ()
    to_host = tuple(copy for copy in plan.transfers if copy.to_host)
    back = tuple(copy for copy in plan.transfers if not copy.to_host)
    return (
        PhaseTimes(FORWARD, to_host, plan.forward_us),
        PhaseTimes(BACKWARD, back, plan.backward_us),
    )
