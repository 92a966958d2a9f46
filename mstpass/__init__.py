"""mstpass: a torch.compile backend that trains transformers on long sequences, in chunks.

Names are imported when they are asked for: the partition problem and its solvers need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mstpass.integrations import accelerate_backends, after_import

if TYPE_CHECKING:
    from mstpass import gpus as gpus
    from mstpass import measure as measure
    from mstpass.compiling import compile as compile
    from mstpass.compiling import uncompile as uncompile
    from mstpass.explainer import ExplainError as ExplainError
    from mstpass.explainer import explain as explain
    from mstpass.explainer import explain_all as explain_all
    from mstpass.fitting import Fits as Fits
    from mstpass.fitting import fits as fits
    from mstpass.linter import Finding as Finding
    from mstpass.linter import LintReport as LintReport
    from mstpass.linter import lint as lint
    from mstpass.linter import lint_compiled as lint_compiled
    from mstpass.linter import lint_graphs as lint_graphs
    from mstpass.options import OptionError as OptionError
    from mstpass.options import Options as Options
    from mstpass.plans import ChunkPlan as ChunkPlan
    from mstpass.plans import Rejection as Rejection
    from mstpass.problem.solver_registry import register_solver as register_solver
    from mstpass.report.report import Report as Report
    from mstpass.report.store import reports as reports
    from mstpass.returned_logits import DroppedLogits as DroppedLogits
    from mstpass.returned_logits import DroppedLogitsError as DroppedLogitsError
    from mstpass.sequences import sequence_parallel as sequence_parallel
    from mstpass.sequences import sequence_parallel_attention as sequence_parallel_attention
    from mstpass.sequences import shard_sequence as shard_sequence
    from mstpass.trainers import TrainerError as TrainerError
    from mstpass.trainers import compile_trainer as compile_trainer

__version__ = "0.2.0"
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
__all__ = [*_HOMES, *_PUBLIC_MODULES]


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
