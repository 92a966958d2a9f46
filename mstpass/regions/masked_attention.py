"""Find attention whose mask is large and computed, to run in loops over rows of queries.

A mask of S x T scores has a value for each query and each key, and exists in full where a kernel
reads it: in 16 bits 512 MiB for 16,384 tokens. It is computed from little: padding, documents,
blocks, a window. A loop over rows of queries computes the rows that its chunk needs
(graph/attention.py), and the backward's loop computes them again.

The members of such a region are the attention, forward and backward, and the large values that its
mask is computed from. Several attentions read one mask, and each of their loops computes its rows
itself. Where another op reads the mask too, it still exists.

``whole_masks`` names the masks that attention reads whole, with what they take and what to change.
A kernel of attention takes a mask as one value of queries x keys, in the type of the queries. Heads
and layers share it, and the backward computes it again instead of keeping it, but while a kernel
runs it exists in full.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import HEADS_APART, NO_MASK, NO_MASK_OR_BUDGET
from mstpass.graph.attention import OTHER_RESULT, ROWS, backwards_of, is_backward, mask_of
from mstpass.graph.axes import QUERIES, QUERY_AXIS
from mstpass.graph.joint import JointGraph, nbytes, numel, value_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.plans import Region, Rejection
from mstpass.regions.grow import ANOTHER, Growth, found_regions

KIND = "attention"
NOT_BY_ROW = NO_MASK("is no tensor of fixed sizes with a row for each query")
AN_INPUT = NO_MASK("the mask, or a part of it as large, is an input of the graph")
PADDED = NO_MASK("attention's kernel pads its rows")


def detect_masked_attention(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The regions of queries of the graph, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    seeds = (
        node
        for node in joint.nodes
        if not (node in joint.backward or node in taken or mask_of(node) is None)
        and not is_backward(node)
    )
    return found_regions(seeds, lambda node: _region(joint, node, taken))


def _region(joint: JointGraph, attention: fx.Node, taken: Set[fx.Node]) -> Region:
    query = argument(attention, "query").meta["val"]
    growth, masks = Growth(joint, QUERY_AXIS), _Masks(joint, QUERY_AXIS)
    for node in (attention, *backwards_of(attention)):
        growth.specs[node] = (ROWS,)
        mask, needs = mask_of(node), growth.required_specs(node)
        assert mask is not None, "attention has a mask"
        masks.add_mask(mask, needs[mask])  # its sizes are fixed, so the queries are
        for item in node.users:
            of_item = growth.spec_of_user(item, node)
            if isinstance(of_item, Refusal):
                raise CannotTake(node, OTHER_RESULT)
            value = value_of(item)
            if of_item == (ROWS,) and (value is None or value.shape[ROWS] != query.shape[ROWS]):
                raise CannotTake(item, PADDED)
            growth.specs[item] = of_item
    if not taken.isdisjoint(growth.specs):
        raise CannotTake(attention, ANOTHER)
    outputs, queries = growth.leaving(), int(query.shape[ROWS])
    growth.specs |= masks.specs
    width, source = min(map(numel, masks.specs)) // queries, source_of(attention)
    sizes = {"num_tokens": queries, "width": width}
    return growth.region(outputs, kind=KIND, source=source, axis=QUERIES, **sizes)


class _Masks(Growth):
    """The large values that masks are computed from, with their rows."""

    of_two_specs = HEADS_APART("is read along several dims")
    large = 0

    def add_mask(self, mask: fx.Node, spec: Spec) -> None:
        """Add the mask of an attention.

        Raises:
            CannotTake: a large value is not computed row by row.
        """
        if not spec or not is_static(mask.meta["val"]):
            raise CannotTake(mask, NOT_BY_ROW)
        self.large = math.prod(mask.meta["val"].shape[-2:])
        self._pull(mask, spec)
        self.add(mask, spec)

    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        if value_of(operand) is None or numel(operand) < self.large or ops.is_constant(operand):
            return
        if not spec:
            raise CannotTake(operand, NOT_BY_ROW)
        if operand.op != "call_function":
            raise CannotTake(operand, AN_INPUT)
        self._put(operand, spec)

    def _pushes(self, member: fx.Node) -> bool:
        return False


# ---- masks that attention reads whole ------------------------------------------------------------
WHOLE_MASK = "attention reads this mask whole"


def whole_masks(joint: JointGraph, written: Collection[str]) -> Iterator[Rejection]:
    """One entry for each mask that an attention of the graph reads, if it is written in full.

    Args:
        written: names of the nodes that are left outside of loops.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        mask = mask_of(node)
        if mask is not None:
            found.setdefault(ops.base_of(mask), node)
    for base, reader in found.items():
        value = value_of(base)
        if base.name in written and value is not None and value.dim() > 1:
            kind = str(value.dtype).removeprefix("torch.")
            reason = f"{WHOLE_MASK}, {' x '.join(map(str, value.shape))} in {kind}"
            yield Rejection(
                "apply", base.name, NO_MASK_OR_BUDGET(reason), source_of(reader), nbytes(base)
            )
