"""Log-probabilities and policy losses as verl, OpenRLHF and NeMo-RL compute them, by their maths.

A step takes a model and a batch of prompts with responses. What is compiled is either the function
of log-probabilities, whose results the library makes a loss of outside, or both together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses import VOCAB

TEMPERATURE = 0.7
Model = Any  # with `logits(ids)`, [B, S, V]
Loss = Callable[..., Any]


def responses(ids: Tensor) -> int:
    """How many tokens of each row, the last ones, are not its prompt."""
    return ids.shape[1] * 5 // 8


def batch(rows: int = 4, length: int = 101, vocabulary: int = VOCAB) -> list[Tensor]:
    """Ids, a mask of responses of several lengths, advantages, and three models' log-probabilities.

    The last three are those of the policy before the update, of the engine that generated, and of a
    reference.
    """
    ids = torch.randint(0, vocabulary, (rows, length))
    longest = responses(ids)
    ends = longest - 7 * torch.arange(rows) % 40
    mask = (torch.arange(longest) < ends[:, None]).float()
    advantages = torch.randn(rows, 1).expand(rows, longest).contiguous()
    uniform = -torch.log(torch.tensor(float(vocabulary)))
    others = [uniform + 0.3 * torch.randn(rows, longest) for _ in range(3)]
    return [ids, mask, advantages, *others]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / (mask.sum() + 1e-8)


def approximate_kl(log_p: Tensor, reference: Tensor) -> Tensor:
    """Schulman's third estimator, whose variance is low."""
    difference = (reference - log_p).clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def entropy_of(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)


# ---- verl ----------------------------------------------------------------------------------------
def _picked(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def verl_log_probs(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each response token; logits are divided in place."""
    logits = model.logits(ids).float()
    logits.div_(TEMPERATURE)
    logits = logits[:, -responses(ids) - 1 : -1]
    labels = ids[:, -responses(ids) :]
    return _picked(F.log_softmax(logits, -1), labels), entropy_of(logits)


def verl_log_probs_by_row(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of a row at a time, so that eager mode needs less memory."""
    logits = model.logits(ids).float()
    logits.div_(TEMPERATURE)
    logits = logits[:, -responses(ids) - 1 : -1]
    sums = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return _picked(logits, ids[:, -responses(ids) :]) - sums, entropy_of(logits)


def verl_log_probs_in_16_bits(model: Model, ids: Tensor) -> Tensor:
    """Logits that are not float32: a softmax for each row."""
    logits, labels = model.logits(ids)[:, -responses(ids) - 1 : -1], ids[:, -responses(ids) :]
    rows = [
        _picked(F.log_softmax(row, -1), of_row) for row, of_row in zip(logits, labels, strict=True)
    ]
    return torch.stack(rows)


def verl_log_probs_without_padding(model: Model, ids: Tensor) -> Tensor:
    """Rows are one sequence of all tokens, and results are put back into rows."""
    flat = ids.reshape(1, -1)
    logits = model.logits(flat).squeeze(0).float() / TEMPERATURE
    log_p = _picked(F.log_softmax(logits, -1), flat.roll(-1, 1).squeeze(0))
    places = torch.arange(ids.numel(), device=ids.device)
    rows = torch.zeros(ids.numel(), dtype=log_p.dtype, device=ids.device)
    rows = rows.index_put((places,), log_p).view(ids.shape)
    return rows[:, -responses(ids) - 1 : -1]


def verl_loss(found: tuple[Tensor, Tensor], given: list[Tensor], micro_batches: int = 2) -> Tensor:
    """Dual clipping, an entropy bonus and a penalty, of one of several micro-batches."""
    log_p, entropy = found
    mask, advantages, old, _, reference = given
    ratio = (log_p - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    least = torch.minimum(-advantages * 3.0, clipped)
    policy = masked_mean(torch.where(advantages < 0, least, clipped), mask)
    penalty = masked_mean(approximate_kl(log_p, reference), mask)
    bonus = masked_mean(entropy, mask)
    return (policy - 0.01 * bonus + 0.05 * penalty) / micro_batches


def verl_step(model: Model, ids: Tensor, *given: Tensor) -> Tensor:
    return verl_loss(verl_log_probs(model, ids), list(given))


# ---- OpenRLHF ------------------------------------------------------------------------------------
def openrlhf_log_probs(model: Model, ids: Tensor, rows_at_once: int = 128) -> Tensor:
    """All but the last token's; sums of the exponentials a number of rows at a time."""
    logits = model.logits(ids)[:, :-1].float()
    logits = logits / TEMPERATURE
    flat = logits.reshape(-1, logits.shape[-1])
    sums = torch.zeros(flat.shape[0], dtype=flat.dtype, device=flat.device)
    for first in range(0, flat.shape[0], rows_at_once):
        last = min(first + rows_at_once, flat.shape[0])
        sums[first:last] = torch.logsumexp(flat[first:last], -1)
    return _picked(logits, ids[:, 1:]) - sums.view(logits.shape[:-1])


def openrlhf_loss(log_p: Tensor, given: list[Tensor]) -> Tensor:
    """Clipped ratios times how far the engine that generated was off, a mean of rows' means."""
    mask, advantages, old, engine, reference = given
    log_p = log_p[:, -mask.shape[1] :]
    ratio = (log_p - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gain = gain * (old - engine).exp().clamp(max=2.0).detach()
    of_rows = (gain * mask).sum(1) / mask.sum(1)
    penalty = (log_p - reference).square() / 2
    return -of_rows.mean() + 0.05 * masked_mean(penalty, mask)


def openrlhf_step(model: Model, ids: Tensor, *given: Tensor) -> Tensor:
    return openrlhf_loss(openrlhf_log_probs(model, ids), list(given))


# ---- NeMo-RL -------------------------------------------------------------------------------------
def nemo_log_probs(model: Model, ids: Tensor) -> Tensor:
    """Of every token but the first."""
    log_p = F.log_softmax(model.logits(ids).to(torch.float32), -1)
    return _picked(log_p[:, :-1], ids[:, 1:])


def nemo_loss(log_p: Tensor, given: list[Tensor], of_sequences: bool = False) -> Tensor:
    """Ratios of tokens or of sequences, corrected for the engine, over all ranks' valid tokens."""
    mask, advantages, old, engine, reference = given
    log_p = log_p[:, -mask.shape[1] :]
    difference = log_p - old
    if of_sequences:
        mean = (difference * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        difference = mean.expand_as(difference)
    ratio = difference.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    weights = torch.nan_to_num((old - engine).exp(), nan=0.0, posinf=0.0, neginf=0.0)
    valid = 2 * mask.sum()  # those of another rank too
    policy = (loss * weights * mask).sum() / (valid + 1e-8)
    penalty = (approximate_kl(log_p, reference) * mask).sum() / (valid + 1e-8)
    return policy + 0.01 * penalty


def nemo_step(model: Model, ids: Tensor, *given: Tensor) -> Tensor:
    return nemo_loss(nemo_log_probs(model, ids), list(given))


def nemo_sequence_step(model: Model, ids: Tensor, *given: Tensor) -> Tensor:
    return nemo_loss(nemo_log_probs(model, ids), list(given), of_sequences=True)


# The loss is inside of the compiled function, or made outside of what it returns.
INSIDE: dict[str, Loss] = {
    "verl": verl_step,
    "openrlhf": openrlhf_step,
    "nemo_tokens": nemo_step,
    "nemo_sequences": nemo_sequence_step,
}
OUTSIDE: dict[str, tuple[Loss, Loss]] = {
    "verl": (verl_log_probs, verl_loss),
    "verl_by_row": (verl_log_probs_by_row, verl_loss),
    "verl_without_padding": (
        verl_log_probs_without_padding,
        lambda log_p, given: verl_loss((log_p, 0 * log_p), given),
    ),
    "openrlhf": (openrlhf_log_probs, openrlhf_loss),
    "nemo": (nemo_log_probs, nemo_loss),
}
