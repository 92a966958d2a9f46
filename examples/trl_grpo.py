"""TRL's GRPO with mst: one line, `mstpass.compile_trainer(trainer)`.

GRPO reads log-probabilities and entropies of the completions' tokens, not a loss of the model.
`compile_trainer` compiles the model together with them; completions are generated as before. The
same line serves TRL's SFT, DPO, KTO and RLOO trainers.

    pip install 'mstpass[hf]' 'trl==1.16.*' && python examples/trl_grpo.py
"""

import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import mstpass
from mstpass.bench.trainers import llama, text, tokenizer

VOCABULARY, TOKENS = 4096, 128


def variety(completions: list[str], **rest: Any) -> list[float]:
    return [len(set(completion.split())) / TOKENS for completion in completions]


def main() -> tuple[dict[str, float], mstpass.Report]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=TOKENS,
            temperature=0.9,
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
        )
        prompts = [text(16, VOCABULARY, i) for i in range(8)]
        trainer = GRPOTrainer(
            model=llama(VOCABULARY),
            args=arguments,
            reward_funcs=variety,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(VOCABULARY),
        )
        print(mstpass.compile_trainer(trainer, memory_budget=0.0))
        trainer.train()
    report = mstpass.reports()[-1]
    print(report)
    return trainer.state.log_history[0], report


if __name__ == "__main__":
    main()
