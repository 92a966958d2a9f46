"""mstpass: a torch.compile backend that trains transformers on long sequences, in chunks.

Names are imported when they are asked for: the partition problem and its solvers need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mstpass.integrations import accelerate_backends, after_import

if TYPE_CHECKING:
    from mstpass import gpus, measure
    from mstpass.compiling import compile, uncompile
    from mstpass.explainer import ExplainError, explain, explain_all
    from mstpass.fitting import Fits, fits
    from mstpass.linter import Finding, LintReport, lint, lint_compiled, lint_graphs
    from mstpass.options import OptionError, Options
    from mstpass.plans import ChunkPlan, Rejection
    from mstpass.problem.solver_registry import register_solver
    from mstpass.report.report import Report
    from mstpass.report.store import reports
    from mstpass.returned_logits import DroppedLogits, DroppedLogitsError
    from mstpass.sequences import (
        sequence_parallel,
        sequence_parallel_attention,
        shard_sequence,
    )
    from mstpass.trainers import TrainerError, compile_trainer

__version__ = "0.2.0"
__all__ = [
    "ChunkPlan",
    "DroppedLogits",
    "DroppedLogitsError",
    "ExplainError",
    "Finding",
    "Fits",
    "LintReport",
    "OptionError",
    "Options",
    "Rejection",
    "Report",
    "TrainerError",
    "compile",
    "compile_trainer",
    "explain",
    "explain_all",
    "fits",
    "gpus",
    "lint",
    "lint_compiled",
    "lint_graphs",
    "measure",
    "register_solver",
    "reports",
    "sequence_parallel",
    "sequence_parallel_attention",
    "shard_sequence",
    "uncompile",
]
_NAMES = {  # of each module
    "compiling": ("compile", "uncompile"),
    "explainer": ("ExplainError", "explain", "explain_all"),
    "fitting": ("Fits", "fits"),
    "linter": ("Finding", "LintReport", "lint", "lint_compiled", "lint_graphs"),
    "options": ("OptionError", "Options"),
    "plans": ("ChunkPlan", "Rejection"),
    "problem.solver_registry": ("register_solver",),
    "report.report": ("Report",),
    "report.store": ("reports",),
    "returned_logits": ("DroppedLogits", "DroppedLogitsError"),
    "sequences": ("sequence_parallel", "sequence_parallel_attention", "shard_sequence"),
    "trainers": ("TrainerError", "compile_trainer"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_PUBLIC_MODULES = ("gpus", "measure")  # as in `mstpass.measure.peak_bytes`


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# so that both know the backend's name; neither is imported here
accelerate_backends.register()
after_import.register()
