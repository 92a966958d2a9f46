"""The parts of the benchmark, in the order in which they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from mstpass.bench.gpu import blocks, chunks, cuda_tests, heads, longest
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.rows import Case, Settings


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        what: what it measures, in words.
        share: its part of a call's time; what it does not use is left to the parts after it.
        cases: its cases.
        work: measures the wanted rows of a job, in a worker.
        environment: variables of its workers.
    """

    name: str
    what: str
    share: float
    cases: Callable[[Settings], Sequence[Case]]
    work: Callable[[Job], None]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ALL = (
    Part(cuda_tests.NAME, "the CUDA tests", 2, cuda_tests.cases, cuda_tests.work),
    Part(chunks.NAME, "loops and what their chunks cost", 2, chunks.cases, chunks.work),
    Part(heads.NAME, "LM heads at Llama-3 sizes", 3, heads.cases, heads.work),
    Part(blocks.NAME, "Llama-3-8B-shaped blocks by budget", 3, blocks.cases, blocks.work),
    Part(
        longest.NAME,
        "the longest sequence that fits",
        4,
        longest.cases,
        longest.work,
        # as `mstpass plan` assumes: no gaps between tensors
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
)
PARTS: Mapping[str, Part] = {part.name: part for part in _ALL}
