"""The models of `mstpass bench budgets`, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mstpass.bench import losses, peers
from mstpass.bench.comparison import GRADIENT_TOLERANCE, VALUE_TOLERANCE
from mstpass.bench.huggingface_models import Case, Size, bert, gpt2, loss_of, olmo2, workload
from mstpass.bench.models import Head, LlamaSize, LossFn, MLPs, Step, llama

_AUTOCAST_TOLERANCE = 0.05
_SEED = 1


@dataclasses.dataclass(frozen=True)
class Model:
    """A step whose budgets are tried.

    Attributes:
        make_step: makes the step, forward and backward, from a loss function.
        random: whether the step draws random numbers.
    """

    loss_fn: LossFn
    make_step: Callable[[LossFn], Step]
    value_tolerance: float = VALUE_TOLERANCE
    gradient_tolerance: float = GRADIENT_TOLERANCE
    random: bool = False


Build = Callable[[torch.device, bool], Model]  # takes the device, and whether sizes are tiny


def _llama(size: LlamaSize) -> Build:
    def build(device: torch.device, quick: bool) -> Model:
        model, ids_BS, target_BS = llama(peers.QUICK if quick else size, device)
        parameters = list(model.parameters())
        return Model(lambda: model(ids_BS, target_BS), lambda fn: Step(fn, parameters))

    return build


def _head(loss: losses.Loss) -> Build:
    def build(device: torch.device, quick: bool) -> Model:
        head = Head.build(*losses.sizes(quick), device)
        return Model(losses.on_head(head, loss), head.step)

    return build


def _mlps(device: torch.device, quick: bool) -> Model:
    mlps = MLPs.build(*((1024, 64, 256, 2) if quick else (4096, 256, 1024, 3)), device)
    parameters = (mlps.hidden, *mlps.layers.parameters())
    # The loss makes the tangent inside the step, as in a model: so it is a part of the peak.
    loss = lambda value: value.square().mean()
    return Model(mlps.value, lambda fn: Step(fn, parameters, loss=loss))


def _huggingface(case: Case, size: Size) -> Build:
    def build(device: torch.device, quick: bool) -> Model:
        model, ids = workload(case, Size(64, 2, 192, 512, 2, 256) if quick else size, device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = loss_of(case, model)
        tolerances: dict[str, Any] = {}
        if case.autocast:
            tolerances = dict.fromkeys(
                ("value_tolerance", "gradient_tolerance"), _AUTOCAST_TOLERANCE
            )
        return Model(
            lambda: loss(ids),
            lambda fn: Step(_seeded(fn), parameters),
            random=case.dropout > 0,
            **tolerances,
        )

    return build


def _seeded(fn: LossFn) -> LossFn:
    def seeded() -> Tensor:
        torch.manual_seed(_SEED)
        return fn()

    return seeded


_GPT2 = Size(layers=4, mlp_width=1024, vocabulary=16_000)
MODELS: Mapping[str, Build] = {
    "llama": _llama(LlamaSize()),
    "llama, large": _llama(peers.LARGE),
    "MLPs": _mlps,
    **{f"head, {name}": _head(loss) for name, loss in losses.LOSSES.items()},
    "GPT-2": _huggingface(Case("GPT-2", gpt2, autocast=False), _GPT2),
    "GPT-2, dropout": _huggingface(Case("GPT-2", gpt2, autocast=False, dropout=0.1), _GPT2),
    "OLMo-2": _huggingface(Case("OLMo-2", olmo2, autocast=False), Size()),
    "OLMo-2, autocast": _huggingface(Case("OLMo-2", olmo2, autocast=True), Size()),
    "BERT": _huggingface(Case("BERT", bert, autocast=False), Size()),
    "BERT, dropout": _huggingface(Case("BERT", bert, autocast=False, dropout=0.1), Size()),
}
