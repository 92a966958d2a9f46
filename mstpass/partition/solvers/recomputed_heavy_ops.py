"""What recomputation costs: the heavy ops that backward repeats under a plan.

Each op comes with the time to repeat it and with the bytes that saving its results would take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from mstpass.problem.op import ITEM
from mstpass.problem.problem import CutProblem, Value
from mstpass.problem.saved_set import recomputed


@dataclasses.dataclass(frozen=True)
class HeavyOp:
    """A heavy op of the forward that backward repeats.

    Attributes:
        results: names of the values to save in order not to repeat it: the op's own value, or the
            items of a loop or of an attention that backward reads.
        bytes: size of all of these.
        us: time of the op, in microseconds.
    """

    results: frozenset[str]
    bytes: int
    us: float

    @property
    def us_per_byte(self) -> float:
        """Time won by each byte that is saved."""
        return self.us / max(1, self.bytes)


def recomputed_heavy_ops(problem: CutProblem, saved: Set[str]) -> list[HeavyOp]:
    """The heavy ops that backward repeats and whose results may be saved.

    The op that takes longest for its bytes comes first.
    """
    repeated = set(recomputed(problem, saved))
    ops: dict[str, tuple[Value, list[Value]]] = {}
    for value in problem.values:
        if value.name not in repeated:
            continue
        if value.heavy and value.forward:
            ops[value.name] = value, [value] if value.savable else []
        elif value.kind == ITEM and value.savable and value.inputs[0] in ops:
            ops[value.inputs[0]][1].append(value)
    found = [
        HeavyOp(frozenset(v.name for v in results), sum(v.bytes for v in results), op.us)
        for op, results in ops.values()
        if results
    ]
    return sorted(found, key=lambda op: -op.us_per_byte)
