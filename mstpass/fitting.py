"""``mstpass.fits``: whether a step fits on a GPU, without the GPU."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mstpass.byte_sizes import bytes_text, parse_bytes
from mstpass.errors import UserError
from mstpass.explainer.plan_step import explain_parts
from mstpass.gpus import gpu as gpu_of
from mstpass.memory.allocation import rounded
from mstpass.planner.request import OVERHEAD
from mstpass.planner.training import OPTIMIZERS
from mstpass.report.report import Report
from mstpass.torch_internals.fake_tensors import storage_key


@dataclasses.dataclass(frozen=True)
class Fits:
    """The answer of `mstpass.fits`: true if the step fits.

    Attributes:
        gpu: the kind of GPU.
        memory_bytes: memory of the GPU.
        inputs_bytes: weights, buffers and data that the step is given.
        states_bytes: of the optimizer.
        step_bytes: the peak of forward and backward, gradients included.
        overhead_bytes: memory that no tensor gets.
        report: the plan.
    """

    gpu: str
    memory_bytes: int
    inputs_bytes: int
    states_bytes: int
    step_bytes: int
    overhead_bytes: int
    report: Report = dataclasses.field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the GPU at the peak of a step."""
        return self.inputs_bytes + self.states_bytes + self.step_bytes + self.overhead_bytes

    def __bool__(self) -> bool:
        return self.peak_bytes <= self.memory_bytes

    @property
    def text(self) -> str:
        """The answer in two lines."""
        spare = self.memory_bytes - self.peak_bytes
        left = f"{bytes_text(abs(spare))} {'are left' if spare >= 0 else 'too much'}"
        return (
            f"{'yes' if self else 'no'}: {bytes_text(self.peak_bytes)} of "
            f"{bytes_text(self.memory_bytes)} ({self.gpu}); {left}\n"
            f"weights and inputs {bytes_text(self.inputs_bytes)}, optimizer states "
            f"{bytes_text(self.states_bytes)}, forward and backward {bytes_text(self.step_bytes)}, "
            f"overhead {bytes_text(self.overhead_bytes)}"
        )

    def __str__(self) -> str:
        return self.text


def fits(
    fn: Callable[..., Any],
    *args: Any,
    gpu: str = "h100",
    options: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    memory: int | str | None = None,
    overhead: int | str = OVERHEAD,
    **kwargs: Any,
) -> Fits:
    """Whether ``torch.compile(fn, backend="mst", options=options)`` can train on a GPU.

    ``fn(*args, **kwargs)`` returns the loss. It is traced as `mstpass.explain` does: nothing is
    computed, and neither the GPU nor the memory is needed. With the default ``memory_budget``,
    the plan may take what weights, optimizer states and overhead leave of the GPU.

    Args:
        gpu: the kind of GPU; ``mstpass.gpus`` has the names.
        options: as for ``torch.compile``.
        optimizer: whose states count: as of ``mstpass plan --optimizer``.
        memory: of the GPU, such as ``"40GiB"``; None: that of its kind.
        overhead: memory that no tensor gets, such as CUDA's context.

    Raises:
        ExplainError: ``fn`` cannot be traced as one graph, has no backward, or raises an error.
        OptionError: an unknown option or a wrong value.
        UserError: an unknown GPU or optimizer, or a text that is not a size.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer={optimizer!r} is unknown; known are {', '.join(OPTIMIZERS)}")
    kind = gpu_of(gpu)
    memory_bytes = kind.memory_bytes if memory is None else _bytes(memory, "memory")
    overhead_bytes = _bytes(overhead, "overhead")
    held: list[tuple[int, int, int]] = []

    def left_of(inputs: Sequence[Any]) -> int:
        held.append(_held(inputs, optimizer))
        return max(1, memory_bytes - overhead_bytes - held[-1][0] - held[-1][1])

    with warnings.catch_warnings():
        # the answer says so
        warnings.filterwarnings("ignore", "mstpass: memory_budget=.* cannot be met")
        (report,) = explain_parts(
            fn, args, kwargs, options, False, "cuda", kind.name, left_of, fullgraph=True
        )
    inputs_bytes, states_bytes, gradient_bytes = held[-1]
    peak_bytes = report.outcome.peak_bytes
    if peak_bytes is None:
        raise UserError("the peak of this step is not known: a size depends on data")
    step_bytes = max(peak_bytes, gradient_bytes)  # all of them exist when the optimizer steps
    return Fits(
        kind.name, memory_bytes, inputs_bytes, states_bytes, step_bytes, overhead_bytes, report
    )


def _held(inputs: Sequence[Any], optimizer: str) -> tuple[int, int, int]:
    """Bytes of a graph's inputs, of the states of what is trained, and of its gradients."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    storages = {storage_key(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}
    trained = [x for x in tensors if x.requires_grad]
    states = OPTIMIZERS[optimizer]
    return (
        sum(map(rounded, storages.values())),
        int(sum(states.state_bytes(x.itemsize) * x.numel() for x in trained)),
        sum(x.nbytes for x in trained),
    )


def _bytes(size: int | str, name: str) -> int:
    found = parse_bytes(size) if isinstance(size, str) else size
    if found is None:
        raise UserError(f"{name}={size!r} is not a size such as '80GiB'")
    return found
