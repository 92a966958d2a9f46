"""One row of `mstpass bench solvers`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One solver's plan for one problem and budget.

    Attributes:
        share: where the budget lies between the lowest peak (0) and the free plan's (1).
        extra_us: above the step under ``save_all``.
        bound_us: no plan within the budget takes less.
        proven_us: the least time of a plan within the budget, where that is proven.
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
        """Time above the proven optimum, as a fraction; None without a proof or over the budget."""
        return self.us / self.proven_us - 1 if self.proven_us and self.within else None
