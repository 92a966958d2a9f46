"""Part `blocks`: Llama-3-8B-shaped blocks with head and loss, under budgets from all to least.

The model is transformers', and its attention what that chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.bench.comparison import Contender, eager, inductor, mst
from mstpass.bench.gpu.side_by_side import Measured, cases_of, measure
from mstpass.bench.gpu.state import Case, Job, Outcome, Settings
from mstpass.bench.models import LlamaSize, Work
from mstpass.planner.models import build, config_of
from mstpass.planner.training import Training


@dataclasses.dataclass(frozen=True)
class Shape(LlamaSize):
    """Sizes of the model, by default those of Llama-3-8B but for the number of layers."""

    width: int = 4096
    layers: int = 4
    heads: int = 32
    mlp_width: int = 14_336
    vocabulary: int = 128_256
    length: int = 2**20
    key_value_heads: int = 8

    def config(self) -> dict[str, Any]:
        """The model as a ``config.json``."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": False,
        }


FULL = Shape()
QUICK = Shape(256, 2, 4, 1024, 4096, 2**14, key_value_heads=2)


class LossAlone(nn.Module):
    """The model's loss without the outputs that come with it."""

    def __init__(self, size: Shape, device: torch.device):
        super().__init__()
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="mstpass-gpu-") as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(size.config()), encoding="utf-8")
            config = config_of(str(path))
        with device:
            self.model = build(config, Training(dtype="bf16"))

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.model(input_ids=ids_BS, labels=ids_BS).loss


# ---- the part ------------------------------------------------------------------------------------
NAME = "blocks"
TOKENS, QUICK_TOKENS = 16_384, 1024
_LIMIT_S = 180.0


def _measured(quick: bool) -> Measured:
    size, tokens = (QUICK, QUICK_TOKENS) if quick else (FULL, TOKENS)
    return {f"N={tokens}": (functools.partial(workload, size, tokens), ways())}


def cases(settings: Settings) -> list[Case]:
    return cases_of(NAME, _measured(settings.quick), _LIMIT_S)


def work(job: Job) -> Outcome:
    return measure(job, *_measured(job.settings.quick)[job.case.name])


def workload(size: Shape, tokens: int, device: torch.device) -> Work:
    model = LossAlone(size, device)
    ids_BS = torch.randint(size.vocabulary, (1, tokens), device=device)
    return Work.of(model, model, args=(ids_BS,))


def ways() -> list[Contender]:
    return [
        inductor(),
        mst("mst"),
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        mst("mst, memory_budget=1.0 (free)", memory_budget=1.0),
        mst("mst, memory_budget=0.5", memory_budget=0.5),
        mst("mst, memory_budget=0.25", memory_budget=0.25),
        mst("mst, memory_budget=0.75", memory_budget=0.75),
        eager(),
    ]
