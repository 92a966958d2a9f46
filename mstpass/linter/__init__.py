"""The linter: finds what a training step computes more often than it needs to.

``lint`` runs an eager step and records its ops (eager_trace.py, eager_findings.py).
``lint_compiled`` compiles a step and reads its graphs (compiled_graphs.py, graph_findings.py).
``lint_graphs`` reads a pair of graphs. See docs/lint.md.
"""

from mstpass.linter.entry_points import lint, lint_compiled, lint_graphs
from mstpass.linter.report import Finding, LintError, LintReport, ModuleRuns

__all__ = [
    "Finding",
    "LintError",
    "LintReport",
    "ModuleRuns",
    "lint",
    "lint_compiled",
    "lint_graphs",
]
