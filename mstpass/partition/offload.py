"""Have the saved values of a plan wait on the host: in its two graphs, and in its ``SavePlan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from torch import fx

from mstpass.graph.joint import Modules
from mstpass.graph.node_copies import original_name
from mstpass.memory.host_copies import HostCopy
from mstpass.plans import SavePlan, Transfer
from mstpass.problem.problem import CutProblem
from mstpass.schedule.offload_saved_values import TimeOf, offload_saved_values


def offload(
    modules: Modules,
    save_plan: SavePlan,
    offloaded: Set[str],
    num_fwd_outputs: int,
    problem: CutProblem,
    old_names: Mapping[str, str],
) -> SavePlan:
    """The plan with its copies, which are written into the modules, in place.

    Args:
        offloaded: names of nodes of the forward module, which it returns for backward.
        problem: the problem, with loops in place, that the plan is for: its times count.
        old_names: the name in the problem of each node of the modules that has another one.
    """
    host = problem.host
    names = offloaded & {value.node for value in save_plan.saved}
    if host is None or not names:
        return save_plan
    time_of = _times(problem, old_names)
    copied = offload_saved_values(modules, names, num_fwd_outputs, host, time_of)
    value_of = {value.node: value.value or value.node for value in save_plan.saved}

    def transfer(copy: HostCopy, to_host: bool) -> Transfer:
        times = copy.start_us, copy.end_us, copy.stall_us
        return Transfer(value_of[copy.name], copy.bytes, to_host, *times)

    to_host = (transfer(copy, True) for copy in copied.forward)
    back = (transfer(copy, False) for copy in copied.backward)
    return dataclasses.replace(
        save_plan,
        saved=tuple(
            dataclasses.replace(value, node=copied.host_names[value.node], on_host=True)
            if value.node in names
            else value
            for value in save_plan.saved
        ),
        transfers=(*to_host, *back),
        forward_us=copied.forward_us,
        backward_us=copied.backward_us,
    )


def _times(problem: CutProblem, old_names: Mapping[str, str]) -> TimeOf:
    """The estimated time of each node; a value that is recomputed has that of the forward's."""
    us = {value.name: value.us for value in (*problem.values, *problem.backward)}

    def time_of(node: fx.Node) -> float:
        name = original_name(node.name)
        return us.get(old_names.get(name, name), 0.0)

    return time_of
