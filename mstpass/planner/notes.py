"""What a plan says in words: why nothing fits and what would help, and what was assumed."""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.planner.accounting import Sizes, Training, fixed
from mstpass.planner.data import EXPANDABLE, INDUCTOR, LEAST, MST, Request, Row
from mstpass.planner.models import most_positions


def held_gradients(sizes: Sizes, training: Training) -> int:
    """What the step's gradients come to at its end."""
    if training.optimizer_in_backward:
        return 0
    divided = training.ranks if training.gradients_divided else 1
    return training.weight_bytes * sizes.parameters // divided


def step_temporaries(sizes: Sizes, training: Training) -> int:
    """What the optimizer's step needs at once."""
    parameters = sizes.parameters
    if training.optimizer_in_backward:
        parameters = max(sizes.each, default=0)
    return int(training.temporary_bytes * parameters / training.states_on)


def too_large(request: Request, sizes: Sizes) -> str:
    """What is too large, by how much, and what would fit."""
    training = request.training
    held, gradients = fixed(sizes, training), held_gradients(sizes, training)
    temporaries = step_temporaries(sizes, training)
    need = held.total + gradients + temporaries + request.overhead_bytes
    return (
        f"{request.model} does not fit on {gib(request.device_bytes)}: weights "
        f"{gib(held.weights)}, optimizer states {gib(held.optimizer_states)}, gradients "
        f"{gib(gradients)}, gathered {gib(held.gathered)}, the optimizer's step {gib(temporaries)} "
        f"and overhead {gib(request.overhead_bytes)} are "
        f"{gib(need - request.device_bytes)} too much, before any activation. "
        f"{_help(request, sizes)}"
    )


def _help(request: Request, sizes: Sizes) -> str:
    """What would fit, of what can be changed."""

    def fits(**changes: Any) -> bool:
        training = dataclasses.replace(request.training, **changes)
        at_end = held_gradients(sizes, training) + step_temporaries(sizes, training)
        need = fixed(sizes, training).total + at_end
        return need + request.overhead_bytes < request.device_bytes

    eightbit, bf16 = {"optimizer": "adamw-8bit"}, {"dtype": "bf16"}
    foreach = request.training.optimizer_step == "foreach"
    found = ["--optimizer-step fused"] if foreach and fits(optimizer_step="fused") else []
    found += ["--optimizer adamw-8bit"] if fits(**eightbit) else []
    found += ["--dtype bf16"] if request.training.dtype != "bf16" and fits(**bf16) else []
    if not found and fits(**eightbit, **bf16, master_weights=False):
        found = ["--dtype bf16 --optimizer adamw-8bit without master weights"]
    ranks = next((n for n in (2**i for i in range(1, 13)) if fits(sharding="zero3", ranks=n)), None)
    if ranks is not None:
        found.append(f"--sharding zero3 --ranks {ranks}")
    return f"Would fit: {', or '.join(found)}." if found else "No sharding or optimizer helps."


def notes(request: Request, config: Any, own: Row) -> tuple[str, ...]:
    training, most = request.training, most_positions(config)
    found = [
        "Attention is FlashAttention-2 as CUDA runs it, with its backward's workspace; its windows "
        "and masks need no memory. Nothing was measured on the device.",
    ]
    if request.allocator == EXPANDABLE:
        found.append(
            "As with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. PyTorch's default leaves "
            "gaps between tensors: --allocator caching."
        )
    if most is not None and own.length > most:
        found.append(
            f"{own.length} tokens are more than the model's {most} positions: it needs other "
            "position embeddings (rope scaling) to make sense of them."
        )
    if training.optimizer_in_backward:
        found.append(
            f"{INDUCTOR} and {MST} hold all gradients until backward is over, as a compiled "
            "backward returns them together; the other rows drop each once the optimizer used it."
        )
    if training.gradients_divided and training.ranks > 1:
        found.append(
            f"{INDUCTOR} and {MST} are as if gradients were reduced where they are made. A graph "
            "with collectives in it is left to torch's partitioner."
        )
    if own.fits and own.memory_budget == str(LEAST):
        found.append("mst's plan is the one of least memory: there is no room for a measured peak "
                     "that is higher than the simulated one.")  # fmt: skip
    return tuple(found)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
