"""Gradients that are zero outside of a window of tokens.

The backward of ``y = x[:, :-1]`` *scatters* the gradient of y into zeros of the shape of x; that of
``y = x[rows]`` adds it to the rows of such zeros. Every value that is computed from the result by
ops that are linear and token-parallel is also zero outside of the window, so it need not be
computed there.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.sizes import generic_shape
from mstpass.graph.tokens import Refusal, Spec
from mstpass.normalize.token_window import Choice, choice_of, grid_spec, is_scatter
from mstpass.walk import walk_once


def window_scatter_spec(node: fx.Node, window: Choice, wide_numel: float) -> Spec | None:
    """The token dims of a wide value that a node makes by scattering the window into zeros.

    None if the node is no such scatter.
    """
    if not is_scatter(node) or not linearity.is_zero(node.args[0]):
        return None
    value = value_of(node)
    if value is None or numel(node) < wide_numel:
        return None
    spec = grid_spec(node, generic_shape(value), window.grid, window.axis)
    return spec if spec is not None and choice_of(node, spec) == window else None


def scattered_gradients(
    joint: JointGraph, window: Choice, wide_numel: float
) -> tuple[dict[fx.Node, Spec], set[fx.Node]]:
    """The backward values that are zero outside of the window.

    Narrow values count only if they read wide ones or lead to them.

    Returns:
        The token dims of each value, and those of the values that are the scatters themselves.
    """
    specs: dict[fx.Node, Spec] = {}
    scatters: set[fx.Node] = set()
    for node in joint.nodes:
        if node not in joint.backward or node.op != "call_function":
            continue
        spec = window_scatter_spec(node, window, wide_numel)
        if spec is not None:
            scatters.add(node)
        else:
            spec = _spec_if_zero_outside(node, specs)
        if spec is not None:
            specs[node] = spec
    wide = {node for node in specs if numel(node) >= wide_numel}
    operands = lambda node: (n for n in node.all_input_nodes if n in specs)
    reading_wide = (node for node in specs if not wide.isdisjoint((node, *node.all_input_nodes)))
    kept = set(walk_once(reading_wide, operands))
    return {node: spec for node, spec in specs.items() if node in kept}, scatters


def _spec_if_zero_outside(node: fx.Node, specs: Mapping[fx.Node, Spec]) -> Spec | None:
    """The token dims of a node that is linear in operands that are zero outside; else None."""
    operands = {i for i in node.all_input_nodes if i in specs}
    if not operands or not ops.row(node).is_linear(node, operands):
        return None
    operand = next(iter(operands))
    result = ops.result_spec(node, operand, specs[operand])
    if not isinstance(result, tuple):
        return None
    required = ops.operand_specs(node, result)
    if isinstance(required, Refusal) or any(required[i] != specs[i] for i in operands):
        return None
    return result
