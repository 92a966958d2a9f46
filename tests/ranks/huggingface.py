"""FSDP2 around a Hugging Face Llama, with what people do to it before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from mstpass.backend import mst
from tests.ranks import steps


class _ModelWithLoss(nn.Module):
    def __init__(self, model: nn.Module, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.parts = model, (body, head)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.parts[0](input_ids=ids).last_hidden_state
        return self.loss(hidden, labels)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.parts[1](hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=steps.VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _tried(change: Callable[[LlamaForCausalLM], nn.Module]) -> dict[str, Any]:
    found: dict[str, Any] = {"peaks": []}
    gradients = []
    for backend in ("eager", mst):
        llama = _llama()
        body = llama.model
        changed = change(llama)
        model = _ModelWithLoss(changed, body, llama.lm_head)  # PEFT may replace the head
        for layer in body.layers:
            fully_shard(layer)
        fully_shard(model)
        fn = torch.compile(model, backend=backend)
        found["reports"] = steps.reports_of(lambda: fn(*steps.batch()).backward())  # noqa: B023
        gradients.append(steps.gradients(model))
        model.zero_grad()
        found["peaks"].append(steps.peak_bytes(lambda: fn(*steps.batch()).backward()))  # noqa: B023
    return {**found, "error": steps.error(gradients[1], gradients[0])}


def checkpointed() -> dict[str, Any]:
    """Hugging Face's own gradient checkpointing."""

    def change(llama: LlamaForCausalLM) -> nn.Module:
        llama.gradient_checkpointing_enable({"use_reentrant": False})
        return llama.train()

    return _tried(change)


def peft() -> dict[str, Any]:
    """PEFT's LoRA in every linear layer, with the head trained in full."""
    from peft import LoraConfig, get_peft_model

    def change(llama: LlamaForCausalLM) -> nn.Module:
        config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1)
        model: nn.Module = get_peft_model(llama, config)
        for parameter in llama.lm_head.parameters():
            parameter.requires_grad_(True)
        return model.eval()  # without dropout, whose random numbers no other backend draws

    return _tried(change)
