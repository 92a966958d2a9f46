"""Trains one model under several backends, with the same weights and the same batches.

Each contender runs a step before any of them runs the next step, so that noise on the machine
affects all alike. The loss function is compiled, not the module, so that the logits are no output
of the graph. The optimizer is neither compiled nor timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mstpass.measure import Timing, peak_bytes, synchronize

BACKENDS = {"eager": None, "Inductor": "inductor", "mst": "mst"}
_WARMUP_STEPS = 5
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setup:
    """Sizes of model and batch."""

    vocabulary: int
    layers: int = 4
    width: int = 256
    mlp_width: int = 1024
    heads: int = 4
    batch: int = 2
    length: int = 1024

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return (
            f"Llama: {self.layers} layers, width {self.width}, MLP {self.mlp_width}, "
            f"vocabulary {self.vocabulary:,}; {self.batch} x {self.length} tokens a step, fp32"
        )


@dataclass(frozen=True)
class Result:
    """The figures of one contender; times and peak are those of forward + backward."""

    name: str
    losses: tuple[float, ...]
    first_step_s: float
    timing: Timing
    peak_bytes: int

    @property
    def peak_mib(self) -> float:
        return self.peak_bytes / 2**20

    @property
    def step_s(self) -> float:
        return self.timing.median_s

    def max_loss_difference(self, other: Result) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


@dataclass
class Contender:
    """One model under one backend: its loss function, optimizer, and figures so far."""

    name: str
    loss_fn: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    device: torch.device
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def forward_backward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        loss = self.loss_fn(ids_BS)
        loss.backward()
        return loss.detach()

    def step(self, ids_BS: torch.Tensor) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.forward_backward(ids_BS)
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def result(self, ids_BS: torch.Tensor) -> Result:
        peak = peak_bytes(lambda: self.forward_backward(ids_BS), self.device)
        self.optimizer.zero_grad(set_to_none=True)
        first, *rest = self.seconds
        timing = Timing(tuple(rest))
        return Result(self.name, tuple(self.losses), first, timing, peak)


def contenders(setup: Setup, device: torch.device) -> list[Contender]:
    return [_contender(name, backend, setup, device) for name, backend in BACKENDS.items()]


def train(
    entries: Sequence[Contender],
    batches: Sequence[torch.Tensor],
    on_step: Callable[[Contender, int], None],
) -> list[Result]:
    """Train on each batch once. `on_step(contender, step)` is called after each step."""
    for step, ids_BS in enumerate(batches):
        for entry in entries:
            entry.step(ids_BS.to(entry.device))
            on_step(entry, step)
    return [entry.result(batches[-1].to(entry.device)) for entry in entries]


def _contender(name: str, backend: str | None, setup: Setup, device: torch.device) -> Contender:
    model = _model(setup).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    loss_fn = lambda ids_BS: model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
    if backend is not None:
        loss_fn = torch.compile(loss_fn, backend=backend)
    return Contender(name, loss_fn, optimizer, schedule, device)


def _model(setup: Setup) -> LlamaForCausalLM:
    torch.manual_seed(0)  # identical weights for every contender
    config = LlamaConfig(
        vocab_size=setup.vocabulary,
        hidden_size=setup.width,
        intermediate_size=setup.mlp_width,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.heads,
        max_position_embeddings=setup.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()
