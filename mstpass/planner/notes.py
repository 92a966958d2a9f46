"""Sentences beside a plan: what is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mstpass.planner.models import most_positions
from mstpass.planner.request import EXPANDABLE, Request
from mstpass.planner.result import INDUCTOR, MST, Row
from mstpass.planner.training import FLASH, Training


def notes(request: Request, config: Any, own: Row, square_bytes: int) -> Iterator[str]:
    """The assumptions behind a plan's figures.

    Args:
        own: mst's row.
        square_bytes: of its largest mask or scores of tokens x tokens; 0: there are none.
    """
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
    if training.gradient_shards > 1:
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
    for call in own.narrow:
        yield f"This length is too long for a kernel: {call}"
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
    if training.shares:
        return (
            "Attention is that of mstpass.sequence_parallel, as CUDA runs it; the time of its "
            "exchanges and of sharding is estimated."
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
