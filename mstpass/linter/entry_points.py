"""The public functions: lint an eager step, a compiled one, or graphs at hand.

What they need is imported on use: torch's flop counter and Inductor take a while to import, and
``import mstpass`` should not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mstpass.linter.errors import LintError
from mstpass.linter.report import LintReport

if TYPE_CHECKING:
    from mstpass.linter.compiled_graphs import Record


def lint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> LintReport:
    """Run ``fn(*args, **kwargs)`` once and count how often each module's forward ran.

    Where ``fn`` runs no backward itself, that of the loss it returns is run: a tensor, or an object
    with a ``loss``, as Hugging Face models return it. The step is a real one: gradients accumulate,
    and an optimizer that ``fn`` steps does so. Compiled functions run eagerly here; see
    `lint_compiled` for their graphs.

    Raises:
        LintError: there was no backward to look at. What ``fn`` raises is passed on.
    """
    from mstpass.linter.eager_findings import lint_trace
    from mstpass.linter.eager_trace import StepTrace
    from mstpass.tracing.names import modules_near

    # Dynamo, meeting a dispatch mode, would leave compiled functions uncompiled for good
    roots = modules_near(fn, (*args, *kwargs.values()))
    with torch.compiler.set_stance("force_eager"), StepTrace(roots) as trace:
        _run(fn, args, kwargs, lambda: trace.ran_backward)
    return lint_trace(trace)


def lint_compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> LintReport:
    """Run ``fn(*args, **kwargs)`` once, compiling it anew, and lint each forward with its backward.

    ``fn`` calls what `torch.compile` returned, with a backend that ends in Inductor (``"mst"``,
    ``"inductor"``). What this process has compiled is forgotten, before and after. A loss that
    ``fn`` returns is treated as by `lint`. Flops are those of matmuls and attention.

    Raises:
        LintError: nothing with a backward was compiled. What ``fn`` raises is passed on.
    """
    from mstpass.linter.compiled_graphs import read_compiled

    def step(record: Record) -> None:
        _run(fn, args, kwargs, lambda: record.has_backward)

    return read_compiled(step)


def lint_graphs(
    forward: fx.Graph | fx.GraphModule, backward: fx.Graph | fx.GraphModule | None = None
) -> LintReport:
    """Read a forward and its backward graph, as a partitioner splits them, or one joint graph.

    Args:
        forward: of ATen ops with ``meta["val"]``, as AOTAutograd makes them. A joint graph goes
            here alone: nothing is recomputed in it yet, only duplicates and dead ops are found.
        backward: placeholders that no forward node has the name of are taken as new values.
    """
    from mstpass.linter.graph_findings import read_graphs

    return read_graphs(forward, backward)


def _run(fn: Callable[..., Any], args: Any, kwargs: Any, ran_backward: Callable[[], bool]) -> None:
    """The step, and the backward of the loss that it returns unless it ran one itself."""
    result = fn(*args, **kwargs)
    if ran_backward():
        return
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise LintError("the step ran no backward and returned no loss; it should do either")
    if not loss.requires_grad:
        raise LintError("the loss that the step returned needs no gradient: there is no backward")
    if loss.numel() != 1:
        raise LintError(f"the loss must be one number; the step returned shape {list(loss.shape)}")
    loss.backward()
