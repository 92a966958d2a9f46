"""The peaks of one plan for batches of several lengths, in words."""

from __future__ import annotations

from collections.abc import Sequence

from mstpass.byte_sizes import bytes_text
from mstpass.plans import Outcome


def by_length_text(outcome: Outcome) -> str:
    """For which batches the plan is made, its peaks there, and for which of them a budget holds."""
    first, *others = outcome.peaks

    def sizes_text(sizes: Sequence[tuple[str, int]]) -> str:
        return " and ".join(f"{size}" for _, size in sizes)

    names = " and ".join(f"{name} up to {size}" for name, size in first.sizes)
    text = f"planned for {names}; simulated peak {bytes_text(first.peak_bytes)}"
    text += "".join(f", {bytes_text(p.peak_bytes)} at {sizes_text(p.sizes)}" for p in others)
    if outcome.budget_holds_for and outcome.budget_holds_for != first.sizes:
        text += f"; the budget holds up to {sizes_text(outcome.budget_holds_for)}"
    return text
