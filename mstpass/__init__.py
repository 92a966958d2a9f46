"""mstpass: a torch.compile backend that trains transformers on long sequences, in chunks."""

from mstpass.linter import Finding, LintReport, lint, lint_compiled, lint_graphs
from mstpass.options import OptionError, Options
from mstpass.plans import ChunkPlan, Rejection
from mstpass.report.report import Report
from mstpass.report.store import reports

__version__ = "0.1.0"
__all__ = [
    "ChunkPlan",
    "Finding",
    "LintReport",
    "OptionError",
    "Options",
    "Rejection",
    "Report",
    "lint",
    "lint_compiled",
    "lint_graphs",
    "reports",
]
