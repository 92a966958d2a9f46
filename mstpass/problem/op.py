"""``Op``: one node of a step as plain data, and the kinds of nodes there are.

memory/simulate_ops.py simulates the memory of a sequence of ops; memory/simulate_graph.py makes
ops from the nodes of a graph.
"""

from __future__ import annotations

import dataclasses

INPUT, VIEW, ITEM, CONSTANT = "input", "view", "item", "constant"
CALL, REDUCTION, SCATTER, POINTWISE = "call", "reduction", "scatter", "pointwise"


@dataclasses.dataclass(frozen=True)
class Op:
    """One node.

    Attributes:
        bytes: of the storage that keeping its result keeps alive.
        inputs: the nodes it reads.
        inner_bytes: what it needs besides results while it runs.
        dear: a pointwise op that is not repeated for every reader.
    """

    name: str
    bytes: int
    inputs: tuple[str, ...] = ()
    kind: str = POINTWISE
    inner_bytes: int = 0
    dear: bool = False
