"""The linter: finds what a training step computes more often than it needs to.

``lint`` runs an eager step and records its ops (eager_trace.py, eager_findings.py).
``lint_compiled`` compiles a step and reads its graphs (graph_findings.py). ``lint_graphs`` reads a
pair of graphs. See docs/lint.md.

What these need is imported on use, so that ``import mstpass`` stays fast: torch's flop counter and
Inductor take long to import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.linter.report import Finding as Finding
from mstpass.linter.report import LintError as LintError
from mstpass.linter.report import LintReport as LintReport
from mstpass.linter.report import ModuleRuns as ModuleRuns


def lint(
    fn: Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> LintReport:
    """Run ``fn(*args, **kwargs)`` once and count how often each module's forward ran.

    If ``fn`` runs no backward, it must return a loss, and `lint` runs the backward of that loss.
    A loss is a tensor, or an object with an attribute ``loss``, such as the output of a Hugging
    Face model. Afterwards everything is as it was: gradients, weights, buffers, optimizers, random
    states (unchanged.py says what is kept). Compiled functions run eagerly here; `lint_compiled`
    reads their graphs.

    Args:
        device: run the step on fake tensors of this device, for all tensors that it has: nothing is
            computed, and everything stays as it was. ``"cuda"`` needs no GPU.
        gpu: the kind of GPU, as of `explain`.

    Raises:
        LintError: the step has no backward. Exceptions of ``fn`` are passed on.
        UserError: an unknown device or kind of GPU.
    """
    from mstpass.linter.eager_findings import lint_trace
    from mstpass.linter.eager_trace import StepTrace
    from mstpass.linter.unchanged import unchanged
    from mstpass.tracing.devices import on_fake_tensors
    from mstpass.tracing.names import modules_near

    # Under a dispatch mode Dynamo gives up on compiled functions, and never compiles them later.
    roots = modules_near(fn, (*args, *kwargs.values()))
    is_real = device is None and gpu is None
    with (
        unchanged((fn, args, kwargs), True) if is_real else contextlib.nullcontext(),
        on_fake_tensors((fn, args, kwargs), device, gpu) as (step, step_args, step_kwargs),
        torch.compiler.set_stance("force_eager"),
        StepTrace(roots) as trace,
    ):
        _run(step, step_args, step_kwargs, lambda: trace.ran_backward)
    return lint_trace(trace)


def lint_compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> LintReport:
    """Compile and run ``fn(*args, **kwargs)`` once, and lint each forward with its backward.

    ``fn`` must call a function that `torch.compile` returned with a backend that ends in Inductor
    (``"mst"`` or ``"inductor"``). `lint_compiled` resets the compiler before and after the step, so
    all functions of this process compile afresh. Else everything is as it was, as after `lint`;
    meanwhile the host holds a copy of the step's tensors. A loss that ``fn`` returns is treated as
    in `lint`. Flops are those of matmuls and attention.

    Raises:
        LintError: no graph with a backward was compiled. Exceptions of ``fn`` are passed on.
    """
    from mstpass.linter.graph_findings import read_compiled
    from mstpass.linter.unchanged import unchanged

    with unchanged((fn, args, kwargs), False):
        return read_compiled(lambda ran_backward: _run(fn, args, kwargs, ran_backward))


def lint_graphs(
    forward: fx.Graph | fx.GraphModule, backward: fx.Graph | fx.GraphModule | None = None
) -> LintReport:
    """Lint a forward and a backward graph as a partitioner splits them, or one joint graph.

    Args:
        forward: a graph of ATen ops with ``meta["val"]``, as AOTAutograd makes it. A joint graph is
            passed here, without ``backward``. It recomputes nothing yet, so only duplicates and
            dead ops are found in it.
        backward: its saved values are the placeholders that have the name of a forward node. All
            other placeholders count as new values.
    """
    from mstpass.linter.graph_findings import read_graphs

    return read_graphs(forward, backward)


def _run(fn: Callable[..., Any], args: Any, kwargs: Any, ran_backward: Callable[[], bool]) -> None:
    """Run the step and, if it has run no backward, the backward of the loss that it returns."""
    result = fn(*args, **kwargs)
    if ran_backward():
        return
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise LintError(
            "the step ran no backward and returned no loss: call loss.backward() in it, "
            "or return the loss"
        )
    if not loss.requires_grad:
        raise LintError(
            "the loss that the step returned needs no gradient: make a parameter or an input "
            "require one"
        )
    if loss.numel() != 1:
        raise LintError(
            f"the step must return a loss of one number; it returned shape {list(loss.shape)}"
        )
    loss.backward()
