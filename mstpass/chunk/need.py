"""Which loops lower the step's peak, by simulation; a loop that does not costs time for nothing.

A loop in *save* mode keeps what the unchunked graph would keep: all it can lower is what its region
needs for itself while it runs. In most layers that is far from the step's peak. So::

    peak = of the step with all loops
    leave out every loop in save mode; a region needs its loop where, while its kernels run,
    more than that peak is alive
    leave out the loops of the others, if that does not raise the peak

Loops that fuse or recompute keep less for the backward; they stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstpass.graph.memory import StepMemory
from mstpass.options import Options
from mstpass.plans import SAVE, ChunkPlan, Rejection

_ROOM = 1.005  # times the peak: what a simulation cannot tell apart


def optional_plans(plans: Sequence[ChunkPlan], options: Options) -> list[ChunkPlan]:
    """Those that may be left out. A batch of any size may come to a symbolic one."""
    if options.chunk_tokens is not None:
        return []
    return [p for p in plans if p.mode == SAVE and not p.symbolic]


def needless(
    optional: Sequence[ChunkPlan], with_loops: StepMemory, without: StepMemory
) -> list[ChunkPlan]:
    """Those whose region, unchunked, stays below the peak of the step with all loops."""
    limit = _ROOM * with_loops.peak_bytes
    return [p for p in optional if without.bytes_at({name for name, _ in p.members}) <= limit]


def no_higher(memory: StepMemory, than: StepMemory) -> bool:
    """Whether one step's peak is no higher than another's, as far as that can be told."""
    return memory.peak_bytes <= _ROOM * than.peak_bytes


def rejection(plan: ChunkPlan) -> Rejection:
    reason = "the step's peak lies elsewhere: chunks would not lower it"
    return Rejection("plan", plan.members[0][0], reason, plan.source, plan.bytes_before)
