"""The partition problem as plain data: solvers see no FX graph.

A value that backward needs is available there if it is free (an input of the step), saved, or if
all its inputs are available and it may be recomputed. A solver picks the saved set.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Value:
    """One forward value.

    Attributes:
        bytes: of the storage that saving it keeps alive.
        inputs: names of the values it is computed from.
        free: available in backward at no cost.
        heavy: slow to recompute (a matmul, attention).
        pinned: must not be recomputed at all (a loop, a random draw).
        savable: may be saved; a view may not, its base is saved instead, so that no storage
            crosses twice.
        needed: backward uses it directly.
        forward: an output of the forward comes from it; others only serve the backward.
    """

    name: str
    bytes: int
    inputs: tuple[str, ...]
    free: bool = False
    heavy: bool = False
    pinned: bool = False
    savable: bool = True
    needed: bool = False
    forward: bool = True


@dataclasses.dataclass(frozen=True)
class CutProblem:
    """All forward values that backward may need, in topological order.

    ``recompute_heavy`` allows plans to recompute heavy values, for less memory and more time.
    """

    values: tuple[Value, ...]
    recompute_heavy: bool = False

    def keeps(self, value: Value) -> bool:
        """Whether backward may not recompute the value."""
        return value.pinned or (value.heavy and not self.recompute_heavy)

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in self.values:
            missing = [name for name in value.inputs if name not in known]
            if missing:
                raise ValueError(f"{value.name} needs {missing}, which do not come before it")
            if value.name in known:
                raise ValueError(f"{value.name} occurs twice")
            known.add(value.name)
