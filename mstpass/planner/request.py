"""The input of `mstpass plan`: a model, how it is trained, and a device."""

from __future__ import annotations

import dataclasses

from mstpass.planner.training import Training

OVERHEAD = "1.25GiB"  # CUDA's context, and what an "80 GiB" card lacks of 80 GiB
EXPANDABLE, CACHING = "expandable", "caching"
ALLOCATORS = (EXPANDABLE, CACHING)
BATCH, LENGTH, RECOMPUTE = "batch", "length", "recompute"
SEARCHED = (BATCH, LENGTH, RECOMPUTE)
GROUPS = (1, 2, 4)  # of heads, which are compared
SHORTEST = 2048  # tokens of a sequence that is searched, where none are given
# of the eager rows, explained in eager_recipes
LOGITS, OUTPUTS = ("model", "fp32", "chunked"), ("held", "dropped")
MLP_TILES = ("kept", "again")


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, how it is trained, and the device.

    Attributes:
        model: a shipped name, or the path of a ``config.json``.
        device_bytes: memory of the device.
        overhead_bytes: part of the device's memory that tensors cannot use.
        length: sequence length in tokens, on all ranks that share it; None: find the longest that
            fits.
        logits: one of ``LOGITS``: how the eager rows compute their loss.
        outputs: one of ``OUTPUTS``: whether the training loop of the eager rows holds the model's
            outputs until the backward is over.
        mlp_tiles: one of ``MLP_TILES``: what the MST recipe's backward holds of an MLP.
        allocator: one of ``ALLOCATORS``.
        alone: plan mst's row only, without rows to compare with.
        host_bytes: pinned host memory in which saved values of mst's row may wait, and inputs of
            layers that eager rows checkpoint.
        gpu: the kind of GPU, by a name of ``mstpass.gpus``, whose speed decides chunk lengths and
            times; None: this machine's, or else an H100.
        split: find the best number of ranks that share a sequence; ``training`` has all ranks.
        groups: find the best number of groups of heads of ranks that share a sequence.
        search: which of ``SEARCHED`` to choose, by the most tokens per second; a length that is
            given is then the shortest.
        curves: also find what other lengths take, up to twice the device's memory (curve.py).
    """

    model: str
    training: Training
    device_bytes: int
    overhead_bytes: int
    length: int | None = None
    logits: str = "model"
    outputs: str = "held"
    mlp_tiles: str = "kept"
    allocator: str = EXPANDABLE
    alone: bool = False
    gpu: str | None = None
    host_bytes: int = 0
    split: bool = False
    groups: bool = False
    search: frozenset[str] = frozenset()
    curves: bool = False

    @property
    def compares_eager(self) -> bool:
        """Whether eager steps are rows to compare with."""
        return not self.alone

    @property
    def compares_splits(self) -> bool:
        """Whether several ways to divide devices or heads are compared."""
        return self.split or self.groups

    @property
    def traced_device(self) -> str | None:
        """The device that steps are traced for; None: that of their tensors.

        Where ranks share a sequence, the graph has ops of a GPU alone.
        """
        return "cuda" if self.split or self.training.shares else None

    @property
    def of_rank(self) -> Request:
        """The request with the length that a rank has of each sequence."""
        if self.length is None:
            return self
        return dataclasses.replace(self, length=-(-self.length // self.training.sequence_ranks))
