"""Name the masks that attention reads whole, with what they take and what to change.

A kernel of attention takes a mask as one value of queries x keys, in the type of the queries. Heads
and layers share it, and the backward computes it again instead of keeping it, but while a kernel
runs it exists in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import NO_MASK_OR_BUDGET
from mstpass.graph.attention import mask_of
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.source_location import source_of
from mstpass.plans import Rejection

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
            found.setdefault(_written(mask), node)
    for base, reader in found.items():
        value = value_of(base)
        if base.name in written and value is not None and value.dim() > 1:
            kind = str(value.dtype).removeprefix("torch.")
            reason = f"{WHOLE_MASK}, {' x '.join(map(str, value.shape))} in {kind}"
            yield Rejection(
                "apply", base.name, NO_MASK_OR_BUDGET(reason), source_of(reader), nbytes(base)
            )


def _written(mask: fx.Node) -> fx.Node:
    """The value that is written to memory, of which the mask is a view."""
    while ops.is_cheap_view(mask):
        mask = mask.all_input_nodes[0]
    return mask
