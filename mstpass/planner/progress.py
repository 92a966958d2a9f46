"""How far a plan is: its pieces of work, what each takes, and how much of each is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mstpass.planner.request import Request
from mstpass.planner.result import CHECKPOINT, EAGER, INDUCTOR, MST, RECIPE

Report = Callable[[str, float, str], None]
"""Gets the name of a piece of work, the share of it that is done (0 to 1), and what comes next."""

GUESS, SEARCH, SPLIT, COMBINATIONS = "guess", "search", "split", "combinations"
WHOLE = "whole model"
_SECONDS = {  # of a model of 8 billion parameters; the bar needs their ratios
    EAGER: 5,
    CHECKPOINT: 6,
    RECIPE: 16,
    INDUCTOR: 1,
    GUESS: 8,
    SEARCH: 22,
    MST: 20,
    WHOLE: 20,
    SPLIT: 60,
    COMBINATIONS: 40,
}


def silent(piece: str, done: float, what: str) -> None:
    """A report that nobody reads."""


def pieces(request: Request) -> Mapping[str, float]:
    """The pieces of work of a request, each with its share of all work."""
    left_out = set() if request.compares_eager else {EAGER, CHECKPOINT, RECIPE}
    left_out |= {INDUCTOR} if request.alone else set()
    left_out |= set() if request.compares_splits else {SPLIT}
    left_out |= {GUESS, SEARCH} if request.length is not None or request.search else set()
    left_out |= set() if request.search else {COMBINATIONS}
    seconds = {name: s for name, s in _SECONDS.items() if name not in left_out}
    return {name: s / sum(seconds.values()) for name, s in seconds.items()}


class Steps:
    """Reports the steps of one piece, of which there are about ``expected``."""

    def __init__(self, report: Report, piece: str, expected: int):
        self._report, self._piece, self._expected = report, piece, expected
        self._done, self._started = 0.0, False

    def begin(self, what: str) -> None:
        """The next step begins: the one before it is done."""
        if self._started:  # a search may take more steps than expected, so the bar slows down
            self._done += (1 - self._done) / self._expected
        self._started = True
        self._report(self._piece, self._done, what)

    def end(self) -> None:
        """The piece is done."""
        self._report(self._piece, 1.0, "")
