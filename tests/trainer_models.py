"""A tiny Llama, its tokenizer and data sets, without network."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 4096


def tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """One word for each token: w3, w4, ...; 0 is padding, 1 begins and 2 ends a text."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocabulary))]
    one = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    one.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=one, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def config(vocabulary: int = VOCABULARY, **changes: Any) -> LlamaConfig:
    values = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return LlamaConfig(**{**values, **changes})


def llama(vocabulary: int = VOCABULARY, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config(vocabulary, **changes))


def reward_model(**changes: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config(num_labels=1, **changes))


def text(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (length,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())
