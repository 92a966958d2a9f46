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


def _hf(name: str, batch: int, length: int, config: str = "", **sizes: Any) -> Step:
    """A Hugging Face model with its own loss.

    Args:
        name: the model's class.
        config: the config's class; by default derived from ``name``.
    """
    require(("transformers",), "hf", "mstpass bench record")
    import transformers

    stem = name.partition("For")[0].removesuffix("LMHeadModel")
    settings = getattr(transformers, config or f"{stem}Config")(**sizes)
    model = _without_memory(lambda: getattr(transformers, name)(settings))
    if "ImageClassification" in name:
        edge = settings.image_size
        images, labels = torch.zeros(batch, 3, edge, edge), torch.zeros(batch, dtype=torch.long)
        return lambda x, y: model(pixel_values=x, labels=y).loss, (images, labels)
    if "LMHead" in name:
        model.loss_type = "ForCausalLM"  # transformers cannot tell from the name
    ids = torch.zeros(batch, length, dtype=torch.long)
    extra = {} if "Masked" in name else {"use_cache": False}
    return lambda ids, labels: model(input_ids=ids, labels=labels, **extra).loss, (ids, ids)


def _without_memory(build: Callable[[], Any]) -> Any:
    """A model in training mode whose storage is reserved but never written."""
    with torch.device("meta"):
        model: nn.Module = build()
    return model.to_empty(device="cpu").train()


def _sizes(width: int, mlp_width: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **rest,
    }


_ROW: Sizes = {"width": 2048, "heads": 16, "mlp_width": 5632, "length": 4096}
_SMALL: Sizes = {
    "width": 256,
    "heads": 4,
    "mlp_width": 1024,
    "vocabulary": 4096,
    "length": 1024,
}
_QWEN3 = _sizes(1024, 3072, 28, 16, num_key_value_heads=8)
_GEMMA3 = {
    "config": "Gemma3TextConfig",
    **_sizes(1152, 6912, 26, 4, num_key_value_heads=1, head_dim=256, vocab_size=262_144),
}
_OLMO2 = _sizes(2048, 8192, 16, 16, vocab_size=100_352)
_MISTRAL = _sizes(4096, 14_336, 8, 32, num_key_value_heads=8)
MODELS: dict[str, Recorded] = {
    "head": recorded(_head, 4096, 2048, 32_000),
    "mlps-1": recorded(_mlps, 4096, 1024, 4096, layers=1),
    "mlps-2": recorded(_mlps, 4096, 1024, 4096, layers=2),
    **{f"llama-{n}": recorded(_llama, layers=n, **_ROW) for n in (8, 16, 32, 64)},
    "llama-1-small": recorded(_llama, layers=1, **_SMALL),
    "llama-16-autocast": recorded(_llama, layers=16, autocast=True, **_ROW),
    "qwen3-28": recorded(_hf, "Qwen3ForCausalLM", 1, 8192, **_QWEN3),
    "gemma3-26": recorded(_hf, "Gemma3ForCausalLM", 1, 4096, autocast=True, **_GEMMA3),
    "olmo2-16": recorded(_hf, "Olmo2ForCausalLM", 1, 4096, autocast=True, **_OLMO2),
    "mistral-8": recorded(_hf, "MistralForCausalLM", 1, 8192, **_MISTRAL),
    "phi-24": recorded(_hf, "PhiForCausalLM", 2, 2048, **_sizes(2048, 8192, 24, 32)),
    "gpt2-12": recorded(_hf, "GPT2LMHeadModel", 4, 1024),
    "bert-12": recorded(_hf, "BertForMaskedLM", 16, 512),
    "t5-6": recorded(_hf, "T5ForConditionalGeneration", 8, 512, decoder_start_token_id=0),
    "vit-12": recorded(_hf, "ViTForImageClassification", 64, 0),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
