"""When two loops have the same body, so that it is built, simulated and compiled once."""

from __future__ import annotations

from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.loops.operand_layout import layout_of
from mstpass.plans import LoopInput, LoopPlan


def body_key(joint: JointGraph, loop: LoopPlan, in_order: bool = True) -> str:
    """Equal for loops whose bodies are: the same ops, on values of the same sizes and layouts.

    Args:
        in_order: the inputs come in the same order as well. What a chunk takes does not depend on
            that.
    """
    specs = loop.spec_of()
    number: dict[fx.Node, object] = {}
    inputs = loop.inputs if in_order else _by_first_use(joint, loop)
    rows: list[object] = [loop.chunks, loop.accumulate, *(item.spec for item in inputs)]
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

    for name in (*(item.node for item in inputs), *loop.members):
        node = joint.by_name[name]
        number.setdefault(node, len(number))
        rows.append((specs.get(name), _layouts(node)))
    for name in loop.members:
        node = joint.by_name[name]
        rows.append((node.target, fx.map_arg((node.args, node.kwargs), operand)))
    return repr(rows)


def _by_first_use(joint: JointGraph, loop: LoopPlan) -> list[LoopInput]:
    operands = (n.name for name in loop.members for n in joint.by_name[name].all_input_nodes)
    first = {name: i for i, name in enumerate(dict.fromkeys(operands))}
    return sorted(loop.inputs, key=lambda item: (first.get(item.node, len(first)), item.spec))


def _layouts(node: fx.Node) -> object:
    value = node.meta.get("val")
    return list(map(layout_of, tensors_of(value))) or value
