"""The peak memory of a step as Inductor has scheduled it.

Plans are simulated on graphs (memory/simulate_ops.py), which do not say what Inductor will fuse.
Here the lines of the code that it has made of forward, backward and loop bodies
(torch_internals/inductor_schedule.py) are summed up::

    bytes(line)   = buffers alive + the workspace of what it calls, or the peak of a loop's body
    peak(graph)   = max of bytes(line)
    peak(step)    = max(peak(forward), peak(backward) + what the caller of the forward holds)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mstpass.graph.loop_op import CONDITION
from mstpass.memory.allocation import allocated_bytes, bytes_on_gpu
from mstpass.memory.workspaces import KNOWN, workspace_bytes
from mstpass.torch_internals.inductor import SchedulerPass
from mstpass.torch_internals.versions import LostLoopError, NotCountedError

if TYPE_CHECKING:
    from mstpass.torch_internals.inductor_schedule import Schedule

log = logging.getLogger(__name__)


class ReadSchedule(SchedulerPass):
    """Inductor's pass after fusion; it keeps what it reads of each graph, and changes nothing.

    Attributes:
        failed: an error left a graph unread: nothing is known.
        checked: of how many graphs the order of the loops was looked at.
        schedules: those that it has read, with the bodies of their loops.
    """

    def __init__(self, users_pass: Callable[..., Any] | None = None):
        super().__init__(users_pass)
        self.failed, self.checked = False, 0
        self.schedules: list[Schedule] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        nodes = super().__call__(nodes)
        with self._told():
            # Imported here: a torch that lacks what the reader needs still compiles.
            from mstpass.torch_internals import inductor_schedule as reader

            reader.around_code(nodes, functools.partial(self._read, reader))
        return nodes

    def _read(self, reader: Any, kernels: Sequence[Any], write: Callable[[], None]) -> None:
        """Check the order of a graph's kernels, and read their code."""
        self.checked += 1
        with self._told():
            reader.check_loops(kernels, CONDITION)
        write()
        allocated = allocated_bytes if reader.is_for_cpu() else bytes_on_gpu
        with self._told():
            self.schedules.append(reader.read_schedule(KNOWN, allocated))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """After an error nothing is known but the peak of the simulated plan."""
        try:
            yield
        except LostLoopError:
            raise
        except Exception as error:
            if not (self.failed or isinstance(error, NotCountedError)):
                log.warning(
                    "mstpass cannot read Inductor's schedule, so budgets are checked against "
                    "simulated peaks alone: %s: %s. `python -m mstpass.torch_internals` tells what "
                    "has changed.",
                    type(error).__name__,
                    error,
                )
            log.debug("Inductor's schedule is not read: %s", error, exc_info=error)
            self.failed = True

    @property
    def peak_bytes(self) -> int | None:
        """Highest bytes of forward and backward, or of the one graph that no backward follows; None
        where they were not all read."""
        graphs = [s for s in self.schedules if not s.is_loop_body]
        if self.failed or len(graphs) != 2 - all(s.is_inference for s in graphs):
            return None
        found: list[tuple[int, int]] = []
        bodies: dict[str, int] = {}
        try:
            for schedule in self.schedules:
                peak, left = _peak_and_left(schedule, bodies)
                if schedule.is_loop_body:
                    bodies[schedule.name] = peak
                else:
                    found.append((peak, left))
                    bodies.clear()
        except KeyError as body:
            log.debug("the schedule of %s has not been read", body)
            return None
        (forward, held_bytes), *backwards = found
        if not backwards:
            return forward
        inputs = graphs[1].freed_inputs
        saved_bytes = sum(inputs[name] for name in inputs if not name.startswith("tangents"))
        # the caller of the forward holds the rest of what it leaves
        return max(forward, backwards[0][0] + max(0, held_bytes - saved_bytes))


def _peak_and_left(schedule: Schedule, bodies: Mapping[str, int]) -> tuple[int, int]:
    """The highest bytes while a graph runs, and the bytes that are alive when it is done.

    Args:
        bodies: the peaks of the loop bodies that are in it.
    """
    alive = dict(schedule.freed_inputs)
    peak = now = sum(alive.values())
    for line in schedule.lines:
        if line.moved is not None:
            new, old = line.moved
            alive[new] = alive.pop(old, 0)
        alive |= line.allocated
        now += sum(line.allocated.values())
        inner = bodies[line.loop_body] if line.loop_body else 0
        inner += workspace_bytes(line.op) if line.op is not None else 0
        peak = max(peak, now + inner)
        now -= sum(alive.pop(name, 0) for name in line.freed)
    return peak, now
