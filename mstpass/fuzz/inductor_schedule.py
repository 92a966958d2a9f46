"""The peak of a step that Inductor schedules alone, without kernels: nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx_inner

from mstpass.hook_checks import SCHEDULE_HOOK
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.torch_internals.inductor import compile_fx
from mstpass.torch_internals.settings import backward_compiled_at_once, without_padding


class _Scheduled(Exception):
    """Forward and backward are scheduled: what comes after it makes kernels."""


class _GraphScheduled(Exception):
    """One graph is."""


def scheduled_alone(step: Callable[..., Any], *args: Any) -> int | None:
    """Bytes at the peak of a step by Inductor's own schedule; None if it cannot be read.

    Args:
        step: a function of one graph, whose first result is a loss.
    """
    reader = ReadSchedule()

    def schedule(nodes: list[Any]) -> Any:
        reader(nodes)
        raise _GraphScheduled

    def schedule_only(module: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        before = reader.graphs
        try:
            compile_fx_inner(module, inputs, **more)
        except Exception:
            if reader.graphs == before:
                raise
        if more.get("is_backward"):
            raise _Scheduled
        return lambda values: None

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        patches = {SCHEDULE_HOOK: schedule, "fx_graph_cache": False, **without_padding()}
        with backward_compiled_at_once():
            compile_fx(module, list(inputs), inner_compile=schedule_only, config_patches=patches)

    torch.compiler.reset()
    try:
        torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(*args)
    except Exception:
        if reader.graphs < 2:
            raise
    return reader.peak_bytes
