"""The values of a graph's nodes that it computes from nothing but positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.positions import pointwise, sources, sums, views
from mstpass.graph.positions.calls import Call, exactly, name_of_op
from mstpass.graph.positions.pieces import Pieces
from mstpass.graph.positions.polynomials import TooComplicated
from mstpass.graph.sizes import is_size
from mstpass.torch_internals.graphs import OpOverload
from mstpass.walk import walk_once

_RULES = {**sources.RULES, **pointwise.RULES, **views.RULES, **sums.RULES}


@dataclass(frozen=True)
class Unknown:
    """Why the value of a node is not known.

    Attributes:
        node: the first node of its computation that has no known value.
        reason: why not.
        from_data: the value depends on the step's inputs, its parameters or random numbers. If not,
            it is computed from positions, and only its form is not understood.
    """

    node: str
    reason: str
    from_data: bool


class Positions:
    """The values of a joint graph's nodes, each computed when it is asked for."""

    def __init__(self, joint: JointGraph):
        self._joint = joint
        self._known: dict[fx.Node, Pieces | Unknown] = {}

    def value(self, node: fx.Node) -> Pieces | Unknown:
        """The tensor that a node computes, at every position."""
        unknown = lambda nodes: (n for n in nodes if n not in self._known and not is_size(n))
        missing = walk_once(unknown([node]), lambda one: unknown(one.all_input_nodes))
        for one in self._joint.sorted(missing):
            self._known[one] = self._evaluated(one)
        return self._known[node]

    def _evaluated(self, node: fx.Node) -> Pieces | Unknown:
        if node.op != "call_function":
            return Unknown(node.name, "its values are known when the step runs", True)
        operands = [n for n in node.all_input_nodes if not is_size(n)]
        values = {n: self._known[n] for n in operands}
        unknown = [value for value in values.values() if isinstance(value, Unknown)]
        for value in sorted(unknown, key=lambda value: not value.from_data):
            return value
        rule = _RULES.get(name_of_op(node)) if isinstance(node.target, OpOverload) else None
        if rule is None:
            return Unknown(node.name, f"{node.target} has no rule", not operands)
        try:
            call = Call(node, {n: v for n, v in values.items() if isinstance(v, Pieces)})
            return exactly(call, rule(call))
        except TooComplicated as error:
            return Unknown(node.name, str(error), False)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return Unknown(node.name, f"arguments that its rule does not know ({error})", False)
