"""A graph that Dynamo captured, and how its user wants it to be compiled."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import fx

from mstpass.options import Options
from mstpass.returned_logits import Drop

_PARAMETERS, _SOURCE = "_param_name_to_source", "_dynamo_source"


@dataclasses.dataclass(frozen=True)
class PlannedFor:
    """The batch that a graph of symbolic sizes is planned for.

    Attributes:
        sizes: the value of each symbol, by its name.
        batch: those of the batch at hand, which messages name.
        bounded: no larger batch takes the plan.
        must_fit: a plan that exceeds the budget in bytes is none.
    """

    sizes: tuple[tuple[str, int], ...]
    batch: tuple[tuple[str, int], ...]
    bounded: bool = True
    must_fit: bool = False

    @property
    def key(self) -> str:
        """What a plan depends on, the same in every process."""
        return f"{self.sizes} {self.bounded}"


@dataclasses.dataclass(frozen=True)
class Captured:
    """One graph to compile.

    Attributes:
        inputs: tensors and sizes; fake ones, except in the first compilation.
        users: Inductor's settings as the user wants them.
        drop: the logits that the graph no longer returns.
        planned_for: None: the batch of the inputs, whose sizes are static or have one plan.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    users: dict[str, Any]
    options: Options
    drop: Drop
    planned_for: PlannedFor | None = None

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
