"""One row of `mstpass bench solvers`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One solver's plan for one problem and budget.

    Attributes:
        share: where the budget lies between the lowest peak (0) and the free plan's peak (1).
        us: time of the step by the cost model.
        extra_us: time beyond the step under ``save_all``.
        solve_s: seconds that the solver took.
        bound_us: lower bound of the time of every plan within the budget.
        proven_us: the least time of a plan within the budget; None if it is not proven.
        error: why the solver gave no valid plan; empty if it did.
    """

    problem: str
    share: float
    budget_bytes: int
    solver: str
    saved_bytes: int
    peak_bytes: int
    us: float
    extra_us: float
    solve_s: float
    bound_us: float
    proven_us: float | None
    error: str = ""

    @property
    def within(self) -> bool:
        return not self.error and self.peak_bytes <= self.budget_bytes

    @property
    def gap(self) -> float | None:
        """Time beyond the proven optimum, a fraction. None over the budget or without a proof."""
        return self.us / self.proven_us - 1 if self.proven_us and self.within else None
