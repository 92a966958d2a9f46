"""What a training step holds on one device besides its activations.

With P parameters, of which the largest layer has P_layer and all that is no layer (embeddings, last
norm, head) P_rest, w bytes a weight, s bytes of optimizer states a parameter and R ranks::

                weights          gradients        states     gathered
    none        w P              w P              s P
    zero1       w P              w P              s P / R
    zero2       w P              w P / R          s P / R    w max(P_layer, P_rest)
    zero3       w P / R          w P / R          s P / R    w max(P_layer, P_rest)
                                                             + w (P_rest + 2 P_layer)

The stages are those of ZeRO (arXiv 1910.02054, section 5). *Gathered* is what exists whole for a
while: the gradients of one unit until they are reduced (zero2 and zero3), and under zero3 the
weights of the layer that runs, those of the next one (prefetched), and the unit around the layers,
which stays gathered from forward to backward (torch's FSDP2 does that with its root).

Gradients are part of the step: they are counted where the step is simulated, as they come.
"""

from __future__ import annotations

import dataclasses

SHARDINGS = ("none", "zero1", "zero2", "zero3")
DTYPES = ("bf16", "fp32", "autocast")
OPTIMIZER_STEPS = ("fused", "foreach")
_SCALE_BYTES = 4 / 256  # 8-bit states: an fp32 scale for each block of 256 (bitsandbytes)
_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """States of one parameter: ``values`` of ``bytes_each``; None: as wide as the weight.

    ``temporaries``: as many values more while a step in torch's default way runs, which goes over
    all parameters at once (the square roots in torch/optim/adam.py, ``_multi_tensor_adam``).
    """

    values: int
    bytes_each: float | None
    text: str
    temporaries: int = 0

    def state_bytes(self, weight_bytes: int) -> float:
        return self.values * (weight_bytes if self.bytes_each is None else self.bytes_each)


OPTIMIZERS = {
    "adamw": Optimizer(2, 4, "two fp32 states", temporaries=1),
    "adamw-bf16": Optimizer(2, 2, "two bf16 states", temporaries=1),
    "adamw-8bit": Optimizer(2, 1 + _SCALE_BYTES, "two 8-bit states, a scale for each 256"),
    "sgd-momentum": Optimizer(1, None, "one state as wide as the weight"),
    "sgd": Optimizer(0, 0, "no states"),
    "none": Optimizer(0, 0, "no states"),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of parameters: all, of the largest layer, of what is no layer; of each tensor."""

    parameters: int
    layer: int
    rest: int
    each: tuple[int, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        dtype: ``"bf16"`` or ``"fp32"`` of weights and activations; ``"autocast"``: fp32 weights
            under bf16 autocast.
        master_weights: an fp32 copy of bf16 weights.
        optimizer_in_backward: each gradient is used and dropped as soon as it is whole.
        optimizer_step: ``"fused"`` allocates nothing, ``"foreach"`` what ``Optimizer`` says.
        ranks: devices that share what ``sharding`` divides.
        batch: sequences on one device.
        document: tokens of a sequence that are no padding; None: all.
    """

    dtype: str = "bf16"
    optimizer: str = "adamw"
    master_weights: bool = False
    optimizer_in_backward: bool = False
    optimizer_step: str = "fused"
    sharding: str = "none"
    ranks: int = 1
    batch: int = 1
    document: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("optimizer_step", self.optimizer_step, OPTIMIZER_STEPS),
            ("sharding", self.sharding, SHARDINGS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.ranks < 1 or self.batch < 1:
            raise ValueError(f"ranks={self.ranks}, batch={self.batch}: both are at least 1")

    @property
    def weight_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def gradients_divided(self) -> bool:
        return self.sharding in ("zero2", "zero3")

    @property
    def state_bytes(self) -> float:
        """Of one parameter, master weight included."""
        master = _MASTER_BYTES if self.master_weights and self.dtype == "bf16" else 0
        return OPTIMIZERS[self.optimizer].state_bytes(self.weight_bytes) + master

    @property
    def temporary_bytes(self) -> float:
        """Of one parameter, while the optimizer's step runs."""
        optimizer = OPTIMIZERS[self.optimizer]
        if self.optimizer_step == "fused" or optimizer.bytes_each is None:
            return 0.0
        return optimizer.temporaries * optimizer.bytes_each

    @property
    def weights_on(self) -> int:
        """Ranks that share the weights."""
        return self.ranks if self.sharding == "zero3" else 1

    @property
    def states_on(self) -> int:
        """Ranks that share the optimizer's states."""
        return 1 if self.sharding == "none" else self.ranks


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Bytes that one device holds all through the step; see the module's table."""

    weights: int
    optimizer_states: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer_states + self.gathered


def fixed(sizes: Sizes, training: Training) -> Fixed:
    """What one device holds besides gradients and activations. Master weights count as states."""
    w = training.weight_bytes
    gathered = 0
    if training.ranks > 1 and training.gradients_divided:
        gathered = w * max(sizes.layer, sizes.rest)
        if training.sharding == "zero3":
            gathered += w * (sizes.rest + 2 * sizes.layer)
    return Fixed(
        weights=-(-w * sizes.parameters // training.weights_on),
        optimizer_states=int(-(-training.state_bytes * sizes.parameters // training.states_on)),
        gathered=gathered,
    )


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step holds at the moment of its peak, in bytes.

    Attributes:
        saved: what the forward keeps for the backward.
        logits: tensors of tokens x vocabulary, whether saved or not.
        loops: one chunk of the loop that runs.
        other: activations and their gradients, recomputed values, workspaces.
        temporaries: of the optimizer's step.
        gaps: what the allocator holds between tensors.
    """

    gradients: int = 0
    saved: int = 0
    logits: int = 0
    loops: int = 0
    other: int = 0
    temporaries: int = 0
    gaps: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))
