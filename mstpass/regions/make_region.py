"""Describe a closed region as plain data, after the last checks.

Checked is that only narrow values leave the region (unless the step itself returns them), that the
features of every value are static, and that a loop can save memory at all.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import advice, ops
from mstpass.graph.axes import FEATURES, TOKENS
from mstpass.graph.joint import numel, tensors_of
from mstpass.graph.sizes import is_bounded, is_static
from mstpass.graph.source_location import source_of
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced
from mstpass.plans import Region
from mstpass.regions.anchors import SYMBOLIC_WIDTH
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
    return Region(
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
        **growth.plain(outputs),
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
        leaving[_without_views(growth, node)] = None
    return growth.joint.sorted(leaving)


def _base(growth: WideGrowth, node: fx.Node) -> fx.Node:
    """The member that a view shows, seen through further views."""
    while ops.is_cheap_view(node) and node.all_input_nodes[0] in growth.specs:
        node = node.all_input_nodes[0]
    return node


def _without_views(growth: WideGrowth, node: fx.Node) -> fx.Node:
    """The member of which the node shows all elements.

    Other regions may repeat the view, so they need the value that it shows.
    """
    while ops.is_cheap_view(node) and not isinstance(growth.specs[node], Reduced):
        source = node.all_input_nodes[0]
        if source not in growth.specs or numel(source) != numel(node):
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
