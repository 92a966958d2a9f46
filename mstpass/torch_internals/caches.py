"""What torch counts while it compiles, and a compile cache that is empty: for measurements.

Source: torch/_dynamo/utils.py (``counters``), torch/_inductor/metrics.py, utils.py.
"""

from __future__ import annotations

from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["counters", "fresh_cache", "num_auto_chunked"]

APIS = PrivateApis(
    names=(
        "torch._dynamo.utils.counters",
        "torch._inductor.metrics.num_auto_chunking",
        "torch._inductor.utils.fresh_cache",
    ),
    checked=("2.11", "2.13", "2.15"),
)


def num_auto_chunked() -> int:
    """How many graphs Inductor's auto_chunker has changed in this process."""
    return metrics.num_auto_chunking


def probe() -> None:
    APIS.require()
    for group in ("stats", "aot_autograd", "inductor"):
        APIS.expect(counters[group]["mstpass_probe"] == 0, f"counters has no group {group}")
        del counters[group]["mstpass_probe"]
