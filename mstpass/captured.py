"""A graph that Dynamo captured, and how its user wants it to be compiled.

Its ranks agree on the bytes of a budget, and on whether backward may repeat collectives.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mstpass.options import Options
from mstpass.report.report import Report
from mstpass.returned_logits import Drop
from mstpass.torch_internals.collectives import Alike, has_ranks, has_store, least_of_ranks

_PARAMETERS, _SOURCE = "_param_name_to_source", "_dynamo_source"


@dataclasses.dataclass(frozen=True)
class PlannedFor:
    """The batch that a graph is planned for; by default, that of its inputs.

    Attributes:
        sizes: the value of each symbol, by its name.
        bounded: no larger batch takes the plan.
        must_fit: a plan that exceeds the budget in bytes is none.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    bounded: bool = False
    must_fit: bool = False

    @property
    def key(self) -> str:
        """What a plan depends on, the same in every process."""
        return f"{self.sizes} {self.bounded}"


OF_INPUTS = PlannedFor()


@dataclasses.dataclass(frozen=True)
class Captured:
    """One graph to compile.

    Attributes:
        inputs: tensors and sizes; fake ones, except in the first compilation.
        users: Inductor's settings as the user wants them.
        drop: the logits that the graph no longer returns.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    users: dict[str, Any]
    options: Options
    drop: Drop
    planned_for: PlannedFor = OF_INPUTS

    def of_this_rank(self) -> Captured:
        """The same for a plan that other ranks do not have: it repeats no collective."""
        options = dataclasses.replace(self.options, repeat_collectives="off")
        return dataclasses.replace(self, options=options)

    def copied_module(self) -> fx.GraphModule:
        """The module with a graph of its own: a compilation changes the one that it is given.

        AOTAutograd reads where each input comes from in attributes of Dynamo's.
        """
        module = self.module
        copied = fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
        copied.meta = dict(module.meta)
        if hasattr(module, _PARAMETERS):
            setattr(copied, _PARAMETERS, getattr(module, _PARAMETERS))
        inputs = (m.graph.find_nodes(op="placeholder") for m in (module, copied))
        for traced, node in zip(*inputs, strict=True):
            if hasattr(traced, _SOURCE):
                setattr(node, _SOURCE, getattr(traced, _SOURCE))
        return copied


def of_all_ranks(available_bytes: int, example_inputs: Sequence[Any]) -> int:
    """The least that any rank has left, for a graph that has a backward.

    Programs often evaluate on one rank alone, which must not wait for the others.
    """
    if not has_backward(example_inputs):
        return available_bytes
    agreed_bytes, alone = least_of_ranks(available_bytes)
    if alone:
        warnings.warn(
            f"mstpass: {alone}, so memory_budget='auto' counts the memory of one rank "
            "alone. Where ranks run different programs, give each a memory_budget in bytes",
            stacklevel=2,
        )
    return agreed_bytes


def has_backward(inputs: Sequence[Any]) -> bool:
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def why_not_alike(graph: Captured, report: Report | None) -> str:
    """Why a plan that repeats collectives is not known to be that of all ranks; else empty.

    A rank whose plan repeats none tells the others so, and does not wait.

    Args:
        report: None: the graph came from a compile cache, and its report is lost.
    """
    if not graph.options.repeats_collectives or not has_ranks():
        return ""
    if report is None:
        lost = "the compile cache has this graph, and its report is lost"
        return lost if has_backward(graph.inputs) else ""
    found = report.outcome.collectives
    if found is None:
        return ""
    if not has_store():
        return "ranks cannot tell each other their plans by MPI" if found.repeated else ""
    targets = (node.target for node in graph.module.graph.nodes)
    called = "\n".join(t if isinstance(t, str) else t.__name__ for t in targets)  # not its address
    alike = Alike(found.groups, hashlib.sha256(called.encode()).hexdigest())
    alike.tell(found.order)
    return alike.why_not(found.order) if found.repeated else ""
