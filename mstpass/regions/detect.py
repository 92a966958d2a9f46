"""Detect regions: grow one from each matmul that widens, then close it.

A region can be closed in two ways:

- *fused*: forward and backward are one loop, which runs in the forward. That is possible if the
  backward nodes need a single scalar from outside and are linear in it (close_fused.py).
- *apart*: the forward nodes and the backward nodes are closed separately. Each part becomes a loop.

Pseudo-code::

    for each anchor, the largest first, that no region has taken:
        grow a region from it, to all that touches its wide values, and from their gradients
        close it as fused; if that is refused, close it apart
        if that is refused as well: try the same along its features; if that is refused: a rejection

Along features, the tokens may be mixed: a value is reduced or shifted over them, or two halves of a
batch are compared. A loss over logits is then computed in rounds (loops/region_facts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph import advice, ops
from mstpass.graph.advice import MORE_ROWS, SELECT_FIRST
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import depends_on_data, generic_shape, symbols_of
from mstpass.graph.tokens import WHOLE, CannotTake, Spec
from mstpass.passes.runner import PassRunner
from mstpass.plans import Region, Rejection
from mstpass.regions.absorb import absorb_norms, absorb_users
from mstpass.regions.anchors import SYMBOLIC_WIDTH, anchors, refused_wide_products, widths
from mstpass.regions.close_fused import add_gradients, close_fused
from mstpass.regions.grow import rejection_of
from mstpass.regions.make_region import make_region
from mstpass.regions.wide_growth import WideGrowth


def find_regions(
    joint: JointGraph, along_features: bool = False, runner: PassRunner | None = None
) -> tuple[list[Region], list[Rejection]]:
    """The regions of the graph, and rejections of what is wide but was refused. Changes nothing.

    Args:
        along_features: what has no loops over tokens may have loops over features.
        runner: notes what fails.
    """
    runner = runner or PassRunner()
    regions: list[Region] = []
    rejections: list[tuple[fx.Node, Rejection]] = []
    taken: set[fx.Node] = set()
    refused: set[fx.Node] = set()
    for anchor, spec in joint.cached(anchors):
        if anchor in taken or anchor in refused:
            continue
        with runner.left_out("detection of a region", anchor.name):
            growth = WideGrowth(joint, anchor, spec, taken)
            try:
                region, growth = _region(growth)
            except CannotTake as refusal:
                other = _along_features(joint, taken, anchor, spec) if along_features else None
                if other is None:
                    rejections.append((anchor, rejection_of(anchor, refusal)))
                    refused.update(n for n in growth.specs if growth.wide(n))
                    continue
                region, growth = other
            regions.append(region)
            taken |= {
                n
                for n, s in growth.specs.items()
                if s != WHOLE and not ops.is_cheap_view(n) and not growth.may_repeat(n)
            }
    # what a later region took is no longer refused
    refusals = [rejection for anchor, rejection in rejections if anchor not in taken]
    return regions, [*refusals, *refused_wide_products(joint)]


def region_along_features(
    joint: JointGraph, region: Region, others: Iterable[Region]
) -> Region | None:
    """A region whose loops run over the features of another one's products; None if none can.

    Args:
        region: that one, which has too few tokens.
        others: the other regions of the graph.
    """
    members = {joint.by_name[name] for name, _ in region.members}
    # the one with the most bytes
    anchor, spec = next((n, spec) for n, spec in joint.cached(anchors) if n in members)
    taken = {joint.by_name[name] for r in others for name, spec in r.members if spec != WHOLE}
    taken = {node for node in taken if not ops.is_cheap_view(node)}
    found = _along_features(joint, taken, anchor, spec)
    return None if found is None else found[0]


def _along_features(
    joint: JointGraph, taken: Set[fx.Node], anchor: fx.Node, spec: Spec
) -> tuple[Region, WideGrowth] | None:
    """The region around an anchor whose loops run over its features; None if there is none.

    Args:
        taken: the members of other regions.
        spec: the anchor's token dims.
    """
    value = value_of(anchor)
    assert value is not None, "the op gives one tensor"
    dims = [d for d, size in enumerate(generic_shape(value)) if size != 1 and d not in spec]
    if len(dims) != 1 or depends_on_data(value) or symbols_of(value.shape[dims[0]]):
        return None  # of all sizes, only that of the features has to be a number
    (dim,) = dims
    growth = WideGrowth(joint, anchor, HeadDim(dim), taken, value.shape[dim])
    try:
        growth.add(anchor, growth.held_by_anchor)
        return _closed(growth)
    except CannotTake:
        return None


def _region(growth: WideGrowth) -> tuple[Region, WideGrowth]:
    """The region of tokens around an anchor, and its members.

    Raises:
        CannotTake: no loop can run over them, or the region can be closed neither as fused nor
            apart.
    """
    anchor = growth.anchor
    if depends_on_data(anchor.meta["val"]):
        raise CannotTake(anchor, SELECT_FIRST("the size of its result depends on data"))
    if growth.count < 2:
        raise CannotTake(anchor, MORE_ROWS(f"{growth.count} tokens are too few for a loop"))
    if not all(isinstance(width, int) for width in widths(anchor) or ()):
        raise CannotTake(anchor, SYMBOLIC_WIDTH)
    growth.add(anchor, growth.held_by_anchor)
    more = growth.copy()
    add_gradients(more)
    if len(more.specs) > len(growth.specs):
        with contextlib.suppress(CannotTake):
            return _closed(more)
    return _closed(growth)


def _closed(growth: WideGrowth) -> tuple[Region, WideGrowth]:
    """The region of what has grown so far, and its members.

    Raises:
        CannotTake: as of ``_region``.
    """
    fused = growth.copy()
    try:
        return make_region(fused, close_fused(fused), ""), fused
    except CannotTake as refusal:
        note = f"not fused: {refusal.node.name}: {refusal.reason}"
    for in_backward in (False, True):
        if part := growth.part(in_backward):
            growth.close(part)
    absorb_users(growth)
    absorb_norms(growth)
    return make_region(growth, (), note), growth


def under_a_budget(rejection: Rejection) -> Rejection:
    """The rejection of a part that a budget takes."""
    reason = advice.under_a_budget(rejection.reason, "it may run in chunks")
    return dataclasses.replace(rejection, reason=reason, fix=reason.advice)
