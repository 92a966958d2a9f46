"""Add the norm in front of a region, and the norm's gradient, so that neither exists in full.

An MLP reads ``n = norm(h)``, and its gradient leaves as ``dn``::

    without     forward: h -> n -> [loop]              backward: n, dy -> [loop] -> dn -> dh
    with        forward: h -> [loop with norm]         backward: h, dy -> [loop with norm] -> dh

``h`` and ``dy`` exist in any case, because a residual path reads them too. What joins is found from
the graph, whatever the norm:

- *above*: a narrow pointwise op, reduction or view of the forward that only members read;
- *below*: one that the forward does not need, all of whose operands are members, or read by members
  already.

Both are added on trial, and those that do not fit are removed again. The rest stays only if fewer
bytes then exist because of the region.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator, Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec, has_tokens
from mstpass.regions.wide_growth import WideGrowth


def absorb_norms(joint: JointGraph, growth: WideGrowth) -> None:
    """Add the narrow nodes above and below the region, if fewer bytes then cross its boundary."""
    trial = growth.copy()
    above = _add_above(joint, trial)
    below = _add_below(joint, trial)
    added = joint.sorted(above | below)
    while True:
        read = dict(_read(trial, without=below))
        unfit = [
            node
            for node in added
            if node in trial.specs
            and not (_has_operands(joint, trial, node, read) and _may_leave(joint, trial, node))
        ]
        if not unfit:
            break
        for node in unfit:
            del trial.specs[node]
    if _bytes(trial, growth) < _bytes(growth, growth) and _is_closed(trial):
        growth.adopt(trial)


def _is_narrow_op(growth: WideGrowth, node: fx.Node) -> bool:
    """Whether the node could join: it is no member, and runs in the kernels of its readers."""
    if node.op != "call_function" or node in growth.specs or node in growth.taken:
        return False
    known = ops.is_pointwise(node) or ops.is_reduction(node) or ops.is_view(node)
    return (known or node.target is operator.getitem) and not growth.wide(node)


# ---- adding on trial -----------------------------------------------------------------------------
def _add_above(joint: JointGraph, trial: WideGrowth) -> set[fx.Node]:
    """Add forward nodes that the forward reads only inside of the region; returns them."""
    added: set[fx.Node] = set()
    queue = [-joint.index[n] for m in trial.specs for n in m.all_input_nodes]
    heapq.heapify(queue)  # readers first
    while queue:
        node = joint.nodes[-heapq.heappop(queue)]
        if node not in joint.forward or not _is_narrow_op(trial, node):
            continue
        spec = _spec_for_readers(joint, trial, node)
        if spec is not None and _agree(trial, trial.operand_specs(node, spec)):
            trial.specs[node] = spec
            added.add(node)
            for operand in node.all_input_nodes:
                heapq.heappush(queue, -joint.index[operand])
    return added


def _spec_for_readers(joint: JointGraph, trial: WideGrowth, node: fx.Node) -> Spec | None:
    """The spec that all readers in the forward need; None if one is no member."""
    if node in joint.forward_outputs:
        return None
    specs: set[Spec] = set()
    for reader in (user for user in node.users if user in joint.forward):
        if not has_tokens(trial.specs.get(reader, WHOLE)):
            return None
        specs.add(trial.required_specs(reader)[node])
    return specs.pop() if len(specs) == 1 and WHOLE not in specs else None


def _agree(trial: WideGrowth, required: Mapping[fx.Node, Spec] | Refusal) -> bool:
    return not isinstance(required, Refusal) and all(
        trial.specs.get(operand, spec) == spec for operand, spec in required.items()
    )


def _add_below(joint: JointGraph, trial: WideGrowth) -> set[fx.Node]:
    """Add nodes that the forward does not need, if the region has all that they read."""
    added: set[fx.Node] = set()
    read = dict(_read(trial))
    queue = [joint.index[user] for node in (*trial.specs, *read) for user in node.users]
    heapq.heapify(queue)  # operands first
    while queue:
        node = joint.nodes[heapq.heappop(queue)]
        if node in joint.forward or not _is_narrow_op(trial, node):
            continue
        result = _spec_of(trial, node, read)
        if result is None:
            continue
        trial.specs[node] = result
        if _has_operands(joint, trial, node, read):
            added.add(node)
            for user in node.users:
                heapq.heappush(queue, joint.index[user])
        else:
            del trial.specs[node]
    return added


def _spec_of(
    trial: WideGrowth, node: fx.Node, read: Mapping[fx.Node, Spec]
) -> Spec | Reduced | None:
    """The spec of a node, by the first of its operands that has tokens; None if it has none."""
    for operand in node.all_input_nodes:
        spec = trial.specs.get(operand, read.get(operand, WHOLE))
        if not isinstance(spec, Reduced) and spec != WHOLE:
            result = trial.axis.result_spec(node, operand, spec)
            return None if isinstance(result, Refusal) or result == WHOLE else result
    return None


# ---- what may stay -------------------------------------------------------------------------------
def _has_operands(
    joint: JointGraph, trial: WideGrowth, node: fx.Node, read: Mapping[fx.Node, Spec]
) -> bool:
    """Whether the region computes or reads all that an added node reads."""
    operands = [operand for operand in node.all_input_nodes if not is_size(operand)]
    if any(value_of(operand) is None and operand not in trial.specs for operand in operands):
        return False
    is_available = lambda n, spec: read.get(n) == spec or _is_weight(joint, n, spec)
    return node in joint.forward or trial.has_operands(node, is_available)


def _is_weight(joint: JointGraph, operand: fx.Node, spec: Spec) -> bool:
    return spec == WHOLE and operand.op == "placeholder" and operand not in joint.backward


def _may_leave(joint: JointGraph, trial: WideGrowth, node: fx.Node) -> bool:
    """Whether an added node may stay, by its readers: only gradients leave the loops."""
    if node not in joint.backward:
        return all(user in trial.specs for user in node.users)
    return not ops.is_view(node) or any(user in trial.specs for user in node.users)


def _read(
    growth: WideGrowth, without: Set[fx.Node] = frozenset()
) -> Iterator[tuple[fx.Node, Spec]]:
    """What members read from outside, and how; ``without`` what some members read."""
    members = (n for n, spec in growth.specs.items() if spec != WHOLE and n not in without)
    for _, operand, spec in growth.reads(members):
        if operand not in growth.specs:
            yield operand, spec


def _bytes(growth: WideGrowth, before: WideGrowth) -> int:
    """Bytes of the values with tokens that cross the region's boundary, each storage once.

    What a node reads that was no member ``before`` does not count: it exists in any case.
    """
    crossing = {node for node, spec in _read(growth) if spec != WHOLE}
    crossing -= {node for node in crossing if any(u not in before.specs for u in node.users)}
    crossing |= {
        node
        for node, spec in growth.specs.items()
        if has_tokens(spec) and any(user not in growth.specs for user in node.users)
    }
    return sum(map(nbytes, {ops.base_of(node) for node in crossing}))


def _is_closed(trial: WideGrowth) -> bool:
    """Whether no path leaves one of the region's parts and comes back to it."""
    for in_backward in (False, True):
        closed = trial.copy()
        try:
            closed.close(trial.part(in_backward))
        except CannotTake:
            return False
        if closed.specs.keys() != trial.specs.keys():
            return False
    return True
