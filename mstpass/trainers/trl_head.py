"""TRL's fused LM head, compiled: one head and its log-probabilities in a graph, for mst to chunk.

Since version 1.16 all of TRL's trainers of language models call their model in one way,
``model(..., labels=labels, fused_lm_head=True)``, and compute their losses and metrics from what it
returns for each token: log-probability, entropy, mean logit and so on. The model's forward calls
an autograd function for that, a loop over tiles of 4,096 tokens by 32,768 words. In a graph that
loop hides that all tokens are treated alike, and its tiles are large.

Here the forward is compiled with a plain function in the place of that loop. It is compiled apart
from all else, inside of what wraps the model (DDP, PEFT), and only where gradients are needed:
generation, evaluation and reference models run as TRL runs them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.integrations.transformers_masks import says_whether_packed
from mstpass.trainers.exchange import TrainerError, with_globals

KNOWN_VERSIONS = "1.16"
FORWARD = "_fused_forward"
FUNCTION = "_ChunkedLogProbFunction"

# log-probabilities, entropy, log of the sum of squared probabilities, mean logit, whether the label
# is the most probable token: [N] each, those that were not asked for are None
Statistics = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def has_fused_head(model: Any) -> bool:
    """Whether TRL has given its fused LM head to this model (under PEFT: to the base model)."""
    function = getattr(base_model(model).forward, "__func__", None)
    return function is not None and function.__code__.co_name == FORWARD


def compile_fused_head(
    model: Any, compiled: Callable[..., Any], entropy_has_gradient: bool
) -> None:
    """Compile the forward of a model with TRL's fused LM head.

    Args:
        compiled: `torch.compile` with a backend and options.
        entropy_has_gradient: whether the loss depends on the entropy; a metric has no gradient.

    Raises:
        TrainerError: TRL's head is not as in the versions that mstpass knows.
    """
    base = base_model(model)
    own = base.forward
    apply = functools.partial(token_statistics, entropy_has_gradient=entropy_has_gradient)
    exchanges = {FUNCTION: types.SimpleNamespace(apply=apply), "_use_triton": _every_token}
    _check(own.__func__)
    theirs = own.__func__
    fused = says_whether_packed(base, compiled(with_globals(theirs, exchanges)), theirs)

    @functools.wraps(own.__func__)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and torch.is_grad_enabled():
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return own(*args, fused_lm_head=fused_lm_head, **kwargs)

    base.forward = types.MethodType(forward, base)


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
    *,
    entropy_has_gradient: bool = True,
) -> Statistics:
    """What TRL's autograd function computes, with the parameters that it has.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V]. targets: [N], token ids.
        chunk_size: not used.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    logits_NV = F.linear(
        hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    ).float()
    if logit_scale != 1.0:
        logits_NV = logits_NV * logit_scale
    if final_logit_softcapping is not None:
        logits_NV = final_logit_softcapping * torch.tanh(logits_NV / final_logit_softcapping)
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    log_p_NV = F.log_softmax(logits_NV, dim=-1)
    log_p = log_p_NV.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_has_gradient):
        entropy = -(log_p_NV.exp() * log_p_NV).sum(-1) if "entropy" in outputs else None
    with torch.no_grad():
        squares = torch.logsumexp(2 * log_p_NV, -1) if "log_sum_sq_probs" in outputs else None
        mean = logits_NV.mean(-1) if "mean_logits" in outputs else None
        is_top1 = logits_NV.argmax(-1) == targets if "is_top1" in outputs else None
    return log_p, entropy, squares, mean, is_top1


def _every_token(device: torch.device) -> bool:
    """In the place of TRL's ``_use_triton``: a selection of tokens by data would end the graph."""
    return False


def base_model(model: Any) -> Any:
    """The model itself, where PEFT has wrapped it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _check(forward: types.FunctionType) -> None:
    """Raise `TrainerError` unless the forward calls the function whose place is taken."""
    theirs = forward.__globals__.get(FUNCTION)
    ours = [
        name
        for name, parameter in inspect.signature(token_statistics).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    known = theirs is not None and list(inspect.signature(theirs.forward).parameters)[1:] == ours
    if not known or not {FUNCTION, "_use_triton"} <= set(forward.__code__.co_names):
        raise TrainerError(
            f"mstpass.compile_trainer knows TRL {KNOWN_VERSIONS}, and the fused LM head of this "
            f"version ({forward.__module__}.{forward.__name__}) is another one. Install trl=="
            f"{KNOWN_VERSIONS}.*, or leave compile_trainer out and train with TRL's own head."
        )
