"""The layers of a Hugging Face model, and copies of a model that have only its first ones.

A deep model repeats its layer, so a shallow copy tells much about it in little time. What follows
from a copy is confirmed on the whole model: layers may differ, and the peak of a step may lie
elsewhere in a deeper model.
"""

from __future__ import annotations

from torch import nn


class NotStacked(Exception):
    """The layers of a model are not one list, of which some could be left out."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that Hugging Face checkpoints, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def keep_layers(model: nn.Module, count: int) -> None:
    """Drop all layers of a model but the first ``count``.

    Raises:
        NotStacked: the model's layers are not one list.
    """
    layers = layers_of(model)
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and list(child) == layers:
                setattr(parent, name, child[:count])
                return
    raise NotStacked(f"{type(model).__name__} does not have one list of layers")
