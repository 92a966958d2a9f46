"""Whether torch called the hooks of mstpass while it compiled a graph, and what follows if not.

A new torch may rename a hook, call it with other arguments, or not call it any more. That a name
exists proves nothing, so each compilation is held to what it must have done::

    the backward is compiled          => the partitioner was called           (LowerLoops)
    every loop of a graph             => is in Inductor's schedule, in front of what reads its
                                         results                              (ReadSchedule)
    a graph was compiled afresh       => the last graph pass was called       (`check_calls`)
    the partitioner returned loops    => all of them were lowered, and kernels were seen before
                                         they were fused, and after, and when code was written

The first two are checked inside of the hooks, before Inductor caches anything. The counts cost
nothing, and the schedule is walked over once. Where a check fails, the graph is compiled by
Inductor alone. Without the schedule, mstpass goes on. ``strict=True`` raises.
"""

from __future__ import annotations

import functools
import warnings

from mstpass.inductor_hooks import LowerLoops, Partitioner
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.torch_internals.caches import CacheCounts
from mstpass.torch_internals.scheduler_mends import MendScheduler
from mstpass.torch_internals.versions import ADVICE, LostLoopError, TorchChangedError

FUSION_HOOK, SCHEDULE_HOOK = "_pre_fusion_custom_pass", "_post_fusion_custom_pass"


def check_calls(
    partitioner: Partitioner,
    lowering: LowerLoops,
    mender: MendScheduler,
    reader: ReadSchedule,
    counts: CacheCounts,
) -> None:
    """Check that torch called the hooks while it compiled one step.

    Args:
        counts: what came from a cache and what did not, of this compilation.

    Raises:
        TorchChangedError: a hook was not called.
        LostLoopError: a loop that was planned was not lowered.
    """
    if counts.hits:  # graphs that were checked when they were compiled
        return
    if counts.fresh and not lowering.graphs:
        raise TorchChangedError("post_grad_custom_post_pass is not called")
    if lowering.loops < partitioner.loops:
        raise LostLoopError(f"torch has compiled {lowering.loops} of {partitioner.loops} loops")
    if lowering.loops and not mender.graphs:
        raise TorchChangedError(f"{FUSION_HOOK} is not called")
    if lowering.loops and not 0 < reader.graphs == reader.checked:
        not_called = "Scheduler.codegen" if reader.graphs else SCHEDULE_HOOK
        unread = TorchChangedError(f"{not_called} is not called")
        if partitioner.options.strict:
            raise unread
        _warn_unread(str(unread))


@functools.cache
def _warn_unread(wrong: str) -> None:
    """Loops were lowered, so the step has them. What is not known is Inductor's final order."""
    warnings.warn(
        f"mstpass cannot see Inductor's schedule. Found with {wrong}. Budgets are held to "
        f"simulated peaks alone, and that kernels wait for loops is not checked. {ADVICE}.",
        stacklevel=3,
    )
