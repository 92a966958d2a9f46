"""What a trainer reads of logits, in the place of the logits.

DPO and KTO compute their loss in Python, from ``model(...).logits``, with many branches and with
metrics that synchronize. Of the logits they read four numbers for each token: the log-probability
of the next token, and for metrics the entropy, the most probable token and the mean. `score`
computes these, compiled together with the model, so that the logits never leave the graph.
`StandIn` then takes the place of the logits in the trainer's own code. It has the few operations
that the trainer applies to logits; all others raise an error that names them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mstpass.trainers import losses
from mstpass.trainers.exchange import TrainerError


def score(model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The statistics of the logits of all tokens but the last ([B, S-1] each), and aux_loss."""
    outputs = model(**inputs)
    logits = outputs.logits[..., :-1, :]
    index = inputs["input_ids"][..., 1:]
    statistics = {"log_p": losses.selective_log_softmax(logits, index)}
    with torch.no_grad():
        statistics["entropy"] = losses.entropy_from_logits(logits)
        statistics["best"] = logits.argmax(-1)
        statistics["mean"] = logits.mean(-1)
    return statistics, getattr(outputs, "aux_loss", None)


@dataclasses.dataclass
class StandInOutputs:
    """In place of a model's outputs."""

    logits: StandIn
    aux_loss: Tensor | None = None


class StandIn:
    """The statistics of logits [B, S, V], or of some of them, in place of the logits.

    Attributes:
        statistics: by name, a tensor of the shape of the logits without the vocabulary.
        next_ids: the tokens whose log-probabilities are known.
        shifted: whether the last token has been cut off, which has no next token.
    """

    def __init__(self, statistics: dict[str, Tensor], next_ids: Tensor, shifted: bool = False):
        self.statistics, self.next_ids, self.shifted = statistics, next_ids, shifted

    @property
    def device(self) -> torch.device:
        return self.next_ids.device

    def detach(self) -> StandIn:
        return self._each(Tensor.detach)

    def chunk(self, chunks: int, dim: int = 0) -> list[StandIn]:
        if dim != 0 or not self.shifted:
            raise _unknown(f"chunk(dim={dim})")
        each = {name: value.chunk(chunks) for name, value in self.statistics.items()}
        ids = self.next_ids.chunk(chunks)
        return [StandIn({n: v[i] for n, v in each.items()}, ids[i], True) for i in range(len(ids))]

    def __getitem__(self, key: Any) -> StandIn:
        if not self.shifted:
            batch = slice(None, None, None)
            if key in ((..., slice(None, -1), batch), (batch, slice(None, -1), batch)):
                return StandIn(self.statistics, self.next_ids, shifted=True)
            raise _unknown(f"logits[{key}]")
        if isinstance(key, Tensor) and key.shape == self.next_ids.shape[: key.ndim]:
            return self._each(lambda value: value[key])
        raise _unknown(f"logits[{key}]")

    def argmax(self, dim: int) -> Tensor:
        return self._last("best", dim)

    def mean(self, dim: int) -> Tensor:
        return self._last("mean", dim)

    def log_softmax_of(self, index: Tensor) -> Tensor:
        """The log-probabilities of ``index``, which must be the next tokens."""
        if not self.shifted or not torch.equal(index, self.next_ids):
            raise _unknown("the log-probability of other tokens than the next ones")
        return self.statistics["log_p"].clone()  # the trainer writes zeros into it

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _unknown(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(name)

    def _each(self, function: Any) -> StandIn:
        statistics = {name: function(value) for name, value in self.statistics.items()}
        return StandIn(statistics, function(self.next_ids), self.shifted)

    def _last(self, name: str, dim: int) -> Tensor:
        if dim != -1:
            raise _unknown(f"{name} over dim {dim}")
        return self.statistics[name]


def selective_log_softmax(logits: Tensor | StandIn, index: Tensor) -> Tensor:
    if isinstance(logits, StandIn):
        return logits.log_softmax_of(index)
    return losses.selective_log_softmax(logits, index)


def entropy_from_logits(logits: Tensor | StandIn, chunk_size: int = 128) -> Tensor:
    if isinstance(logits, StandIn):
        return logits.statistics["entropy"]
    return losses.entropy_from_logits(logits)


def _unknown(what: str) -> TrainerError:
    return TrainerError(
        f"This trainer reads more of the logits than mstpass.compile_trainer provides: {what}. "
        "Logits that are computed in chunks do not exist in full. Leave compile_trainer out and "
        "compile the model itself (torch_compile_backend='mst'), which keeps its logits."
    )
