"""torchtitan with mst: its blocks compiled one by one, and its LM head compiled with the loss.

torchtitan compiles each block, and the loss function apart from the head, so that the logits
between them exist. `HeadLoss` takes the place of its `ChunkedLossWrapper`: torchtitan's trainer
gives it the head, and it compiles both together. The number of chunks is mst's to choose.

    pip install mstpass torchtitan triton && python examples/torchtitan_blocks.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import mstpass

VOCABULARY, LENGTH = 2048, 512


class HeadLoss(ChunkedLossWrapper):
    """For ``loss=HeadLoss.Config()`` of torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """As the other losses of torchtitan have one."""

    def __init__(self, config: Config, *, compile_config: CompileConfig):
        super().__init__(config)
        self.compiled = torch.compile(self.of_hidden, backend=compile_config.backend)

    def of_hidden(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        return self.loss_fn.fn(self.lm_head(hidden_BSD), labels_BS)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **rest: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.compiled(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


class OneProcess:
    tp_enabled = False


def main() -> tuple[float, list[mstpass.Report]]:
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    tokens_BS = torch.randint(VOCABULARY, (2, LENGTH))
    labels_BS = tokens_BS.roll(-1, 1)

    right = torch.nn.functional.cross_entropy(
        model(tokens_BS).flatten(0, 1), labels_BS.flatten(), reduction="sum"
    )
    right.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    others = len(mstpass.reports())
    compiling = CompileConfig(enable=True, backend="mst")
    apply_compile(model, compile_config=compiling, parallel_dims=OneProcess())
    loss_fn = HeadLoss(HeadLoss.Config(), compile_config=compiling)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True  # torchtitan's trainer sets both for a ChunkedLossWrapper
    loss, _ = loss_fn(model(tokens_BS), labels_BS)
    loss.backward()

    pairs = zip(model.parameters(), gradients, strict=True)
    error = max(float((p.grad - g).norm() / g.norm()) for p, g in pairs)
    reports = list(mstpass.reports()[others:])
    for report in reports:
        print(report)
    print(f"largest relative difference of a gradient to eager's: {error:.1e}")
    return error, reports


if __name__ == "__main__":
    main()
