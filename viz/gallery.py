"""Draws the gallery: the planned training step of each reference model, as SVG.

    python viz/gallery.py [NAME ...]

Models are built on the meta device, at their real sizes and without weights. Nothing is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass.bench.models import Head, LlamaSize, MLPs, llama

FOLDER = Path(__file__).parent / "gallery"
META = torch.device("meta")
Step = tuple[Callable[..., Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Picture:
    """A model of the gallery. ``build`` returns its loss function and that function's arguments."""

    title: str
    build: Callable[[], Step]
    options: Mapping[str, Any] = field(default_factory=dict)


def head() -> Step:
    made = Head.build(8192, 2048, 128_256, META)
    return (lambda x, w, y: F.cross_entropy(F.linear(x, w), y)), (
        made.hidden,
        made.weight,
        made.target,
    )


def mlps() -> Step:
    made = MLPs.build(8192, 1024, 4096, 3, META)
    return made.layers, (made.hidden,)


def llama_like(layers: int = 4) -> Step:
    model, ids_BS, target_BS = llama(LlamaSize(layers=layers), META)
    return model, (ids_BS, target_BS)


def hugging_face(architecture: str, config: str, length: int, **sizes: Any) -> Callable[[], Step]:
    """A model of transformers in bfloat16, with its own loss, on a batch of two sequences."""

    def build() -> Step:
        import transformers

        with META:
            made = getattr(transformers, architecture)(getattr(transformers, config)(**sizes))
            ids_BS = torch.randint(made.config.vocab_size, (2, length))
        model = made.bfloat16()
        model.loss_type = "ForMaskedLM" if "MaskedLM" in architecture else "ForCausalLM"

        def loss(ids_BS: Tensor) -> Tensor:
            return model(input_ids=ids_BS, labels=ids_BS).loss

        return loss, (ids_BS,)

    return build


_ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
PICTURES = {
    "head": Picture("An LM head with cross-entropy", head),
    "mlps": Picture("Three SwiGLU MLPs", mlps),
    "llama-like": Picture("The bench's Llama-like model, 4 layers", llama_like),
    "llama-like-64": Picture("The same with 64 layers", lambda: llama_like(64)),
    "llama-like-least": Picture("4 layers in the least memory", llama_like, {"memory_budget": 0.0}),
    "llama": Picture(
        "Llama 3.2 1B",
        hugging_face(
            "LlamaForCausalLM",
            "LlamaConfig",
            8192,
            vocab_size=128_256,
            num_attention_heads=32,
            num_key_value_heads=8,
            **_ONE_B,
        ),
    ),
    "gpt2": Picture("GPT-2", hugging_face("GPT2LMHeadModel", "GPT2Config", 1024)),
    "olmo2": Picture(
        "OLMo-2 1B, whose norms come last",
        hugging_face(
            "Olmo2ForCausalLM",
            "Olmo2Config",
            4096,
            vocab_size=100_352,
            num_attention_heads=16,
            **_ONE_B,
        ),
        {"reconstruct": "tolerant"},
    ),
    "bert": Picture("BERT base", hugging_face("BertForMaskedLM", "BertConfig", 512)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"by default all: {', '.join(PICTURES)}")
    names = parser.parse_args().names or list(PICTURES)
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        picture = PICTURES[name]
        fn, arguments = picture.build()
        report = mstpass.explain(fn, *arguments, options=picture.options)
        report.to_svg(FOLDER / f"{name}.svg")
        print(f"{name}: {(FOLDER / f'{name}.svg').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
