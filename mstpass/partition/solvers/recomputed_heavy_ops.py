"""The heavy ops that a plan repeats, each with what saving its results would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from mstpass.problem.op import ITEM
from mstpass.problem.problem import CutProblem, Value
from mstpass.problem.verify import recomputed


@dataclasses.dataclass(frozen=True)
class Heavy:
    """A heavy op of the forward that backward repeats.

    Attributes:
        results: what backward has of it: the op's value, or the items of a loop or an attention.
        bytes: of all of these.
        us: time that the op takes.
    """

    results: frozenset[str]
    bytes: int
    us: float

    @property
    def us_per_byte(self) -> float:
        return self.us / max(1, self.bytes)


def repeated(problem: CutProblem, saved: Set[str]) -> list[Heavy]:
    """Those whose results may be saved, what takes longest for its bytes first."""
    again = set(recomputed(problem, saved))
    ops: dict[str, tuple[Value, list[Value]]] = {}
    for value in problem.values:
        if value.name not in again:
            continue
        if value.heavy and value.forward:
            ops[value.name] = value, [value] if value.savable else []
        elif value.kind == ITEM and value.savable and value.inputs[0] in ops:
            ops[value.inputs[0]][1].append(value)
    found = [
        Heavy(frozenset(v.name for v in results), sum(v.bytes for v in results), op.us)
        for op, results in ops.values()
        if results
    ]
    return sorted(found, key=lambda heavy: -heavy.us_per_byte)
