"""A Hugging Face architecture at a chosen scale: its model, a batch for it, and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Sizes = dict[str, Any]

_DEPTH = {
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes that all architectures share, as far as they have them; by default tiny ones.

    Attributes:
        mlp_width: of gated MLPs; the others are four times as wide as the model.
        expert_width: of each expert, where experts have a width of their own.
        image_edge: in pixels; patches have four by four.
        longest_scan: longest sequence of architectures whose scan is traced token by token. Their
            batches are larger in turn.
    """

    vocabulary: int = 600
    width: int = 32
    heads: int = 4
    mlp_width: int = 96
    expert_width: int = 64
    experts: int = 4
    layers: int = 2
    batch: int = 2
    length: int = 80
    image_edge: int = 32
    images: int = 4
    longest_scan: int = 80

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def __str__(self) -> str:
        return (
            f"d={self.width}, L={self.layers}, {self.heads} heads, l={self.mlp_width} or "
            f"{4 * self.width}, V={self.vocabulary}, N={self.batch * self.length} (B={self.batch})"
        )


TINY = Scale()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to build one: the names of its classes in transformers and its configuration.

    Attributes:
        images: whether it reads images and not tokens.
        scan: whether it reads one token after the other.
        alike: whether all its layers are alike, so that one shows what is taken of each.
        float64: whether torch has all its ops in float64.
        loss_type: of transformers, where the name of the class does not tell.
    """

    model: str
    config: str
    sizes: Sizes
    scale: Scale
    images: bool = False
    scan: bool = False
    alike: bool = True
    float64: bool = True
    loss_type: str | None = None

    def build(self, dropout: float = 0.0, layers: int | None = None) -> nn.Module:
        """The model in training mode; ``layers``: as many as this instead of the scale's."""
        import transformers

        own = {} if layers is None or not self.alike else dict.fromkeys(self._depth(), layers)
        config = getattr(transformers, self.config)(**{**self.sizes, **own})
        _set_dropout(config, dropout)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config)
        if self.loss_type is not None:
            model.loss_type = self.loss_type  # type: ignore[assignment]
        return model.train()

    def _depth(self) -> set[str]:
        return _DEPTH & self.sizes.keys()

    def batch(self) -> Batch:
        torch.manual_seed(1)
        scale = self.scale
        if self.images:
            edge, images = scale.image_edge, scale.images
            return {
                "pixel_values": torch.randn(images, 3, edge, edge),
                "labels": torch.randint(0, 10, (images,)),
            }
        length = min(scale.length, scale.longest_scan) if self.scan else scale.length
        batch = scale.batch * scale.length // length
        ids = torch.randint(3, scale.vocabulary, (batch, length))
        labels = ids.clone()
        labels[:, :5] = -100
        return {"input_ids": ids, "labels": labels}

    def loss_of(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda **batch: model(**batch).loss


def _set_dropout(config: Any, p: float) -> None:
    """Every kind of dropout that a configuration knows; whole layers are never dropped."""
    for name, value in vars(config).items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            if "layerdrop" in name:
                setattr(config, name, 0.0)
            elif "dropout" in name or "pdrop" in name:
                setattr(config, name, p)
