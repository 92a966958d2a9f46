"""Solvers: ``solve(problem) -> names of the saved values``, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mstpass.partition.problem import CutProblem
from mstpass.partition.solvers.checkpoints import checkpoints
from mstpass.partition.solvers.min_cut import min_cut

Solver = Callable[[CutProblem], frozenset[str]]

SOLVERS: Mapping[str, Solver] = {"min_cut": min_cut, "checkpoints": checkpoints}
DEFAULT, LEAST_MEMORY = "min_cut", "checkpoints"
