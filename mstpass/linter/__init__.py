"""The double-recompute linter: what a training step computes more often than it needs to.

``lint`` runs an eager step and watches it; ``lint_compiled`` reads the graphs of a compiled one;
``lint_graphs`` reads a pair of graphs that you have. See docs/lint.md.
"""

from mstpass.linter.entry_points import lint, lint_compiled, lint_graphs
from mstpass.linter.errors import LintError
from mstpass.linter.report import Finding, LintReport, ModuleRuns

__all__ = [
    "Finding",
    "LintError",
    "LintReport",
    "ModuleRuns",
    "lint",
    "lint_compiled",
    "lint_graphs",
]
