"""Batches of tokens from real text that every machine has: the Python standard library's sources.

Files are read in sorted order, and batches are drawn by a seeded generator. Two runs with the same
Python therefore see the same tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mstpass.errors import UserError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_CHUNK_CHARS = 16_384  # the tokenizer encodes pieces in parallel


class NoTextError(UserError):
    """The sources of this Python are missing or too short to train on."""


def read_sources(max_chars: int) -> list[str]:
    """The first `max_chars` of the standard library's sources, in pieces."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    read = 0
    for path in _source_files(root):
        source = path.read_text(encoding="utf-8", errors="replace")[: max_chars - read]
        pieces += [source[i : i + _CHUNK_CHARS] for i in range(0, len(source), _CHUNK_CHARS)]
        read += len(source)
        if read >= max_chars:
            break
    if not pieces:
        raise NoTextError(
            f"no Python sources under {root}: use a Python that is installed with its sources"
        )
    return pieces


def _source_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if not _NOT_LIBRARY & set(path.relative_to(root).parts):
            yield path


def train_tokenizer(pieces: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocabulary` tokens (fewer when the text is too short)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,  # rare merges too, so that the vocabulary gets full
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, pieces: list[str]) -> torch.Tensor:
    """The token ids of all pieces, as one stream (T,)."""
    return torch.tensor([i for piece in tokenizer.encode_batch(pieces) for i in piece.ids])


def batches(stream_T: torch.Tensor, steps: int, batch: int, length: int) -> list[torch.Tensor]:
    """`steps` batches (batch, length), cut at random places of the stream."""
    last_start = len(stream_T) - length
    if last_start < 1:
        raise NoTextError(f"{len(stream_T)} tokens of text do not fill a sequence of {length}")
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(last_start, (steps, batch), generator=generator)
    return [torch.stack([stream_T[i : i + length] for i in row.tolist()]) for row in starts]
