"""When two loops have the same body, so that it is built, simulated and compiled once."""

from __future__ import annotations

from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.loops.operand_layout import layout_of
from mstpass.plans import LoopPlan


def body_key(joint: JointGraph, loop: LoopPlan) -> str:
    """Equal for loops whose bodies are: the same ops, on values of the same sizes and layouts."""
    specs = loop.spec_of()
    number: dict[fx.Node, object] = {}
    rows: list[object] = [loop.chunks, loop.accumulate, *(item.spec for item in loop.inputs)]
    for item in loop.outputs:
        names = filter(None, (item.node, item.relative_to))
        rows.append((item.spec, *map(loop.members.index, names)))
    if loop.unit is not None:
        unit = joint.by_name[loop.unit]
        number[unit] = "unit"
        rows.append(_layouts(unit))

    def operand(node: fx.Node) -> Any:
        if node in number or node.op == "get_attr":
            return "node", number.get(node, node.target)
        return "not read", _layouts(node)  # such as the random state of attention without dropout

    for name in (*(item.node for item in loop.inputs), *loop.members):
        node = joint.by_name[name]
        number.setdefault(node, len(number))
        rows.append((specs.get(name), _layouts(node)))
    for name in loop.members:
        node = joint.by_name[name]
        rows.append((node.target, fx.map_arg((node.args, node.kwargs), operand)))
    return repr(rows)


def _layouts(node: fx.Node) -> object:
    value = node.meta.get("val")
    return list(map(layout_of, tensors_of(value))) or value
