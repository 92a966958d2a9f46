"""Losses that language models are trained with, on one LM head or two.

Each takes the model and token ids ``[B, S]`` and returns a scalar, except those of ``OUTSIDE``,
whose loss is finished outside the compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import TinyLM

VOCAB, D = 600, 32


class LossModel(TinyLM):
    """A head, a second one for another token ahead, a low-rank update, and frozen references."""

    def __init__(self) -> None:
        super().__init__(VOCAB, D)
        self.second = nn.Linear(D, VOCAB, bias=True)
        self.lora_a, self.lora_b = nn.Linear(D, 4, bias=False), nn.Linear(4, VOCAB, bias=False)
        self.reference = nn.Linear(D, VOCAB, bias=False).requires_grad_(False)
        self.teacher = nn.Linear(2 * D, VOCAB, bias=False).requires_grad_(False)
        self.register_buffer("class_weight", torch.rand(VOCAB) + 0.5)

    def wide_hidden(self, ids: Tensor) -> Tensor:
        return torch.cat((self.hidden(ids), self.hidden(ids).sin()), -1).detach()


Loss = Callable[[LossModel, Tensor], Tensor]


def token_ids(device: str = "cpu") -> Tensor:
    """404 tokens: chunks do not divide them."""
    return torch.randint(0, VOCAB, (4, 101), device=device)


def batches_of_lengths() -> Iterator[list[Tensor]]:
    """Token ids of three batches, for one graph of any batch and length."""
    for shape in ((4, 101), (3, 77), (8, 150)):
        ids = torch.randint(0, VOCAB, shape)
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(ids, 1)
        yield [ids]


def _labels(ids: Tensor) -> Tensor:
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return labels.masked_fill(labels % 7 == 0, -100)


def _ce(logits: Tensor, ids: Tensor, **kwargs: object) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), _labels(ids).flatten(), **kwargs)


def _logps(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each next token, ``[B, S - 1]``."""
    logp = torch.log_softmax(logits[:, :-1].float(), -1)
    return logp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def _mask(ids: Tensor) -> Tensor:
    """A mask that leaves out a different number of tokens in each sequence, as padding does."""
    return (ids[:, 1:] % 5 != 0).float()


def _class_weights(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(model.logits(ids), ids, weight=model.class_weight.float())


def _z_loss(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids).float()
    return _ce(logits, ids) + 1e-3 * torch.logsumexp(logits, -1).square().mean()


def _soft_cap(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(torch.tanh(model.logits(ids) / 3.0) * 3.0, ids)


def _num_items(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(model.logits(ids), ids, reduction="sum") / (_labels(ids) != -100).sum()


def _sliced(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCAB).float(), ids[:, 1:].reshape(-1))


def _policy_gradient(model: LossModel, ids: Tensor) -> Tensor:
    """Clipped ratios, averaged over each sequence's tokens, then over sequences (GRPO)."""
    logp = _logps(model.logits(ids) / 0.7, ids)
    old = logp.detach() + 0.3 * torch.sin(ids[:, 1:].float())
    advantage = torch.cos(ids[:, :1].float())
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    mask = _mask(ids)
    return -((gain * mask).sum(1) / mask.sum(1)).mean()


def _kl_to_reference(model: LossModel, ids: Tensor) -> Tensor:
    hidden = model.hidden(ids)
    logp = torch.log_softmax(model.head(hidden).float(), -1)
    reference = torch.log_softmax(model.reference(hidden.detach()).float(), -1)
    return (logp.exp() * (logp - reference)).sum(-1).mean()


def _entropy_bonus(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids).float()
    logp = torch.log_softmax(logits, -1)
    return _ce(logits, ids) + 0.1 * (logp.exp() * logp).sum(-1).mean()


def _distillation(model: LossModel, ids: Tensor) -> Tensor:
    student = torch.log_softmax(model.logits(ids).float() / 2, -1)
    teacher = torch.softmax(model.teacher(model.wide_hidden(ids)).float() / 2, -1)
    return F.kl_div(student, teacher, reduction="batchmean")


def _two_heads(model: LossModel, ids: Tensor) -> Tensor:
    hidden = model.hidden(ids)
    ahead = F.pad(ids, (0, 2), value=-100)[:, 2:].flatten()
    second = F.cross_entropy(model.second(hidden).float().flatten(0, 1), ahead)
    return _ce(model.head(hidden), ids) + 0.3 * second


def _lora(model: LossModel, ids: Tensor) -> Tensor:
    hidden = model.hidden(ids)
    return _ce(model.head(hidden) + model.lora_b(model.lora_a(hidden)), ids)


def _preference(model: LossModel, ids: Tensor) -> Tensor:
    """The loss is a nonlinear function of a sum over each sequence (DPO).

    The sums are about -500, and what float32 rounds off them is multiplied by the factor, which is
    a tenth of the usual one.
    """
    total = (_logps(model.logits(ids), ids) * _mask(ids)).sum(1)
    chosen, rejected = total[:2], total[2:]
    return -F.logsigmoid(0.01 * (chosen - rejected)).mean()


def _per_token(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(model.logits(ids), ids, reduction="none")


def _per_sequence(model: LossModel, ids: Tensor) -> Tensor:
    return (_logps(model.logits(ids), ids) * _mask(ids)).sum(1)


def _multi_hot(model: LossModel, ids: Tensor) -> Tensor:
    """Mean over tokens and vocabulary, of a sigmoid for each word."""
    words = F.one_hot(ids, VOCAB) + F.one_hot((ids * 7) % VOCAB, VOCAB)
    return F.binary_cross_entropy_with_logits(model.logits(ids).float(), words.clamp(max=1).float())


def _masked_mse(model: LossModel, ids: Tensor) -> Tensor:
    teacher = model.teacher(model.wide_hidden(ids)).float()
    error = F.mse_loss(model.logits(ids).float(), teacher, reduction="none")
    return (error * (ids % 5 != 0).unsqueeze(-1)).mean()


def _small_logits(model: LossModel, ids: Tensor) -> Tensor:
    """In the logits' own type; per token, over the vocabulary, and over both at once."""
    logits = model.logits(ids)
    return _ce(logits, ids) + 0.1 * logits.pow(2).mean() + logits.mean(-1).square().sum() / 100


def _mean_over_tokens(model: LossModel, ids: Tensor) -> Tensor:
    words = model.logits(ids).float().sigmoid().mean((0, 1), keepdim=True)
    return (words * model.class_weight.float()).sum()


def _balance(model: LossModel, ids: Tensor) -> Tensor:
    """The gradient of a token depends on the mean over all tokens."""
    words = (3 * model.logits(ids).float()).softmax(-1).mean((0, 1))
    return (words.log() * model.class_weight.float()).sum() / 100


def _batch_norm(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids).float().flatten(0, 1)
    return F.cross_entropy(F.batch_norm(logits, None, None, training=True), _labels(ids).flatten())


def _centered(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids).float()
    return _ce(logits * logits.mean((0, 1)).cos(), ids)


# Fused: the whole backward is linear in the one scalar gradient.
FUSED: dict[str, Loss] = {
    "mean": lambda m, ids: _ce(m.logits(ids), ids),
    "sum": lambda m, ids: _ce(m.logits(ids), ids, reduction="sum") / 1000,
    "class_weights": _class_weights,
    "label_smoothing": lambda m, ids: _ce(m.logits(ids), ids, label_smoothing=0.1),
    "z_loss": _z_loss,
    "soft_cap": _soft_cap,
    "scaled": lambda m, ids: _ce(m.logits(ids) * 0.5, ids),
    "num_items": _num_items,
    "sliced": _sliced,
    "log_probabilities": lambda m, ids: -(_logps(m.logits(ids), ids) * _mask(ids)).mean(),
    "policy_gradient": _policy_gradient,
    "kl_to_reference": _kl_to_reference,
    "entropy_bonus": _entropy_bonus,
    "distillation": _distillation,
    "two_heads": _two_heads,
    "bias": lambda m, ids: _ce(m.second(m.hidden(ids)), ids),
    "lora": _lora,
    "multi_hot": _multi_hot,
    "mse": lambda m, ids: F.mse_loss(m.logits(ids), m.teacher(m.wide_hidden(ids))),
    "masked_mse": _masked_mse,
    "small_logits": _small_logits,
    "mean_over_tokens": _mean_over_tokens,
}

# Recomputed: backward needs more than one scalar.
RECOMPUTED: dict[str, Loss] = {
    "preference": _preference,
    "balance": _balance,
    "batch_norm_over_tokens": _batch_norm,
    "centered_over_tokens": _centered,
}
OUTSIDE: dict[str, Loss] = {"per_token": _per_token, "per_sequence": _per_sequence}


def _over_sequence(model: LossModel, ids: Tensor) -> Tensor:
    return torch.softmax(model.logits(ids).float(), 1).square().sum()


def _running_sum(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(model.logits(ids).cumsum(1) * 0.01, ids)


def _flipped(model: LossModel, ids: Tensor) -> Tensor:
    return _ce(model.logits(ids).flip(1), ids)


def _neighbours(model: LossModel, ids: Tensor) -> Tensor:
    logits = model.logits(ids)
    return _ce(logits + logits.roll(1, 1), ids)


def _mean_of_each_sequence(model: LossModel, ids: Tensor) -> Tensor:
    return model.logits(ids).float().mean(1).square().sum()


# A value as large as the logits mixes tokens: the head is refused.
REFUSED: dict[str, Loss] = {
    "softmax_over_sequence": _over_sequence,
    "running_sum_over_tokens": _running_sum,
    "flipped_tokens": _flipped,
    "neighbouring_tokens": _neighbours,
    "mean_of_each_sequence": _mean_of_each_sequence,
}
