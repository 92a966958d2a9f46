"""Lightning with mst: `Trainer.fit(torch.compile(module, backend="mst"))`.

Lightning compiles the module's `training_step`. It returns the loss alone, so the logits exist one
chunk at a time without further options.

    pip install 'mstpass[hf]' lightning && python examples/lightning_module.py
"""

from typing import Any

import lightning
import torch

import mstpass
from mstpass.bench.trainers import Tokens, llama

VOCABULARY = 4096


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama(VOCABULARY)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: object, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> tuple[list[float], mstpass.Report]:
    module = LanguageModel()
    trainer = lightning.Trainer(
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader(Tokens(4, 256, VOCABULARY), batch_size=4)
    compiled = torch.compile(module, backend="mst")
    trainer.fit(compiled, batches)
    report = mstpass.reports()[-1]
    print(report)
    return module.losses, report


if __name__ == "__main__":
    main()
