"""Find what can run in loops over rows of the batch: all that no other row has a part in.

A region grows from an attention of the forward to everything that is computed row by row of the
batch: other attentions, products, norms, the losses of tokens. So a loop over it is what gradient
accumulation does by hand::

    sliced over the batch     the tokens, and what could not join
    whole                     weights
    summed over the batch     the loss, the gradients of the weights

It is described by the same ``Region`` as one of heads, with ``axis="batch"``.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph.advice import ROWWISE
from mstpass.graph.attention import is_attention
from mstpass.graph.axes import BATCH
from mstpass.graph.batch_axis import BatchAxis
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.plans import Region, Rejection
from mstpass.regions.attention import region_of_heads
from mstpass.regions.grow import ANOTHER, found_regions
from mstpass.regions.head_growth import HeadGrowth


class BatchGrowth(HeadGrowth):
    """All that is computed row by row of the batch."""

    of_collectives = ROWWISE("a collective runs once on the whole batch, in step with other ranks")
    of_two_specs = ROWWISE("holds rows of the batch in {} and in {}")

    def _why_outside(self, node: fx.Node) -> str | None:
        return ANOTHER if node in self.taken else self.left_out.get(node)


def detect_batch(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The regions of rows of the batch, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    known = set(taken)

    def region_of(seed: fx.Node) -> Region:
        axis = BatchAxis(_rows(seed))
        growth = BatchGrowth.around(seed, HeadDim(0), joint, axis, known)
        known.update(growth.specs)
        return region_of_heads(growth, seed, BATCH)

    seeds = (n for n in joint.nodes if is_attention(n) and n not in joint.backward)
    return found_regions((n for n in seeds if n not in known and _rows(n) > 1), region_of)


def _rows(attention: fx.Node) -> int:
    """The rows of the batch; 0 where their number is symbolic."""
    rows = next(tensors_of(attention.meta["val"])).shape[0]
    return rows if isinstance(rows, int) else 0
