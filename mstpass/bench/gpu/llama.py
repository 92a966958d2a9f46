"""A Llama-3-8B-shaped model with few layers: transformers' own, or a plain one where that lacks.

The attention is FlashAttention-2, as `mstpass plan` assumes; the plain model's is what
``F.scaled_dot_product_attention`` chooses, with as many key heads as query heads.

Part `blocks`: Llama-3-8B-shaped blocks with head and loss, under budgets from all to least.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.bench import models
from mstpass.bench.comparison import Contender, eager, inductor, mst
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.side_by_side import Measured, cases_of, measure
from mstpass.bench.gpu.state import Case, Outcome, Settings
from mstpass.bench.models import LlamaSize, Work
from mstpass.planner.eager_rows import checkpointed, minisequence, plain
from mstpass.planner.eager_step import Recipe
from mstpass.planner.models import build, config_of
from mstpass.planner.training import Training

DTYPE = torch.bfloat16
TILES = 16
TRAINING = Training(dtype="bf16", optimizer="none")
PLAIN, CHECKPOINTED, TILED = "plain", "checkpointed", "tiled"  # ways to run the model's code

LossOf = Callable[[Tensor], Any]  # token ids (B, S) to a loss, or to outputs with a loss


@dataclasses.dataclass(frozen=True)
class Shape(LlamaSize):
    """Sizes of the model, by default those of Llama-3-8B but for the number of layers.

    Attributes:
        length: the longest sequence.
    """

    width: int = 4096
    layers: int = 4
    heads: int = 32
    mlp_width: int = 14_336
    vocabulary: int = 128_256
    length: int = 2**20
    key_heads: int = 8

    def __str__(self) -> str:
        return f"d={self.width}, l={self.mlp_width}, L={self.layers}, V={self.vocabulary}, bf16"

    @property
    def parameters(self) -> int:
        """Their number, with the key heads of the model in transformers, without norms."""
        keys = 2 * self.key_heads * self.width // self.heads
        layer = self.width * (2 * self.width + keys + 3 * self.mlp_width)
        return self.layers * layer + 2 * self.vocabulary * self.width

    def config(self) -> dict[str, Any]:
        """The model as a ``config.json``."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": False,
        }


FULL = Shape()
QUICK = Shape(256, 2, 4, 1024, 4096, 2**14, key_heads=2)


def shape(quick: bool) -> Shape:
    return QUICK if quick else FULL


def has_transformers() -> bool:
    return find_spec("transformers") is not None


@contextmanager
def config_path(size: Shape) -> Iterator[str]:
    """The path of the model's ``config.json``, which is there for a while."""
    with tempfile.TemporaryDirectory(prefix="mstpass-gpu-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(size.config()), encoding="utf-8")
        yield str(path)


def model_and_loss(size: Shape, device: torch.device, way: str = PLAIN) -> tuple[nn.Module, LossOf]:
    """A model on a device, in training mode, and its loss under one of the ways."""
    torch.manual_seed(0)
    if not has_transformers():
        return _plain_model(size, device, way)
    with config_path(size) as path:
        config = config_of(path)
    with device:
        model = build(config, TRAINING)
    recipes: dict[str, Recipe] = {
        PLAIN: plain,
        CHECKPOINTED: checkpointed,
        TILED: minisequence,
    }
    return model, recipes[way](model)


def _plain_model(size: Shape, device: torch.device, way: str) -> tuple[nn.Module, LossOf]:
    with models.made_on(device, DTYPE):
        model = models.Llama(size)

    def loss_of(ids_BS: Tensor) -> Tensor:
        tiled = way == TILED
        return model(ids_BS, ids_BS, checkpointed=way != PLAIN, chunks=TILES if tiled else 1)

    return model, loss_of


class LossAlone(nn.Module):
    """The loss without the outputs that come with it: what a compiled function should return."""

    def __init__(self, model: nn.Module, loss_of: LossOf):
        super().__init__()
        self.model = model  # so that tools find the tensors of the loss
        self._loss_of = loss_of

    def forward(self, ids_BS: Tensor) -> Tensor:
        result = self._loss_of(ids_BS)
        return result if isinstance(result, Tensor) else result.loss


def token_ids(size: Shape, length: int, device: torch.device) -> Tensor:
    return torch.randint(size.vocabulary, (1, length), device=device)


# ---- blocks --------------------------------------------------------------------------------------
NAME = "blocks"
TOKENS, QUICK_TOKENS = 16_384, 1024
_LEAST, _FREE = "mst, memory_budget=0.0", "mst, memory_budget=1.0 (free)"
_BYTES = "mst, memory_budget in bytes"  # half-way between the peaks of the two
_LIMIT_S = 180.0


def _measured(quick: bool) -> Measured:
    tokens = QUICK_TOKENS if quick else TOKENS
    return {f"N={tokens}": (functools.partial(workload, shape(quick), tokens), ways())}


def cases(settings: Settings) -> list[Case]:
    return cases_of(NAME, _measured(settings.quick), _LIMIT_S)


def work(job: Job) -> Outcome:
    return measure(job, *_measured(job.settings.quick)[job.case.name])


def workload(size: Shape, tokens: int, device: torch.device) -> Work:
    model, loss_of = model_and_loss(size, device)
    return Work.of(model, LossAlone(model, loss_of), args=(token_ids(size, tokens, device),))


def ways() -> list[Contender]:
    return [
        inductor(),
        mst("mst"),
        mst(_LEAST, memory_budget=0.0),
        mst(_FREE, memory_budget=1.0),
        mst("mst, memory_budget=0.5", memory_budget=0.5),
        dataclasses.replace(mst(_BYTES), from_peaks=_half_way),
        mst("mst, memory_budget=0.25", memory_budget=0.25),
        mst("mst, memory_budget=0.75", memory_budget=0.75),
        eager(),
    ]


def _half_way(peaks: Mapping[str, int]) -> Contender:
    if not {_LEAST, _FREE} <= peaks.keys():
        raise RuntimeError(f"needs the peaks of {_LEAST!r} and {_FREE!r}")
    return mst(_BYTES, memory_budget=(peaks[_LEAST] + peaks[_FREE]) // 2)
