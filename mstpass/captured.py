"""A graph that Dynamo captured, and how its user wants it to be compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from mstpass.options import Options
from mstpass.returned_logits import Drop


@dataclasses.dataclass(frozen=True)
class PlannedFor:
    """The batch that a graph of symbolic sizes is planned for.

    Attributes:
        sizes: the value of each symbol, by its name.
        bounded: no larger batch takes the plan.
        must_fit: a plan that exceeds the budget in bytes is none.
    """

    sizes: tuple[tuple[str, int], ...]
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
