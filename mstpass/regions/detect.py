"""Find regions by structure: a matmul that widens, and everything its wide values touch.

An *anchor* is a forward matmul of tokens with a weight whose output has at least ``WIDEN`` times
as many features as its input. A region grows from it (grow.py), then is closed:

- *fused*, when all that its backward nodes need from outside is one scalar and they are linear in
  it. By linearity, backward(s) = s * backward(1): the loop can run in the forward.
- otherwise its forward and backward nodes are closed apart; each becomes a loop.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of, value_of
from mstpass.graph.sizes import (
    Size,
    depends_on_data,
    generic,
    generic_shape,
    hint,
    hint_shape,
    is_static,
)
from mstpass.graph.source_location import source_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec, Sum, token_count
from mstpass.plans import Region, Rejection
from mstpass.regions.absorb import absorb
from mstpass.regions.advice import fix_of
from mstpass.regions.close_fused import Unit, try_fused
from mstpass.regions.grow import Growth, Needs, products_behind

WIDEN = 1.5
_WIDE_OF_ANCHOR = 0.4
_WIDE_OF_INPUT = 1.1
_SMALL_BYTES = 16 * 2**10
# Widening products, one behind the other, in a fused loop. Time to compile its body grows with the
# square of them: of MLPs with dropout 28 s for 4, 134 s for 6 (2 busy CPU cores, 2026-11-21).
_MOST_IN_A_ROW = 3
_SYMBOLIC = "a size other than the tokens' is symbolic"
_RETURNED = {
    "lm_head": "logits are an output of the graph, so they exist in full",
    "mlp": "a large value is an output of the graph, so it exists in full",
}


def detect(joint: JointGraph) -> tuple[list[Region], list[Rejection]]:
    """Regions of the graph, and what was large but refused. Changes nothing."""
    regions: list[Region] = []
    rejections: list[Rejection] = []
    taken: set[fx.Node] = set()
    refused: set[fx.Node] = set()
    behind, needs = products_behind(joint), Needs()
    for anchor, spec in joint.cached(anchors):
        if anchor in taken or anchor in refused:
            continue
        growth = Growth(joint, _wide_numel(anchor, spec), taken, behind, needs)
        try:
            region, growth = _region(joint, growth, anchor, spec)
        except CannotTake as refusal:
            rejections.append(_rejection(anchor, refusal))
            refused.update(n for n in growth.specs if growth.wide(n))
        else:
            regions.append(region)
            taken |= {
                n
                for n, s in growth.specs.items()
                if s != WHOLE and not ops.is_cheap_view(n) and growth.matters(n)
            }
    return regions, [*rejections, *_experts(joint), *_of_symbolic_width(joint)]


def _experts(joint: JointGraph) -> list[Rejection]:
    """The widening products of mixtures of experts, which no loop over tokens can run."""
    return [
        Rejection("detect", node.name, reason.reason, source_of(node), nbytes(node))
        for node in joint.nodes
        if node not in joint.backward and ops.is_grouped_matmul(node) and _widens(node)
        if isinstance(reason := ops.lookup(node), Refusal)
    ]


def _of_symbolic_width(joint: JointGraph) -> list[Rejection]:
    """Products that widen in this batch, by a width that the next one may change: no anchors."""
    return [
        Rejection("detect", node.name, _SYMBOLIC, source_of(node), nbytes(node))
        for node in joint.nodes
        if ops.is_matmul(node) and node not in joint.backward and _anchor_spec(node) is None
        if (widths := _widths(node)) is not None and not isinstance(widths[0], int)
        if hint(widths[1]) >= WIDEN * hint(widths[0]) and nbytes(node) >= _SMALL_BYTES
    ]


def _widens(node: fx.Node) -> bool:
    out, source = value_of(node), value_of(node.all_input_nodes[0])
    if out is None or source is None:
        return False
    return generic_shape(out)[-1] >= WIDEN * generic_shape(source)[-1]


def anchors(joint: JointGraph) -> list[tuple[fx.Node, Spec]]:
    """Forward matmuls that widen, largest output first, with their token dims."""
    found = []
    for node in joint.nodes:
        if not ops.is_matmul(node) or node in joint.backward:
            continue
        spec = _anchor_spec(node)
        if spec is not None and not _is_small(node):
            found.append((node, spec))
    return sorted(found, key=lambda pair: (-nbytes(pair[0]), joint.index[pair[0]]))


def _is_small(node: fx.Node) -> bool:
    """At its only size: one that is small in this batch may be large in the next."""
    value = value_of(node)
    return value is not None and is_static(value) and nbytes(node) < _SMALL_BYTES


def _anchor_spec(node: fx.Node) -> Spec | None:
    widths = _widths(node)
    if widths is None or generic(widths[1]) < WIDEN * generic(widths[0]):
        return None
    rank = node.meta["val"].dim()
    return (rank - 1,) if _is_transposed(node) else (rank - 2,)


def _widths(node: fx.Node) -> tuple[Size, Size] | None:
    """Features of a token before and after a matmul; None for a batch of matrices.

    Such a batch is attention or experts, not a token-parallel layer.
    """
    a, b = (value_of(n) for n in ops.matmul_factors(node))
    out = value_of(node)
    if a is None or b is None or out is None or not out.is_floating_point():
        return None
    if out.dim() == 3 and generic_shape(out)[0] != 1:
        return None
    return a.shape[-1], out.shape[-2 if _is_transposed(node) else -1]


def _is_transposed(node: fx.Node) -> bool:
    """A weight times tokens in columns."""
    left, right = ops.matmul_factors(node)
    return ops.is_weight(left) and not ops.is_weight(right)


def _wide_numel(anchor: fx.Node, spec: Spec) -> int:
    out = value_of(anchor)
    left, _ = ops.matmul_factors(anchor)
    source = value_of(left)
    assert out is not None and source is not None
    tokens = token_count(generic_shape(out), spec)
    inner = generic_shape(source)[-1]
    return int(max(_WIDE_OF_INPUT * inner * tokens, _WIDE_OF_ANCHOR * numel(anchor)))


def _rejection(anchor: fx.Node, refusal: CannotTake) -> Rejection:
    return Rejection("detect", refusal.node.name, refusal.reason, source_of(anchor), nbytes(anchor))


def _region(
    joint: JointGraph, growth: Growth, anchor: fx.Node, spec: Spec
) -> tuple[Region, Growth]:
    value = value_of(anchor)
    assert value is not None
    if depends_on_data(value):
        raise CannotTake(anchor, "its size depends on data")
    tokens = token_count(hint_shape(value), spec)
    if tokens < 2:
        raise CannotTake(anchor, f"{tokens} token")
    if not all(isinstance(width, int) for width in _widths(anchor) or ()):
        raise CannotTake(anchor, _SYMBOLIC)
    growth.add(anchor, spec)
    apart = growth.copy()
    unit, note = try_fused(joint, growth)
    if unit is not None:
        try:
            _check_row(joint, growth)
            return _finish(joint, growth, tokens, anchor, unit, note), growth
        except CannotTake as refusal:
            note = f"not fused: {refusal.node.name}: {refusal.reason}"
    _close_apart(joint, apart)
    return _finish(joint, apart, tokens, anchor, None, note), apart


def _check_row(joint: JointGraph, growth: Growth) -> None:
    """Raise ``CannotTake`` where a loop would run too many layers one behind the other."""
    row: dict[fx.Node, int] = {}
    for node in joint.sorted(growth.specs):
        if node in joint.backward:
            continue
        widens = ops.is_matmul(node) and _anchor_spec(node) is not None
        row[node] = widens + max((row.get(n, 0) for n in node.all_input_nodes), default=0)
        if row[node] > _MOST_IN_A_ROW:
            raise CannotTake(node, f"more than {_MOST_IN_A_ROW} widening products in a row")


def _check_features(growth: Growth) -> None:
    """A chunk may vary in its tokens alone, so that one body fits every batch."""
    specs: dict[fx.Node, Spec] = {n: _spec(s) or WHOLE for n, s in growth.specs.items()}
    for member in growth.specs:
        specs.update((n, s) for n, s in growth.needs(member).items() if n not in specs)
    for node, spec in specs.items():
        for value in tensors_of(node.meta.get("val")):
            fixed = [size for dim, size in enumerate(value.shape) if dim not in spec]
            if not all(isinstance(size, int) for size in fixed):
                raise CannotTake(node, _SYMBOLIC)


# ---- forward and backward apart ---------------------------------------------------------------
def _close_apart(joint: JointGraph, growth: Growth) -> None:
    for backward in (False, True):
        part = _part(joint, growth, backward)
        if part:
            growth.close(part)
            absorb(joint, growth, _part(joint, growth, backward))


def _part(joint: JointGraph, growth: Growth, backward: bool) -> set[fx.Node]:
    return {n for n, s in growth.specs.items() if s != WHOLE and (n in joint.backward) == backward}


# ---- result ------------------------------------------------------------------------------------
def _kind(joint: JointGraph, growth: Growth, anchor: fx.Node) -> str:
    """ "mlp" when a forward matmul takes wide values back to narrow ones, else "lm_head"."""
    for node, spec in growth.specs.items():
        if node is anchor or node in joint.backward or isinstance(spec, Sum) or spec == WHOLE:
            continue
        if ops.is_matmul(node) and not growth.wide(node):
            if any(growth.wide(n) and growth.specs.get(n) for n in ops.matmul_factors(node)):
                return "mlp"
    return "lm_head"


def _finish(
    joint: JointGraph,
    growth: Growth,
    tokens: int,
    anchor: fx.Node,
    unit: Unit | None,
    note: str,
) -> Region:
    _check_features(growth)
    members = joint.sorted(growth.specs)
    returned = {_base(growth, n) for n in growth.returned}
    leaving = dict.fromkeys(returned)
    computed = growth.computed()
    for node in members:
        outside = [u for u in node.users if u not in growth.specs]
        # What does not come from the region's products, such as a mask, outside redoes itself.
        if not outside or node not in computed:
            continue
        if node in growth.returned and node not in returned:
            continue  # a view of what the loop stacks
        if growth.wide(node) and growth.specs[node] != SUM and node not in returned:
            raise CannotTake(node, f"{outside[0].name}, outside the region, uses a large value")
        leaving[_behind_views(growth, node)] = None
    outputs = joint.sorted(leaving)
    kind = _kind(joint, growth, anchor)
    if kind == "mlp":
        note = ""  # there is nothing to explain: the gradient of an MLP's output is never a scalar
    if returned:
        _check_returned(growth, kind, returned)
        note = "; ".join(filter(None, (_RETURNED[kind], fix_of(_RETURNED[kind]), note)))
    forward_outputs = [n for n in outputs if n not in joint.backward and n not in returned]
    _check_gain(growth, anchor, forward_outputs)
    return Region(
        kind=kind,
        source=source_of(anchor),
        num_tokens=tokens,
        width=_features(anchor, growth.specs[anchor]),
        symbolic=not is_static(anchor.meta["val"]),
        fused=unit is not None,
        members=tuple((n.name, _spec(growth.specs[n])) for n in members),
        outputs=tuple(n.name for n in outputs),
        returned=tuple(n.name for n in outputs if n in returned),
        backward=frozenset(n.name for n in members if n in joint.backward),
        unit=unit.scalar.name if unit is not None else None,
        prelude=tuple(n.name for n in unit.prelude) if unit is not None else (),
        note=note,
    )


def _features(node: fx.Node, spec: Spec | Sum) -> int:
    """Elements a token."""
    assert isinstance(spec, tuple)
    return numel(node) // token_count(generic_shape(node.meta["val"]), spec)


def _spec(spec: Spec | Sum) -> Spec | None:
    return None if isinstance(spec, Sum) else spec


def _base(growth: Growth, node: fx.Node) -> fx.Node:
    """What a view among the members is a view of."""
    while ops.is_cheap_view(node) and node.all_input_nodes[0] in growth.specs:
        node = node.all_input_nodes[0]
    return node


def _behind_views(growth: Growth, node: fx.Node) -> fx.Node:
    """The value that the node shows all of: other regions may redo the view, and need the value."""
    while ops.is_cheap_view(node) and growth.specs[node] != SUM:
        source = node.all_input_nodes[0]
        if source not in growth.specs or numel(source) != numel(node):
            break
        node = source
    return node


def _check_returned(growth: Growth, kind: str, returned: set[fx.Node]) -> None:
    """Raise ``CannotTake`` unless there is a large value besides those that the graph returns."""
    for node, spec in growth.specs.items():
        if spec in (SUM, WHOLE) or ops.is_view(node) or node in returned or not growth.wide(node):
            continue
        if ops.is_matmul(node) or any(map(ops.is_matmul, ops.readers_through_views(node))):
            return
    raise CannotTake(next(iter(returned)), _RETURNED[kind])


def _check_gain(growth: Growth, anchor: fx.Node, forward_outputs: list[fx.Node]) -> None:
    stacked = sum(numel(n) for n in forward_outputs if not isinstance(growth.specs[n], Sum))
    if not forward_outputs and not growth.returned:
        raise CannotTake(anchor, "nothing outside uses the region")
    if 2 * stacked > numel(anchor):
        raise CannotTake(anchor, "its outputs are as large as its intermediates: nothing to gain")
