"""What TRL computes from logits, without loops over sequences or chunks: the compiler makes those.

Each function takes the place of one of TRL's, with the same parameters and the same result up to
rounding. TRL's own loops bound the memory of eager code; in a graph they hide that all tokens are
treated alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities of the entries ``index`` ([...] or [..., K]) of ``logits`` ([..., V])."""
    log_p = F.log_softmax(logits, dim=-1)
    if index.ndim == logits.ndim:
        return log_p.gather(-1, index)
    return log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """The entropy, in nats, of the softmax of ``logits`` ([..., V])."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def chunked_cross_entropy_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of TRL's SFT, and its metrics, of all tokens at once.

    TRL leaves out tokens without a label before its product; here they are products with weight 0.

    Returns:
        the loss, the number of tokens predicted right, the sum of entropies, the number of labels.
    """
    if shift_labels is not None:
        hidden, labels = hidden_states, shift_labels
    elif labels is not None:
        hidden, labels = hidden_states[..., :-1, :], labels[..., 1:]
    else:
        raise ValueError("At least one of `labels` or `shift_labels` must be provided.")
    logits = hidden.float() @ lm_head_weight.float().t()
    if lm_head_bias is not None:
        logits = logits + lm_head_bias.float()
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    log_p = F.log_softmax(logits, dim=-1)
    valid = labels != IGNORED
    chosen = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = -torch.where(valid, chosen, 0.0).sum()
    with torch.no_grad():
        correct = ((logits.argmax(-1) == labels) & valid).sum().float()
        entropy = (-(log_p.exp() * log_p).sum(-1) * valid).sum()
    count = valid.sum()
    if num_items_in_batch is None:
        return loss / count.clamp(min=1), correct, entropy, count
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch, correct, entropy, count
