"""Find attention whose mask is large and computed, to run in loops over rows of queries.

A mask of S x T scores has a value for each query and each key, and exists in full where a kernel
reads it: in 16 bits 512 MiB for 16,384 tokens. It is computed from little: padding, documents,
blocks, a window. A loop over rows of queries computes the rows that its chunk needs
(graph/query_rows.py), and the backward's loop computes them again.

The members of such a region are the attention, forward and backward, and the large values that its
mask is computed from. Several attentions read one mask, and each of their loops computes its rows
itself. Where another op reads the mask too, it still exists.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import QUERIES, QUERY_AXIS
from mstpass.graph.heads import is_attention_item
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.query_rows import (
    OTHER_RESULT,
    ROWS,
    is_backward,
    is_summed,
    mask_of,
    operand_rows,
    result_by_row,
)
from mstpass.graph.sizes import is_static
from mstpass.graph.source_location import source_of
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.plans import Region, Rejection
from mstpass.regions.rejection import rejection_of

KIND = "attention"
NOT_BY_ROW = "is no tensor of fixed sizes with a row for each query"
AN_INPUT = "the mask, or a part of it as large, is an input of the graph"
PADDED = "attention's kernel pads its rows"


def detect_masked_attention(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The regions of queries of the graph, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    regions: list[Region] = []
    rejections: list[Rejection] = []
    for node in joint.nodes:
        if node in joint.backward or node in taken or mask_of(node) is None or is_backward(node):
            continue
        try:
            regions.append(_region(joint, node, taken))
        except CannotTake as refusal:
            rejections.append(rejection_of(node, refusal))
    return regions, rejections


def _region(joint: JointGraph, attention: fx.Node, taken: Set[fx.Node]) -> Region:
    result = next((n for n in attention.users if n.args[1] == 0), attention)
    backwards = [
        user
        for user in result.users
        if mask_of(user) is not None and is_backward(user) and argument(user, "out") is result
    ]
    held: dict[fx.Node, Spec | None] = {}
    masks: dict[fx.Node, Spec] = {}
    for node in (attention, *backwards):
        needs = operand_rows(node, (ROWS,))
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason)
        _add_mask(node, needs, masks)
        held[node] = (ROWS,)
        for item in node.users:
            if is_summed(item):
                held[item] = None
            elif is_attention_item(item) and result_by_row(node, item.args[1]):  # type: ignore[arg-type]
                _check_rows(item, attention)
                held[item] = (ROWS,)
            else:
                raise CannotTake(node, OTHER_RESULT)
    if not taken.isdisjoint(held):
        raise CannotTake(attention, "already belongs to another region")
    outputs = [n for n in joint.sorted(held) if any(user not in held for user in n.users)]
    held.update(masks)
    queries = _queries(attention)
    return Region(
        kind=KIND,
        source=source_of(attention),
        num_tokens=queries,
        width=min(map(numel, masks)) // queries,
        fused=False,
        members=tuple((n.name, held[n]) for n in joint.sorted(held)),
        outputs=tuple(n.name for n in outputs),
        backward=frozenset(n.name for n in held if n in joint.backward),
        unit=None,
        axis=QUERIES,
    )


def _queries(attention: fx.Node) -> int:
    value = value_of(argument(attention, "query"))
    assert value is not None, "the op gives one tensor"
    return int(value.shape[ROWS])


def _check_rows(item: fx.Node, attention: fx.Node) -> None:
    """Check that a result has as many rows as there are queries.

    Raises:
        CannotTake: it has more.
    """
    value = value_of(item)
    if value is None or value.shape[ROWS] != _queries(attention):
        raise CannotTake(item, PADDED)


def _add_mask(node: fx.Node, needs: object, masks: dict[fx.Node, Spec]) -> None:
    """Add the large values that the attention's mask is computed from, with their rows.

    Raises:
        CannotTake: one of them is not computed row by row.
    """
    mask = mask_of(node)
    assert mask is not None and isinstance(needs, dict), "attention has a mask"
    value = value_of(mask)
    if not needs[mask] or value is None or not is_static(value):
        raise CannotTake(mask, NOT_BY_ROW)
    large = value.shape[-1] * value.shape[-2]
    stack: list[tuple[fx.Node, Spec]] = [(mask, needs[mask])]
    while stack:
        member, spec = stack.pop()
        if masks.setdefault(member, spec) != spec:
            raise CannotTake(member, "is read along several dims")
        if member.op != "call_function":
            raise CannotTake(member, AN_INPUT)
        found = QUERY_AXIS.operand_specs(member, spec)
        if isinstance(found, Refusal):
            raise CannotTake(member, found.reason)
        for operand, held in found.items():
            if value_of(operand) is None or numel(operand) < large or ops.is_constant(operand):
                continue
            if not held:
                raise CannotTake(operand, NOT_BY_ROW)
            if operand not in masks or masks[operand] != held:
                stack.append((operand, held))
