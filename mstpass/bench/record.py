"""Trace training steps of real models, and write their partition problems.

A model's parameters are made on the meta device, and then get storage that nothing ever writes to.
A model of any size can therefore be traced. Its step is never run: AOTAutograd makes the joint
graph, and mst makes the partition problem from it.

examples:
  mstpass bench record                        every model, into the package's folder
  mstpass bench record llama-8 --out /tmp     one model, into another folder
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mstpass import pipeline
from mstpass.argument_parsers import command_parser
from mstpass.bench import problems
from mstpass.bench.huggingface import Scale, architectures
from mstpass.bench.models import Llama, LlamaSize, SwiGLU
from mstpass.errors import UserError, require
from mstpass.options import Options
from mstpass.problem.problem import CutProblem
from mstpass.tracing.joint_graphs import trace_joint

Sizes = dict[str, Any]
Step = tuple[Callable[..., Tensor], tuple[Tensor, ...]]  # a loss function and its inputs


@dataclass(frozen=True)
class Recorded:
    """A model whose step is traced; with ``autocast``, under bfloat16 autocast."""

    step: Callable[[], Step]
    autocast: bool = False


def main(argv: Sequence[str] = ()) -> int:
    parser = command_parser("mstpass bench record", __doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"by default all: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=problems.FOLDER,
        metavar="DIR",
        help="folder to write to; by default the package's folder of recorded problems",
    )
    given = parser.parse_args(argv)
    unknown = [name for name in given.models if name not in MODELS]
    if unknown:
        raise UserError(f"model {unknown[0]!r} is unknown; choose from: {', '.join(MODELS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.models or MODELS:
        start = time.perf_counter()
        problem = record(MODELS[name])
        path = problems.path_of(name, given.out)
        problem.to_json(path)
        print(
            f"{name}: {len(problem.values)} + {len(problem.backward)} values, "
            f"{len(problem.regions)} regions, {path.stat().st_size} bytes, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return 0


def record(model: Recorded) -> CutProblem:
    """The partition problem of a model's training step."""
    fn, inputs = model.step()
    context = torch.autocast("cpu", torch.bfloat16) if model.autocast else contextlib.nullcontext()
    with context:
        return problem_of(fn, *inputs)


def problem_of(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> CutProblem:
    """The partition problem of a function, which is traced but not run."""

    def take(module: fx.GraphModule, num_fwd_outputs: int) -> CutProblem:
        given = Options.parse({"solver": "min_cut", **options})
        result = pipeline.run(module, given, num_fwd_outputs=num_fwd_outputs, stop_after="plan")
        assert result.problem is not None, "the problem is known"
        return result.problem

    return trace_joint(fn, inputs, take)


# ---- the models --------------------------------------------------------------------------------
def recorded(
    build: Callable[..., Step], *args: Any, autocast: bool = False, **sizes: Any
) -> Recorded:
    return Recorded(functools.partial(build, *args, **sizes), autocast)


def _llama(**sizes: int) -> Step:
    size = LlamaSize(**sizes)
    model = _without_memory(lambda: Llama(size))
    ids, target = torch.zeros(2, size.batch, size.length, dtype=torch.long)
    return model, (ids, target)


def _head(tokens: int, width: int, vocabulary: int) -> Step:
    """An LM head alone, under cross-entropy."""
    hidden = torch.zeros(tokens, width, requires_grad=True)
    weight = torch.zeros(vocabulary, width, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.long)
    return lambda x, w, y: F.cross_entropy(x @ w.t(), y), (hidden, weight, target)


def _mlps(tokens: int, width: int, mlp_width: int, layers: int) -> Step:
    """A chain of SwiGLU layers."""
    chain = _without_memory(
        lambda: nn.Sequential(*(SwiGLU(width, mlp_width) for _ in range(layers)))
    )
    return chain, (torch.zeros(tokens, width, requires_grad=True),)


def _hf(name: str, scale: Scale, dropout: float = 0.0, **others: Any) -> Step:
    """A Hugging Face architecture with its own loss; the rest as of `Architecture.build`."""
    require(("transformers",), "hf", "mstpass bench record")
    architecture = architectures(scale)[name]
    model = _without_memory(lambda: architecture.build(dropout, **others))
    loss, batch = architecture.loss_of(model), architecture.batch()
    if not architecture.images:
        batch["labels"] = batch["input_ids"]
    return lambda *values: loss(**dict(zip(batch, values, strict=True))), tuple(batch.values())


def _without_memory(build: Callable[[], Any]) -> Any:
    """A model in training mode whose storage is reserved but never written."""
    with torch.device("meta"):
        model: nn.Module = build()
    return model.to_empty(device="cpu").train()


_ROW: Sizes = {"width": 2048, "heads": 16, "mlp_width": 5632, "length": 4096}
_SMALL: Sizes = {
    "width": 256,
    "heads": 4,
    "mlp_width": 1024,
    "vocabulary": 4096,
    "length": 1024,
}
_QWEN3 = Scale(151_936, 1024, 16, 3072, layers=28, batch=1, length=8192)
_GEMMA3 = Scale(262_144, 1152, 4, 6912, layers=26, batch=1, length=4096)
_OLMO2 = Scale(100_352, 2048, 16, 8192, layers=16, batch=1, length=4096)
_MISTRAL = Scale(32_000, 4096, 32, 14_336, layers=8, batch=1, length=8192)
_PHI = Scale(51_200, 2048, 32, 8192, layers=24, batch=2, length=2048)
_GPT2 = Scale(50_257, 768, 12, layers=12, batch=4, length=1024)
_BERT = Scale(30_522, 768, 12, layers=12, batch=16, length=512)
_T5 = Scale(32_128, 512, 8, layers=6, batch=8, length=512)
_VIT = Scale(width=768, heads=12, layers=12, image_edge=224, images=64)
MODELS: dict[str, Recorded] = {
    "head": recorded(_head, 4096, 2048, 32_000),
    "mlps-1": recorded(_mlps, 4096, 1024, 4096, layers=1),
    "mlps-2": recorded(_mlps, 4096, 1024, 4096, layers=2),
    **{f"llama-{n}": recorded(_llama, layers=n, **_ROW) for n in (8, 16, 32, 64)},
    "llama-1-small": recorded(_llama, layers=1, **_SMALL),
    "llama-16-autocast": recorded(_llama, layers=16, autocast=True, **_ROW),
    "qwen3-28": recorded(_hf, "qwen3", _QWEN3, head_dim=128),
    "gemma3-26": recorded(
        _hf, "gemma3", _GEMMA3, autocast=True, num_key_value_heads=1, head_dim=256
    ),
    "olmo2-16": recorded(_hf, "olmo2", _OLMO2, autocast=True, num_key_value_heads=16),
    "mistral-8": recorded(_hf, "mistral", _MISTRAL, num_key_value_heads=8),
    "phi-24": recorded(_hf, "phi", _PHI),
    "gpt2-12": recorded(_hf, "gpt2", _GPT2, dropout=0.1),
    "bert-12": recorded(_hf, "bert", _BERT, dropout=0.1, max_position_embeddings=512),
    "t5-6": recorded(_hf, "t5", _T5, dropout=0.1),
    "vit-12": recorded(_hf, "vit", _VIT, patch_size=16, num_labels=2),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
