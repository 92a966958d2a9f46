"""How a model is trained: precision, optimizer, sharding, and their bytes per parameter."""

from __future__ import annotations

import dataclasses

SHARDINGS = ("none", "zero1", "zero2", "zero3")
DTYPES = ("bf16", "fp32", "autocast")
MODEL, FLASH = "model", "flash"
ATTENTIONS = (MODEL, FLASH)
ALL = "all"
AS_MODEL, NF4 = "model", "nf4"
WEIGHTS = (AS_MODEL, NF4)
OPTIMIZER_STEPS = ("fused", "compiled", "foreach")
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
        sharding: one of ``SHARDINGS``, the stages of ZeRO.
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
        weights: how the frozen weights of linear layers are held, one of ``WEIGHTS``.
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
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("optimizer_step", self.optimizer_step, OPTIMIZER_STEPS),
            ("sharding", self.sharding, SHARDINGS),
            ("attention", self.attention, ATTENTIONS),
            ("weights", self.weights, WEIGHTS),
        ):
            if value not in known:
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
