"""Sentences beside a plan: why nothing fits, what would help, and what is assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mstpass.planner.fixed_memory import Sizes, fixed, gradient_bytes, optimizer_temporaries
from mstpass.planner.models import most_positions
from mstpass.planner.request import EXPANDABLE, Request
from mstpass.planner.result import INDUCTOR, MST, Row
from mstpass.planner.training import FLASH, Training

_MOST_RANKS = 2**12


def does_not_fit(request: Request, sizes: Sizes) -> str:
    """The error where no activation fits: the bytes of each part, and changes that would fit."""
    training = request.training
    held = fixed(sizes, training)
    gradients = gradient_bytes(sizes, training)
    temporaries = optimizer_temporaries(sizes, training)
    need = held.total + gradients + temporaries + request.overhead_bytes
    return (
        f"{request.model} does not fit on {gib(request.device_bytes)}: weights "
        f"{gib(held.weights)}, optimizer states {gib(held.optimizer_states)}, gradients "
        f"{gib(gradients)}, gathered {gib(held.gathered)}, the optimizer's step {gib(temporaries)} "
        f"and overhead {gib(request.overhead_bytes)} are "
        f"{gib(need - request.device_bytes)} too much, before any activation. "
        f"{_what_would_fit(request, sizes)}"
    )


def _what_would_fit(request: Request, sizes: Sizes) -> str:
    def fits(**changes: Any) -> bool:
        training = dataclasses.replace(request.training, **changes)
        at_end = gradient_bytes(sizes, training) + optimizer_temporaries(sizes, training)
        need = fixed(sizes, training).total + at_end
        return need + request.overhead_bytes < request.device_bytes

    eightbit, bf16 = {"optimizer": "adamw-8bit"}, {"dtype": "bf16"}
    foreach = request.training.optimizer_step == "foreach"
    found = ["--optimizer-step compiled"] if foreach and fits(optimizer_step="compiled") else []
    found += ["--optimizer adamw-8bit"] if fits(**eightbit) else []
    found += ["--dtype bf16"] if request.training.dtype != "bf16" and fits(**bf16) else []
    if not found and fits(**eightbit, **bf16, master_weights=False):
        found = ["--dtype bf16 --optimizer adamw-8bit without --master-weights"]
    ranks = 2
    while ranks <= _MOST_RANKS and not fits(sharding="zero3", ranks=ranks):
        ranks *= 2
    if ranks <= _MOST_RANKS:
        found.append(f"--sharding zero3 --ranks {ranks}")
    if not found:
        return "No optimizer and no sharding makes it fit: choose a smaller model or more memory."
    return f"It would fit with {', or with '.join(found)}."


def notes(request: Request, config: Any, own: Row, square_bytes: int) -> tuple[str, ...]:
    """The assumptions behind a plan's figures.

    Args:
        own: mst's row.
        square_bytes: of its largest mask or scores of tokens x tokens; 0: there are none.
    """
    return tuple(_notes(request, config, own, square_bytes))


def _notes(request: Request, config: Any, own: Row, square_bytes: int) -> Iterator[str]:
    training, most = request.training, most_positions(config)
    yield (
        "These figures are simulated; nothing was measured on the device. "
        f"{_attention(training, square_bytes)}"
    )
    if request.allocator == EXPANDABLE:
        yield (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when you train. PyTorch's "
            "default allocator leaves gaps between tensors; --allocator caching simulates them."
        )
    if most is not None and own.length > most:
        yield (
            f"{own.length} tokens are more than the model's {most} positions: extend its position "
            "embeddings (rope scaling) before you train at this length."
        )
    if training.optimizer_in_backward:
        yield (
            f"{INDUCTOR} and {MST} hold all gradients until the backward is over, because a "
            "compiled backward returns them together. The other rows free each gradient once the "
            "optimizer has used it."
        )
    if training.gradients_sharded and training.ranks > 1:
        yield (
            f"The rows of {INDUCTOR} and {MST} assume that each gradient is reduced where it is "
            "computed, by collectives in the compiled graphs."
        )
    if own.host_bytes:
        yield (
            f"{gib(own.host_bytes)} of pinned host memory hold saved values, in blocks of powers "
            "of two. Copies run beside computation; what the device waits for them is part of the "
            "extra time."
        )
    if own.fits and own.memory_budget == "0.0":
        yield (
            "This is mst's plan of least memory: no smaller plan is left if the measured peak is "
            "higher than the simulated one."
        )


def _attention(training: Training, square_bytes: int) -> str:
    if training.attention == FLASH:
        return (
            "Attention is FlashAttention-2 as CUDA runs it, its backward's workspace included; "
            "windows and causal masks take no memory. That is attn_implementation="
            "'flash_attention_2', which may not be the model's own."
        )
    own = (
        "Attention is the model's own, as CUDA runs it, in a model that mstpass.compile has "
        "compiled and that is called without an attention mask and without position ids: "
    )
    if not square_bytes:
        return f"{own}it needs no mask, and its backward's workspace is included."
    return (
        f"{own}its masks or scores of tokens x tokens take {gib(square_bytes)} each. A kernel that "
        "knows windows needs none: --attention flash plans with one."
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
