"""Add the norm in front of a region, and the norm's gradient, so that neither exists in full.

An MLP reads ``n = norm(h)``, and its gradient leaves as ``dn``::

    without     forward: h -> n -> [loop]              backward: n, dy -> [loop] -> dn -> dh
    with        forward: h -> [loop with norm]         backward: h, dy -> [loop with norm] -> dh

``h`` and ``dy`` exist in any case, because a residual path reads them too. What joins is found from
the graph, whatever the norm:

- *above*: a narrow pointwise op, reduction or view of the forward that only members read;
- *below*: one of the backward, all of whose operands are members, or read by members already.

Both are added on trial, and those that do not fit are removed again. The rest stays only if fewer
bytes then exist because of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec
from mstpass.regions.grow import Growth


def absorb_norms(joint: JointGraph, growth: Growth) -> None:
    """Add the narrow nodes above and below the region, if fewer bytes then cross its boundary."""
    trial = growth.copy()
    for node in reversed(joint.nodes):
        if _is_narrow_op(growth, node) and node not in joint.backward:
            _add_above(joint, trial, node)
    for node in joint.nodes:
        if _is_narrow_op(growth, node) and node in joint.backward:
            _add_below(joint, trial, node)
    added = [node for node in joint.nodes if node in trial.specs and node not in growth.specs]
    while unfit := [n for n in added if n in trial.specs and not _fits(joint, trial, n)]:
        for node in unfit:
            del trial.specs[node]
    if _bytes(joint, trial, growth) < _bytes(joint, growth, growth) and _is_closed(joint, trial):
        growth.adopt(trial)


def _is_narrow_op(growth: Growth, node: fx.Node) -> bool:
    """Whether the node could join: it is no member, and runs in the kernels of its readers."""
    if node.op != "call_function" or node in growth.specs or node in growth.taken:
        return False
    known = ops.is_pointwise(node) or ops.is_reduction(node) or ops.is_view(node)
    return (known or node.target is operator.getitem) and not growth.wide(node)


def _add_above(joint: JointGraph, trial: Growth, node: fx.Node) -> None:
    """Add a forward node that the forward reads only inside of the region."""
    readers = [user for user in node.users if user not in joint.backward]
    if not readers or node in joint.forward_outputs:
        return
    specs: set[Spec] = set()
    for reader in readers:
        if trial.specs.get(reader, WHOLE) in (WHOLE, SUM):
            return
        specs.add(trial.required_specs(reader)[node])
    (spec, *others) = specs
    if others or spec == WHOLE:
        return
    required = trial.operand_specs(node, spec)
    if not isinstance(required, Refusal) and all(
        trial.specs.get(operand, needed) == needed for operand, needed in required.items()
    ):
        trial.specs[node] = spec


def _add_below(joint: JointGraph, trial: Growth, node: fx.Node) -> None:
    """Add a backward node if the region has all that it reads."""
    for operand in node.all_input_nodes:
        if operand not in joint.backward or trial.specs.get(operand, WHOLE) in (WHOLE, SUM):
            continue
        result = trial.spec_of_user(node, operand)
        if isinstance(result, Refusal) or result == WHOLE:
            return
        trial.specs[node] = result
        if not _fits(joint, trial, node):
            del trial.specs[node]
        return


def _fits(joint: JointGraph, trial: Growth, node: fx.Node) -> bool:
    """Whether an added node may stay: see "above" and "below"."""
    if any(
        value_of(n) is None and n not in trial.specs and not is_size(n)
        for n in node.all_input_nodes
    ):
        return False
    if node not in joint.backward:
        return all(user in trial.specs for user in node.users)
    if ops.is_view(node) and not any(user in trial.specs for user in node.users):
        return False
    try:
        required = trial.required_specs(node)
    except CannotTake:
        return False
    read = dict(_read(trial, without=node))
    return all(
        trial.specs[operand] == spec
        if operand in trial.specs
        else (read.get(operand) == spec or _is_weight(joint, operand, spec))
        for operand, spec in required.items()
    )


def _is_weight(joint: JointGraph, operand: fx.Node, spec: Spec) -> bool:
    return spec == WHOLE and operand.op == "placeholder" and operand not in joint.backward


def _read(growth: Growth, without: fx.Node | None = None) -> Iterator[tuple[fx.Node, Spec]]:
    """What members read from outside, and how; ``without`` what one of them reads."""
    for member, own in growth.specs.items():
        if own == WHOLE or member is without:
            continue
        for operand, spec in growth.required_specs(member).items():
            if operand not in growth.specs:
                yield operand, spec


def _bytes(joint: JointGraph, growth: Growth, before: Growth) -> int:
    """Bytes of the values with tokens that cross the region's boundary, each storage once.

    What a node reads that was no member ``before`` does not count: it exists in any case.
    """
    crossing = {node for node, spec in _read(growth) if spec != WHOLE}
    crossing -= {node for node in crossing if any(u not in before.specs for u in node.users)}
    crossing |= {
        node
        for node, spec in growth.specs.items()
        if spec not in (WHOLE, SUM) and any(user not in growth.specs for user in node.users)
    }
    return sum(map(nbytes, {ops.base_of(node) for node in crossing}))


def _is_closed(joint: JointGraph, trial: Growth) -> bool:
    """Whether no path leaves one of the region's parts and comes back to it."""
    for in_backward in (False, True):
        part = {
            n for n, s in trial.specs.items() if s != WHOLE and (n in joint.backward) == in_backward
        }
        try:
            closed = trial.copy()
            closed.close(part)
        except CannotTake:
            return False
        if closed.specs.keys() != trial.specs.keys():
            return False
    return True
