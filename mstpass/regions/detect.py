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

A closed region is described as plain data, after the last checks. Checked is that only narrow
values leave the region (unless the step itself returns them), that the features of every value are
static, and that a loop can save memory at all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph import advice, ops
from mstpass.graph.advice import MORE_ROWS, SELECT_FIRST
from mstpass.graph.axes import FEATURES, TOKENS
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, numel, tensors_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import depends_on_data, generic_shape, is_bounded, is_static, symbols_of
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Spec
from mstpass.passes.runner import PassRunner
from mstpass.plans import Region, Rejection
from mstpass.regions.absorb import absorb_norms, absorb_users
from mstpass.regions.anchors import SYMBOLIC_WIDTH, anchors, refused_wide_products, widths
from mstpass.regions.close_fused import add_gradients, close_fused
from mstpass.regions.grow import rejection_of
from mstpass.regions.wide_growth import WideGrowth
from mstpass.torch_internals.fake_tensors import is_ordinary

_TWICE = "computed more than once: in between, values of all tokens or of all ranks are combined"
RETURNED = {  # why a region is only half as good, or refused, if the step returns a wide value
    "lm_head": advice.RETURN_LOSS("logits are an output of the graph, so they exist in full"),
    "mlp": advice.RETURN_MADE("a large value is an output of the graph, so it exists in full"),
}


def make_region(growth: WideGrowth, unit: tuple[fx.Node, ...], note: str) -> Region:
    """The region with the members of ``growth``.

    Args:
        unit: of a fused region what close_fused.py gives; empty for others.
        note: why the region is not fused.

    Raises:
        CannotTake: a wide value leaves the region, or a loop would save no memory.
    """
    growth.check_roles()
    _check_values(growth)
    returned = {_base(growth, n) for n in growth.returned}
    in_rounds = growth.reenters or bool(growth.waits_for_reductions())
    outputs = _outputs(growth, returned)
    kind = _kind(growth)
    if kind == "mlp":
        note = ""  # an MLP is never fused: the gradient of its output is not a scalar
    if returned:
        _check_large_value_left(growth, kind, returned)
        note = "; ".join(filter(None, (RETURNED[kind], advice.fix_of(RETURNED[kind]), note)))
        if in_rounds:
            reason = advice.RETURN_SUM("is an output, and is computed more than once")
            raise CannotTake(next(iter(returned)), reason)
    if in_rounds:
        note = "; ".join(filter(None, (_TWICE, note)))
    forward_outputs = [n for n in outputs if n not in growth.joint.backward and n not in returned]
    _check_gain(growth, forward_outputs)
    value = growth.anchor.meta["val"]
    return growth.region(
        outputs,
        kind=kind,
        source=source_of(growth.anchor),
        num_tokens=growth.count,
        width=numel(growth.anchor) // growth.generic_count,
        symbolic=growth.of_tokens and not is_static(value),
        unbounded=growth.of_tokens and not is_bounded(value),
        fused=bool(unit),
        returned=tuple(n.name for n in outputs if n in returned),
        unit=unit[0].name if unit else None,
        prelude=tuple(n.name for n in unit[1:]),
        note=note,
        axis=TOKENS if growth.of_tokens else FEATURES,
    )


def _kind(growth: WideGrowth) -> str:
    """ "mlp" if another matmul of the forward takes wide values to narrow ones, else "lm_head"."""
    for node, spec in growth.specs.items():
        if node is growth.anchor or node in growth.joint.backward or spec == WHOLE:
            continue
        if isinstance(spec, Reduced) and growth.of_tokens:
            continue
        if ops.is_matmul(node) and not growth.wide(node):
            if any(growth.wide(n) and growth.specs.get(n) for n in ops.matmul_factors(node)):
                return "mlp"
    return "lm_head"


# ---- what leaves the region ----------------------------------------------------------------------
def _outputs(growth: WideGrowth, returned: set[fx.Node]) -> list[fx.Node]:
    """The members that nodes outside need, and those that the step returns.

    Raises:
        CannotTake: a node outside reads a wide value.
    """
    leaving = dict.fromkeys(returned)
    complete = set(growth.waits_for_reductions())
    computed = growth.computed()
    for node in growth.joint.sorted(growth.specs):
        readers = [u for u in node.users if u not in growth.specs or (u, node) in complete]
        # A member that does not depend on the region's wide matmuls, such as a mask, is computed
        # outside as well.
        if not readers or node not in computed:
            continue
        if node in growth.returned and node not in returned:
            continue  # a view of a value that the loop returns
        is_reduced = isinstance(growth.specs[node], Reduced)
        if growth.wide(node) and not is_reduced and node not in returned:
            reason = f"{readers[0].name}, which is outside the region, reads a wide value"
            raise CannotTake(node, advice.NARROW_READER(reason))
        # other regions may repeat the view, so they need the value that it shows
        leaving[_base(growth, node, in_full=True)] = None
    return growth.joint.sorted(leaving)


def _base(growth: WideGrowth, node: fx.Node, in_full: bool = False) -> fx.Node:
    """The member that a view shows, seen through further views.

    Args:
        in_full: the view shows all of its elements.
    """
    while ops.is_cheap_view(node) and (source := node.all_input_nodes[0]) in growth.specs:
        is_reduced = isinstance(growth.specs[node], Reduced)
        if in_full and (is_reduced or numel(source) != numel(node)):
            break
        node = source
    return node


# ---- checks --------------------------------------------------------------------------------------
def _check_values(growth: WideGrowth) -> None:
    """Only the token dims of a value may be symbolic, so that one loop body fits every batch, and
    all values are ordinary tensors."""
    specs = dict(growth.specs)
    specs.update((n, s) for _, n, s in growth.reads() if n not in growth.specs)
    for node, held in specs.items():
        spec = WHOLE if isinstance(held, Reduced) else held
        for value in tensors_of(node.meta.get("val")):
            if not is_ordinary(value):
                reason = "is no ordinary tensor: it is sparse, or a lazy conjugate"
                raise CannotTake(node, advice.ORDINARY(reason))
            features = [size for dim, size in enumerate(value.shape) if dim not in spec]
            if growth.of_tokens and not all(isinstance(size, int) for size in features):
                raise CannotTake(node, SYMBOLIC_WIDTH)


def _check_large_value_left(growth: WideGrowth, kind: str, returned: set[fx.Node]) -> None:
    """There must be a large value besides those that the step returns, which exist in any case."""
    for node, spec in growth.specs.items():
        if isinstance(spec, Reduced) or spec == WHOLE or not growth.wide(node):
            continue
        if ops.is_view(node) or node in returned:
            continue
        if ops.is_matmul(node) or any(map(ops.is_matmul, ops.readers_through_views(node))):
            return
    raise CannotTake(next(iter(returned)), RETURNED[kind])


def _check_gain(growth: WideGrowth, forward_outputs: list[fx.Node]) -> None:
    """The outputs of the forward part must be clearly smaller than the anchor's result."""
    stacked = sum(numel(n) for n in forward_outputs if not isinstance(growth.specs[n], Reduced))
    if not forward_outputs and not growth.returned:
        raise CannotTake(
            growth.anchor, advice.USE_RESULTS("nothing outside the region uses its results")
        )
    if 2 * stacked > numel(growth.anchor):
        reason = "its outputs are as large as its intermediates: chunks would save no memory"
        raise CannotTake(growth.anchor, advice.ONLY_WIDENS(reason))


# ---- the region as plain data --------------------------------------------------------------------
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
    value = anchor.meta["val"]
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
