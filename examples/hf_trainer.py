"""transformers' Trainer with mst: `torch_compile_backend="mst"`, and nothing to import.

The compiled model returns its logits beside its loss, and `Trainer` reads the loss alone.
MSTPASS_LOGITS=drop says so: then the logits exist one chunk at a time. Evaluation still has all of
them. `mstpass.compile_trainer(trainer)` in place of `torch_compile_backend` does the same.

    pip install 'mstpass[hf]' accelerate && python examples/hf_trainer.py
"""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mstpass  # for its report; where mstpass is installed, training needs no import

VOCABULARY = 4096


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (256,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> tuple[list[float], mstpass.Report]:
    os.environ.setdefault("MSTPASS_LOGITS", "drop")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            torch_compile=True,
            torch_compile_backend="mst",
            per_device_train_batch_size=4,
            max_steps=6,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens())
        trainer.train()
    report = mstpass.reports()[-1]
    print(report)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], report


if __name__ == "__main__":
    main()
