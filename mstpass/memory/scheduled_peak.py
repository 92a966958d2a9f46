"""The peak memory of a step as Inductor has scheduled it.

Plans are simulated on graphs (memory/simulate_ops.py), which do not say what Inductor will fuse.
Here the schedules of forward, backward and loop bodies, read after fusion
(torch_internals/inductor_schedule.py), are summed up::

    bytes(call)   = buffers alive + the largest workspace in it + peak of the loop body it runs
    peak(graph)   = max of bytes(call)
    peak(step)    = max(peak(forward), peak(backward) + what the caller of the forward holds)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mstpass.graph.loop_op import CONDITION
from mstpass.memory.allocation import allocated_bytes, bytes_on_gpu
from mstpass.memory.workspaces import KNOWN, workspace_bytes
from mstpass.torch_internals.inductor import CustomSchedulerPass, key_of
from mstpass.torch_internals.versions import LostLoopError

if TYPE_CHECKING:
    from mstpass.torch_internals.inductor_schedule import Schedule

log = logging.getLogger(__name__)


class ReadSchedule(CustomSchedulerPass):
    """Inductor's pass after fusion; it keeps what it reads and changes nothing but the order.

    Attributes:
        failed: an error left a graph unread: nothing is known.
        graphs: how many it was called with.
        schedules: those that it has read, with the bodies of their loops.
    """

    def __init__(self, users_pass: Callable[..., Any] | None = None):
        self.users_pass = users_pass
        self.failed = False
        self.graphs = 0
        self.schedules: list[Schedule] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.graphs += 1
        if self.users_pass is not None:
            nodes = self.users_pass(nodes)
        try:
            # Imported here: a torch that lacks what the reader needs still compiles.
            from mstpass.torch_internals import inductor_schedule as reader
            from mstpass.torch_internals.inductor_kernels import (
                check_loops,
                in_final_order,
                is_for_cpu,
            )
        except Exception as error:
            return self._failed(nodes, error, expected=False)
        try:
            nodes = in_final_order(nodes)
            check_loops(nodes, CONDITION)
            allocated = allocated_bytes if is_for_cpu() else bytes_on_gpu
            self.schedules.append(reader.read_schedule(nodes, KNOWN, allocated))
        except LostLoopError:
            raise
        except Exception as error:
            return self._failed(nodes, error, expected=isinstance(error, reader.NotCountedError))
        return nodes

    def _failed(self, nodes: list[Any], error: Exception, expected: bool) -> list[Any]:
        """Nothing is known then but the peak of the simulated plan."""
        if not (expected or self.failed):
            log.warning(
                "mstpass cannot read Inductor's schedule, so budgets are checked against simulated "
                "peaks alone: %s: %s. `python -m mstpass.torch_internals` tells what has changed.",
                type(error).__name__,
                error,
            )
        log.debug("Inductor's schedule is not read: %s", error, exc_info=error)
        self.failed = True
        return nodes

    def uuid(self) -> Any:
        return key_of(self.users_pass)

    @property
    def peak_bytes(self) -> int | None:
        """Highest bytes of forward and backward, or of the one graph that no backward follows; None
        where they were not all read."""
        graphs = [s for s in self.schedules if not s.is_loop_body]
        if self.failed or len(graphs) != 2 - all(s.is_inference for s in graphs):
            return None
        try:
            *backwards, forward = (_peak_and_left(s, bodies) for s, bodies in self._with_bodies())
        except KeyError as body:
            log.debug("the schedule of %s has not been read", body)
            return None
        if not backwards:
            return forward[0]
        (backward,) = backwards
        inputs = graphs[1].freed_inputs
        saved_bytes = sum(inputs[name] for name in inputs if not name.startswith("tangents"))
        held_bytes = max(0, forward[1] - saved_bytes)  # by the caller of the forward
        return max(forward[0], backward[0] + held_bytes)

    def _with_bodies(self) -> Iterator[tuple[Schedule, dict[str, Schedule]]]:
        """The graphs, the last first, each with the loop bodies that were scheduled after it."""
        bodies: dict[str, Schedule] = {}
        for schedule in reversed(self.schedules):
            if schedule.is_loop_body:
                bodies[schedule.name] = schedule
            else:
                yield schedule, bodies
                bodies = {}


def _peak_and_left(schedule: Schedule, bodies: Mapping[str, Schedule]) -> tuple[int, int]:
    """The highest bytes while a graph runs, and the bytes that are alive when it is done."""
    alive = dict(schedule.freed_inputs)
    peak = 0
    for call in schedule.calls:
        alive |= call.allocated
        for name in call.overwritten:
            del alive[name]
        inner = call.workspace_bytes + max(map(workspace_bytes, call.ops), default=0)
        if call.loop_body:
            inner += _peak_and_left(bodies[call.loop_body], bodies)[0]
        peak = max(peak, sum(alive.values()) + inner)
        for name in call.freed:
            del alive[name]
    return peak, sum(alive.values())
