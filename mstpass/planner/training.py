"""How a model is trained: precision, optimizer, sharding, and their bytes per parameter.

Bytes of a training step on one device that do not depend on the sequence length.

With P parameters, of which the largest layer has P_layer and the modules outside of the layers
(embeddings, last norm, head) have P_rest, w bytes per weight, s bytes of optimizer states per
parameter, and R ranks::

                weights          gradients        states     gathered
    none        w P              w P              s P
    zero1       w P              w P              s P / R
    zero2       w P              w P / R          s P / R    w max(P_layer, P_rest)
    zero3       w P / R          w P / R          s P / R    w max(P_layer, P_rest)
                                                             + w (P_rest + 2 P_layer)

The stages are those of ZeRO (arXiv 1910.02054, section 5). *Gathered* tensors exist in full for a
while. Under zero2 and zero3 these are the gradients of one unit (a layer, or the modules outside of
the layers) until they are reduced. Under zero3 they are also the weights of the layer that runs, of
the next layer, which is prefetched, and of the modules outside of the layers, which stay gathered
from forward to backward (as torch's FSDP2 does with its root module).

P are the parameters that are trained. Frozen ones have neither gradients nor states; their bytes,
which quantization may make fewer than w each, add to the weights and to what zero3 gathers.

Gradients do not count as fixed: the simulated step allocates them while it runs.
"""

from __future__ import annotations

import dataclasses

MODEL, FLASH = "model", "flash"
ALL = "all"
AS_MODEL, NF4 = "model", "nf4"
_SCALE_BYTES = 4 / 256  # 8-bit states: an fp32 scale for each block of 256 (bitsandbytes)
_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The states that an optimizer holds for each parameter.

    Attributes:
        values: number of states per parameter.
        bytes_each: bytes of one state; None: a state has the dtype of the weight.
        text: the states in words, for tables and ``--help``.
        temporaries: further values per parameter that exist while torch's default ("foreach") step
            runs. It updates all parameters at once, so their square roots exist together
            (torch/optim/adam.py, ``_multi_tensor_adam``).
    """

    values: int
    bytes_each: float | None
    text: str
    temporaries: int = 0

    def state_bytes(self, weight_bytes: int) -> float:
        """Bytes of all states of one parameter, whose weight takes ``weight_bytes``."""
        return self.values * (weight_bytes if self.bytes_each is None else self.bytes_each)


OPTIMIZERS = {
    "adamw": Optimizer(2, 4, "two fp32 states", temporaries=1),
    "adamw-bf16": Optimizer(2, 2, "two bf16 states", temporaries=1),
    "adamw-8bit": Optimizer(2, 1 + _SCALE_BYTES, "two 8-bit states, one scale per 256 values"),
    "sgd-momentum": Optimizer(1, None, "one state in the weight's dtype"),
    "sgd": Optimizer(0, 0, "no states"),
    "none": Optimizer(0, 0, "no states"),
}

CHOICES = {  # of attributes of `Training`
    "dtype": ("bf16", "fp32", "autocast"),
    "optimizer": tuple(OPTIMIZERS),
    "optimizer_step": ("fused", "compiled", "foreach"),
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "attention": (MODEL, FLASH),
    "weights": (AS_MODEL, NF4),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        dtype: ``"bf16"`` or ``"fp32"``: dtype of weights and activations. ``"autocast"``: fp32
            weights under bf16 autocast.
        optimizer: a key of ``OPTIMIZERS``.
        master_weights: whether the optimizer keeps an fp32 copy of bf16 weights.
        optimizer_in_backward: whether the optimizer uses and frees each gradient as soon as the
            backward has finished it.
        optimizer_step: ``"fused"`` and ``"compiled"`` (``torch.compile(optimizer.step)``) allocate
            nothing; ``"foreach"`` allocates ``Optimizer.temporaries``.
        sharding: the stages of ZeRO.
        ranks: number of devices that the sharding divides by.
        replicas: number of such groups of devices, each with everything that the others have.
        sequence_ranks: number of devices that share each sequence.
        head_groups: number of groups of heads, for which their attention runs one after the other.
        batch: sequences per device.
        document: number of tokens of a sequence that are not padding; None: all of them.
        attention: ``"model"``: what transformers chooses for the model, with the masks that a
            compiled model builds for it. ``"flash"``: FlashAttention-2, which needs no masks.
        lora: the rank of adapters beside frozen weights; 0: all weights are trained.
        target: the linear layers that have adapters, by name: ``"q_proj,v_proj"``; or ``ALL``.
        weights: how the frozen weights of linear layers are held.
    """

    dtype: str = "bf16"
    optimizer: str = "adamw"
    master_weights: bool = False
    optimizer_in_backward: bool = False
    optimizer_step: str = "fused"
    sharding: str = "none"
    ranks: int = 1
    replicas: int = 1
    sequence_ranks: int = 1
    head_groups: int = 1
    batch: int = 1
    document: int | None = None
    attention: str = MODEL
    lora: int = 0
    target: str = ALL
    weights: str = AS_MODEL

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.ranks < 1 or self.batch < 1:
            raise ValueError(f"ranks={self.ranks}, batch={self.batch}: both must be at least 1")
        if self.gpus % self.sequence_ranks:
            raise ValueError(f"sequence_ranks={self.sequence_ranks} do not divide {self.gpus} GPUs")
        if self.weights != AS_MODEL and not self.lora:
            raise ValueError(f"weights={self.weights!r} have no gradients: they need lora")
        if self.document is not None and self.attention != FLASH:
            raise ValueError(
                f"document={self.document} needs attention={FLASH!r}: it skips padding"
            )

    @property
    def gpus(self) -> int:
        """Number of devices in all."""
        return self.ranks * self.replicas

    @property
    def data_ranks(self) -> int:
        """Number of groups of devices that have sequences of their own."""
        return self.gpus // self.sequence_ranks

    @property
    def shares(self) -> bool:
        """Whether devices share sequences."""
        return self.sequence_ranks > 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def gradient_shards(self) -> int:
        """Number of ranks that the gradients are divided among, once they are reduced."""
        return self.ranks if self.sharding in ("zero2", "zero3") else 1

    @property
    def state_bytes(self) -> float:
        """Optimizer states of one parameter, its fp32 master weight included."""
        master = _MASTER_BYTES if self.master_weights and self.dtype == "bf16" else 0
        return OPTIMIZERS[self.optimizer].state_bytes(self.weight_bytes) + master

    @property
    def temporary_bytes(self) -> float:
        """Bytes per parameter that exist only while the optimizer's step runs."""
        optimizer = OPTIMIZERS[self.optimizer]
        if self.optimizer_step != "foreach" or optimizer.bytes_each is None:
            return 0.0
        return optimizer.temporaries * optimizer.bytes_each

    @property
    def weight_shards(self) -> int:
        """Number of ranks that the weights are divided among."""
        return self.ranks if self.sharding == "zero3" else 1

    @property
    def state_shards(self) -> int:
        """Number of ranks that the optimizer's states are divided among."""
        return 1 if self.sharding == "none" else self.ranks


# ---- fixed memory --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Frozen:
    """Weights that are not trained.

    Attributes:
        parameters: how many there are.
        layer_bytes: of those of the largest layer.
        rest_bytes: of those outside of the layers.
        each: bytes of each tensor.
    """

    parameters: int = 0
    layer_bytes: int = 0
    rest_bytes: int = 0
    each: tuple[int, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model that are trained.

    Attributes:
        parameters: all of them.
        layer: those of the largest layer.
        rest: those outside of the layers.
        each: those of each weight tensor.
        frozen: the other ones.
    """

    parameters: int
    layer: int
    rest: int
    each: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    frozen: Frozen = Frozen()

    @property
    def of_model(self) -> int:
        """Number of all parameters."""
        return self.parameters + self.frozen.parameters

    def weight_bytes(self, training: Training) -> int:
        """Bytes of all weights."""
        return training.weight_bytes * self.parameters + sum(self.frozen.each)

    def gradient_bytes(self, training: Training) -> int:
        """Bytes of all gradients."""
        return training.weight_bytes * self.parameters


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Bytes that one device holds during the whole step; the formulas are above."""

    weights: int
    optimizer_states: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer_states + self.gathered


def fixed(sizes: Sizes, training: Training) -> Fixed:
    """Bytes that one device holds besides gradients and activations.

    Master weights count as optimizer states.
    """
    w = training.weight_bytes
    gathered = 0
    if training.gradient_shards > 1:
        gathered = w * max(sizes.layer, sizes.rest)
        if training.sharding == "zero3":
            gathered += w * (sizes.rest + 2 * sizes.layer)
            gathered += sizes.frozen.rest_bytes + 2 * sizes.frozen.layer_bytes
    return Fixed(
        weights=-(-sizes.weight_bytes(training) // training.weight_shards),
        optimizer_states=int(-(-training.state_bytes * sizes.parameters // training.state_shards)),
        gathered=gathered,
    )
