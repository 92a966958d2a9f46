"""Give scattered constants their own dtype again.

Inductor rewrites ``scatter(full(shape, b, dtype), dim, index, a)``, with numbers a and b, as
``where(index == iota, a, b)``. In older versions of torch the result has the default dtype instead
of ``dtype``, and the metadata of its readers stays as it was: the gradient of a loss of bfloat16
logits is float32 and is said to be bfloat16. Newer ones cast the result, and so does this pass,
wherever a reader's dtype is not the one that its operands give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from mstpass.graph.builder import fake_mode_of, fake_values
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.graphs import OpOverload

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


def scattered_constants(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the casts, which change no region; the graph itself if none is
    missing."""
    found = [node for node in joint.nodes if _is_choice_of_numbers(node)]
    mode = fake_mode_of(joint.nodes) if found else None
    dtypes = {node.name: _lost_dtype(node, mode) for node in found if mode is not None}
    if not any(dtypes.values()):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    for name, dtype in dtypes.items():
        if dtype is None:
            continue
        node = rewriting.joint.by_name[name]
        readers = list(node.users)
        with rewriting.graph.inserting_after(node):
            cast = rewriting.builder.call(_cast, node, dtype)
        rewriting.replace(node, cast, readers)
    return rewriting.finished(), frozenset()


def _is_choice_of_numbers(node: fx.Node) -> bool:
    if node.target is not aten.where.self:
        return False
    return all(
        isinstance(branch, fx.Node) and branch.target is aten.scalar_tensor.default
        for branch in node.args[1:]
    )


def _lost_dtype(node: fx.Node, mode: FakeTensorMode) -> torch.dtype | None:
    """The dtype that the node must have for its readers to have theirs; None if it has it."""
    for user in node.users:
        said = value_of(user)
        if said is None or _dtype(user, {}, mode) == said.dtype:
            continue
        with mode:
            cast = fake_values(node).to(said.dtype)
        if _dtype(user, {node: cast}, mode) == said.dtype:
            return said.dtype
    return None


def _dtype(
    node: fx.Node, instead: Mapping[fx.Node, torch.Tensor], mode: FakeTensorMode
) -> torch.dtype | None:
    """The dtype of a pointwise op's result by its operands; None for other ops."""
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.pointwise not in op.tags:
        return None
    arguments = fx.map_arg(
        (node.args, node.kwargs), lambda operand: instead.get(operand, operand.meta["val"])
    )
    args, kwargs = arguments
    with mode:
        value = op(*args, **kwargs)
    return value.dtype if isinstance(value, torch.Tensor) else None
