"""Models by name or by ``config.json``, built without memory and without weights."""

from __future__ import annotations

import difflib
import functools
import json
import re
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstpass.errors import UserError, require
from mstpass.plain_data import MOST_CONFIG_BYTES, read_json
from mstpass.planner.attention import add_adapters, numel_of, plan_attention
from mstpass.planner.training import Frozen, Sizes, Training

_FILE = Path(__file__).with_name("models.json")

# what transformers may load code by, from a file or from the Hub
_NAMES_OF_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "custom_pipelines")
_COUNT = re.compile(r"num_|n_(layer|head)|\w*layers$")  # of modules, which are built one by one
_MOST_MODULES, _MOST = 2000, 2**40


class ModelError(UserError):
    """``--model`` names no causal language model that can be built."""


@functools.cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """The shipped models: for each name, the sizes in its ``config.json``."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def config_of(given: str) -> Any:
    """The transformers config of a model.

    Args:
        given: a shipped name, the path of a ``config.json``, or the path of its folder.

    Raises:
        ModelError: the name is unknown, the file is missing or broken, or its model is not a causal
            language model.
    """
    require(("transformers",), "hf", "mstpass plan")
    path = Path(given)
    if given in known():
        return _config(known()[given], given)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _config(_read(path), str(path))
    if path.suffix == ".json" or len(path.parts) > 1:
        raise ModelError(f"--model {given}: this file does not exist")
    near = difflib.get_close_matches(given.lower(), known(), n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ModelError(
        f"--model {given}: unknown model{hint} Give the path of a config.json, or one of: "
        f"{', '.join(known())}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, MOST_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {path}: cannot read this config.json: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"--model {path}: a config.json must hold a JSON object")
    return found


def _config(values: Mapping[str, Any], name: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    values = {key: value for key, value in values.items() if key not in _NAMES_OF_CODE}
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(f"--model {name}: not a config of transformers: it has no model_type")
    absurd = next(_absurd_sizes(values), None)
    if absurd is not None:
        raise ModelError(f"--model {name}: {absurd} is too large for a model")
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:  # a config class may raise anything on unexpected values
        raise ModelError(f"--model {name}: transformers refuses this config: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config()  # of a model that also takes images
    heads = [str(a) for a in getattr(config, "architectures", None) or ()]
    generates = [a for a in heads if "CausalLM" in a or "LMHead" in a or "Conditional" in a]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (heads and not generates):
        what = ", ".join(heads) or kind
        raise ModelError(f"--model {name}: {what} is not a causal language model")
    config.use_cache = False
    return config


def _absurd_sizes(values: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of which no model could be built, not even without memory."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _absurd_sizes(value)
        elif isinstance(value, int) and value > (_MOST_MODULES if _COUNT.match(key) else _MOST):
            yield f"{key}={reprlib.repr(value)}"


def build(config: Any, training: Training, layers: int | None = None) -> nn.Module:
    """The model in training mode, built on the current device or in the current fake mode.

    Args:
        layers: keep only so many of its layers, the first ones (None: all).

    Raises:
        NotStacked: the model's layers are not one list.
        TargetError: no linear layer has one of the names of ``training.target``.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if training.dtype == "bf16" else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about generation, which does not happen here
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        ).train()
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # transformers cannot tell from GPT-2's name
    if not training.shares:  # else mstpass.sequence_parallel sets it
        plan_attention(model, training)
    if layers is not None:
        keep_layers(model, layers)
    if training.lora:
        add_adapters(model, layers_of(model), training)
    return model


def sizes_of(model: nn.Module) -> Sizes:
    in_layers = [_trained(layer) for layer in layers_of(model)]
    each = tuple(p.numel() for p in model.parameters() if p.requires_grad)
    largest = max(in_layers, default=0)
    return Sizes(sum(each), largest, sum(each) - sum(in_layers), each, _frozen(model))


def _trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _frozen(model: nn.Module) -> Frozen:
    """What a model holds of weights that are not trained."""
    each = tuple(p.nbytes for p in model.parameters() if not p.requires_grad)
    in_layers = [
        sum(p.nbytes for p in layer.parameters() if not p.requires_grad)
        for layer in layers_of(model)
    ]
    return Frozen(
        sum(map(numel_of, model.modules())),
        max(in_layers, default=0),
        sum(each) - sum(in_layers),
        each,
    )


def layer_count(config: Any) -> int:
    """The number of layers; 0 where a config does not say it."""
    return getattr(config.get_text_config(), "num_hidden_layers", 0)


def most_positions(config: Any) -> int | None:
    return getattr(config, "max_position_embeddings", None)


# ---- layers ------------------------------------------------------------------------------------
class NotStacked(Exception):
    """The layers of a model are not one list, of which some could be left out."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that Hugging Face checkpoints, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def are_alike(model: nn.Module) -> bool:
    """Whether the layers of a model have the same modules, with the same sizes and settings."""
    return len({_look(layer) for layer in layers_of(model)}) == 1


def _look(layer: nn.Module) -> tuple[object, ...]:
    def settings(module: nn.Module) -> dict[str, Any]:
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        return {key: value for key, value in plain.items() if key != "layer_idx"}

    shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
    modules = ((n, type(m), *sorted(settings(m).items())) for n, m in layer.named_modules())
    return shapes, *modules


def keep_layers(model: nn.Module, count: int) -> None:
    """Drop all layers of a model but the first ``count``.

    A deep model repeats its layer, so a shallow copy tells much about it in little time. What
    follows from a copy is confirmed on the whole model: layers may differ, and the peak of a step
    may lie elsewhere in a deeper model.

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
