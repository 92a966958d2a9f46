"""What torch counts while it compiles, and a compile cache that is empty.

Source: torch/_dynamo/utils.py (``counters``), torch/_inductor/metrics.py, utils.py, codecache.py;
torch/_functorch/_aot_autograd/autograd_cache.py.
"""

from __future__ import annotations

from typing import NamedTuple

from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["CacheCounts", "cache_counts", "counters", "fresh_cache", "num_auto_chunked"]

APIS = PrivateApis(
    names=(
        "torch._dynamo.utils.counters",
        "torch._inductor.metrics.num_auto_chunking",
        "torch._inductor.utils.fresh_cache",
    ),
)


class CacheCounts(NamedTuple):
    """How many graphs came from the compile caches, and how many Inductor compiled afresh."""

    hits: int
    fresh: int

    def since(self, before: CacheCounts) -> CacheCounts:
        return CacheCounts(self.hits - before.hits, self.fresh - before.fresh)


def cache_counts() -> CacheCounts:
    """The counts of this process. With Inductor's cache turned off, neither is counted."""
    of_graphs, of_steps = counters["inductor"], counters["aot_autograd"]
    return CacheCounts(
        hits=of_steps["autograd_cache_hit"] + of_graphs["fxgraph_cache_hit"],
        fresh=of_graphs["fxgraph_cache_miss"] + of_graphs["fxgraph_cache_bypass"],
    )


def num_auto_chunked() -> int:
    """How many graphs Inductor's auto_chunker has changed in this process."""
    return metrics.num_auto_chunking


def probe() -> None:
    APIS.require()
    for group in ("stats", "aot_autograd", "inductor"):
        APIS.expect(counters[group]["mstpass_probe"] == 0, f"counters has no group {group}")
        del counters[group]["mstpass_probe"]
