"""``lint``: run an eager training step once and report what it recomputed for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mstpass.extras import UserError
from mstpass.linter.report import LintReport


class LintError(UserError):
    """The step cannot be linted; the message says what to change."""


def lint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> LintReport:
    """Run ``fn(*args, **kwargs)`` once and count how often each module's forward ran.

    Where ``fn`` runs no backward itself, that of the loss it returns is run: a tensor, or an object
    with a ``loss``, as Hugging Face models return it. The step is a real one: gradients accumulate,
    and an optimizer that ``fn`` steps does so. Compiled functions run eagerly here; see
    `lint_compiled` for their graphs.

    Raises:
        LintError: there was no backward to look at. What ``fn`` raises is passed on.
    """
    # flop_counter takes a while to import, and importing mstpass should not
    from mstpass.linter.causes import lint_trace
    from mstpass.linter.trace import StepTrace

    # Dynamo, meeting a dispatch mode, would leave the functions uncompiled for good
    with torch.compiler.set_stance("force_eager"), StepTrace() as trace:
        run_step(fn, args, kwargs, lambda: trace.ran_backward)
    return lint_trace(trace)


def run_step(
    fn: Callable[..., Any], args: Any, kwargs: Any, ran_backward: Callable[[], bool]
) -> None:
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
