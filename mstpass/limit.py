"""``Limit``: what a plan may take of memory or of time. Every form of ``memory_budget`` is one.

| ``memory_budget`` | the plan |
|---|---|
| ``"free"``, ``1.0`` | of the lowest peak that takes at most ``free_overhead`` more time |
| ``"auto"`` | the same; on a CUDA device, where that does not fit, as for the bytes that are left |
| a float s between | the fastest with a peak of at most lowest + s (free plan's - lowest) |
| ``0.0`` | of the lowest peak |
| an int, ``"24GiB"`` | the fastest with a *measured* peak of at most that |

A budget in bytes is kept in rounds: plan, write the graphs, compile, read Inductor's schedule.
Where the graphs' simulated peak or the schedule's is above the budget, ``after`` has the limit of
the next round. Where the schedule needs more than was simulated, ``without_savings`` has that of
one more.
"""

from __future__ import annotations

import dataclasses

from mstpass.byte_sizes import parse_bytes
from mstpass.options import Options
from mstpass.plans import Outcome

MEASURED_OVER_SIMULATED = 1.03  # the most that a measured peak exceeds the simulated one by


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a plan may take.

    Attributes:
        share: of the way from the lowest peak (0.0) to the free plan's (1.0); None: ``peak_bytes``
            is the limit.
        budget_bytes: the most that the step's measured peak may be; None: any.
        peak_bytes: the most that its simulated peak may be, where ``share`` is None.
    """

    share: float | None = 1.0
    budget_bytes: int | None = None
    peak_bytes: int | None = None

    @staticmethod
    def of(options: Options, device_bytes: int | None = None) -> Limit:
        """The limit that the options ask for.

        Args:
            device_bytes: what the device has left, where the budget is ``"auto"``.
        """
        budget = options.memory_budget
        if budget in ("auto", "free"):
            return Limit(budget_bytes=device_bytes)
        if isinstance(budget, float):
            return Limit(share=budget)
        in_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
        assert in_bytes is not None, "the options have been checked"
        return Limit.in_bytes(in_bytes)

    @staticmethod
    def in_bytes(budget_bytes: int) -> Limit:
        """The limit of a measured peak."""
        return Limit(None, budget_bytes, simulated_limit(budget_bytes))

    @property
    def is_free(self) -> bool:
        """Whether it is one of time: plans may not repeat matrix products for memory."""
        return self.share == 1.0

    @property
    def is_least(self) -> bool:
        """Whether it asks for the least memory that there is."""
        return self.share == 0.0

    @property
    def simulated_bytes(self) -> int | None:
        """The most that the simulated peak may be, 0 for the least memory under a budget in bytes;
        None where no bytes are given."""
        least_bytes = None if self.budget_bytes is None else 0
        return least_bytes if self.is_least else self.peak_bytes

    def with_simulated(self, peak_bytes: int | None) -> Limit:
        """The same budget with another limit of the simulated peak, as of ``simulated_bytes``."""
        if peak_bytes is None:
            return self
        if peak_bytes == 0:
            return Limit(0.0, self.budget_bytes)
        return Limit(None, self.budget_bytes, peak_bytes)

    def allows(self, outcome: Outcome) -> bool:
        """Whether a plan is within the budget in bytes, if there is one.

        Inductor's schedule counts where it is known. A plan of unknown peak is taken to be.
        """
        budget = self.budget_bytes
        if budget is None:
            return True
        if outcome.scheduled_peak_bytes is not None:
            return outcome.scheduled_peak_bytes <= budget
        most = simulated_limit(budget) if self.is_free else budget
        return outcome.peak_bytes is None or outcome.peak_bytes <= most

    def after(self, outcome: Outcome, last: bool = False) -> Limit | None:
        """The limit of the next round; None if the plan at hand is within the budget, or if there
        is no lower plan.

        Args:
            last: it is the last round, which asks for the least memory.
        """
        if self.budget_bytes is None or self.is_least or self.allows(outcome):
            return None
        if self.is_free:
            return Limit.in_bytes(self.budget_bytes)
        simulated, scheduled = outcome.peak_bytes, outcome.scheduled_peak_bytes
        assert self.peak_bytes is not None, "the peak bytes are known"
        if scheduled is not None and (simulated is None or simulated > self.budget_bytes):
            return None  # the rounds before compilation have ended at the lowest plan
        if last or scheduled is None or simulated is None or simulated > self.peak_bytes:
            return self.with_simulated(0)
        return self.with_simulated(int(simulated * self.budget_bytes / scheduled))

    def without_savings(self, outcome: Outcome) -> Limit | None:
        """The limit of the fastest plan that needs no more than Inductor alone, for one more round
        where the schedule needs more than was simulated: what a plan saves there may be in vain.

        None if the schedule is as simulated, or if the budget is met.
        """
        simulated, scheduled = outcome.peak_bytes, outcome.scheduled_peak_bytes
        most = outcome.baseline_peak_bytes
        if self.is_free or simulated is None or scheduled is None or most is None:
            return None
        met = self.budget_bytes is not None and self.allows(outcome)
        if met or simulated >= most or scheduled <= MEASURED_OVER_SIMULATED * simulated:
            return None
        return self.with_simulated(most)


def simulated_limit(measured_bytes: int) -> int:
    """The limit on a simulated peak for the measured one to stay within ``measured_bytes``."""
    return int(measured_bytes / MEASURED_OVER_SIMULATED)
