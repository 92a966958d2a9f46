"""A small Llama, a tokenizer and texts for trainers, made without network."""

from __future__ import annotations

from typing import Any

import torch

FIRST_WORD = 3  # 0 is padding, 1 begins a text, 2 ends it


def tokenizer(vocabulary: int) -> Any:
    """One token for each of the words w3, w4, ..., which stand between spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(FIRST_WORD, vocabulary))]
    of_words = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    of_words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def config(vocabulary: int, width: int = 32, layers: int = 1, **rest: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **rest,
    )


def llama(vocabulary: int, width: int = 32, layers: int = 1) -> Any:
    """A Llama of random weights, the same ones each time."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(config(vocabulary, width, layers))


def text(words: int, vocabulary: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in ids(words, vocabulary, seed).tolist())


def ids(tokens: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, vocabulary, (tokens,), generator=generator)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, as a trainer reads them."""

    def __init__(self, sequences: int, length: int, vocabulary: int):
        self.sequences, self.length, self.vocabulary = sequences, length, vocabulary

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = ids(self.length, self.vocabulary, index)
        return {"input_ids": tokens, "labels": tokens}
