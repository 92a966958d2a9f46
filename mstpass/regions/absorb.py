"""Add narrow nodes to a region, so that less leaves its loops: on trial, and what does not fit is
removed again.

- *users* that replace several outputs by one: ``dx = dx_gate + dx_up``;
- *sums* over the tokens, such as a loss or the gradient of a norm, and what leads to them alone;
- the *norm* in front of an MLP, and the norm's gradient, so that neither exists in full.

An MLP reads ``n = norm(h)``, and its gradient leaves as ``dn``::

    without     forward: h -> n -> [loop]              backward: n, dy -> [loop] -> dn -> dh
    with        forward: h -> [loop with norm]         backward: h, dy -> [loop with norm] -> dh

``h`` and ``dy`` exist in any case, because a residual path reads them too. What joins is found from
the graph, whatever the norm:

- *above*: a narrow pointwise op, reduction or view of the forward that only members read;
- *below*: one that the forward does not need, all of whose operands are members, or read by members
  already.

What is left of them stays only if fewer bytes then exist because of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import LINEAR
from mstpass.graph.joint import nbytes, value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec, has_tokens
from mstpass.regions.wide_growth import WideGrowth

_Specs = Mapping[fx.Node, Spec]
_Question = Callable[[fx.Node], bool]


def _add_users(
    trial: WideGrowth,
    starts: Iterable[fx.Node],
    joins: _Question,
    fits: _Question,
    read: _Specs = MappingProxyType({}),
) -> set[fx.Node]:
    """Add what is computed from the starts, in the graph's order; returns what was added.

    Args:
        joins: whether a node may be tried.
        fits: whether it may stay, once it has its spec.
        read: what members read from outside; nodes that join may read it too.
    """
    added = set[fx.Node]()
    for node in filter(joins, trial.spread(starts)):
        held = ((n, trial.specs.get(n, read.get(n, WHOLE))) for n in node.all_input_nodes)
        found = next(((n, s) for n, s in held if not isinstance(s, Reduced) and s), None)
        result = None if found is None else trial.result(node, *found)
        if result is None or result == WHOLE or isinstance(result, Refusal):
            continue
        trial.specs[node] = result
        if fits(node):
            added.add(node)
        else:
            del trial.specs[node]
    return added


def _remove(trial: WideGrowth, unfit: Callable[[], list[fx.Node]]) -> None:
    while nodes := unfit():
        for node in nodes:
            del trial.specs[node]


# ---- users ---------------------------------------------------------------------------------------
def absorb_users(growth: WideGrowth) -> None:
    """Add users that replace several narrow outputs by one.

    Such a user reads only members, and it is the only node outside that reads them. Of a user that
    returns a tuple, such as a split, not more than one item may be read: a loop returns no tuples.
    """
    specs = growth.specs

    def joins(user: fx.Node) -> bool:
        narrow = user.op != "output" and not growth.wide(user)
        return narrow and all(
            has_tokens(specs.get(operand, WHOLE))
            and all(other is user or other in specs for other in operand.users)
            for operand in user.all_input_nodes
            if not is_size(operand)
        )

    def fits(user: fx.Node) -> bool:
        return has_tokens(specs[user]) and (value_of(user) is not None or len(user.users) < 2)

    narrow = [n for n, spec in specs.items() if has_tokens(spec) and not growth.wide(n)]
    _add_users(growth, narrow, joins, fits)


# ---- sums ----------------------------------------------------------------------------------------
def absorb_sums(growth: WideGrowth) -> None:
    """Add narrow nodes that lead to sums over tokens.

    Those that would leave the loop token by token are removed again, until only nodes remain that
    end in sums.
    """
    trial, backward = growth.copy(), growth.joint.backward
    starts = [n for n, spec in growth.specs.items() if has_tokens(spec)]
    is_input = lambda n, _: n.op == "placeholder" and n not in backward

    def fits(node: fx.Node) -> bool:
        is_linear = node not in backward or not _not_linear(node, backward)
        return is_linear and trial.has_operands(node, is_input)

    narrow = lambda node: not (ops.is_matmul(node) or growth.wide(node))
    added = _add_users(trial, starts, narrow, fits)
    _remove(trial, lambda: [n for n in added if n in trial.specs and _leaves(trial, n)])
    growth.adopt(trial)


def _leaves(growth: WideGrowth, node: fx.Node) -> bool:
    """Whether the loop would have to return the node's tokens, or an operand is not available."""
    if not all(n in growth.specs or n.op == "placeholder" for n in node.all_input_nodes):
        return True
    is_reduced = isinstance(growth.specs[node], Reduced)
    return not is_reduced and any(user not in growth.specs for user in node.users)


def check_linear(nodes: Iterable[fx.Node], backward: Set[fx.Node]) -> None:
    """Check that each node is linear in its backward operands.

    Raises:
        CannotTake: a node is not, or its op is unknown.
    """
    for node in nodes:
        if reason := _not_linear(node, backward):
            raise CannotTake(node, reason)


def _not_linear(node: fx.Node, backward: Set[fx.Node]) -> str:
    """Why a node is not linear in its backward operands; empty if it is."""
    row = ops.lookup(node)
    if isinstance(row, Refusal):
        return row.reason
    is_linear = row.is_linear(node, {n for n in node.all_input_nodes if n in backward})
    return "" if is_linear else LINEAR(f"{node.target} is not linear in the gradient")


# ---- norms ---------------------------------------------------------------------------------------
def absorb_norms(growth: WideGrowth) -> None:
    """Add the narrow nodes above and below the region, if fewer bytes then cross its boundary."""
    trial, joint = growth.copy(), growth.joint
    above = _add_above(trial)
    read = dict(_read(trial))
    is_below = lambda node: node not in joint.forward and _is_narrow_op(trial, node)
    fits = lambda node: _has_operands(trial, node, read)
    below = _add_users(trial, [*trial.specs, *read], is_below, fits, read)

    def unfit() -> list[fx.Node]:
        read = dict(_read(trial, without=below))
        return [
            node
            for node in above | below
            if node in trial.specs
            and not (_has_operands(trial, node, read) and _may_leave(trial, node))
        ]

    _remove(trial, unfit)
    if _bytes(trial, growth) < _bytes(growth, growth) and _is_closed(trial):
        growth.adopt(trial)


def _is_narrow_op(growth: WideGrowth, node: fx.Node) -> bool:
    """Whether the node could join: it is no member, and runs in the kernels of its readers."""
    if node.op != "call_function" or node in growth.specs or node in growth.taken:
        return False
    known = ops.is_pointwise(node) or ops.is_reduction(node) or ops.is_view(node)
    return (known or node.target is operator.getitem) and not growth.wide(node)


def _add_above(trial: WideGrowth) -> set[fx.Node]:
    """Add forward nodes that the forward reads only inside of the region; returns them."""
    added = set[fx.Node]()
    for node in trial.spread(trial.specs, up=True):
        if node not in trial.joint.forward or not _is_narrow_op(trial, node):
            continue
        spec = _spec_for_readers(trial, node)
        needs = Refusal("") if spec is None else trial.operand_specs(node, spec)
        if spec is None or isinstance(needs, Refusal):
            continue
        if all(trial.specs.get(operand, held) == held for operand, held in needs.items()):
            trial.specs[node] = spec
            added.add(node)
    return added


def _spec_for_readers(trial: WideGrowth, node: fx.Node) -> Spec | None:
    """The spec that all readers in the forward need; None if one is no member."""
    readers = [user for user in node.users if user in trial.joint.forward]
    if node in trial.joint.forward_outputs:
        return None
    if not all(has_tokens(trial.specs.get(reader, WHOLE)) for reader in readers):
        return None
    specs = {trial.required_specs(reader)[node] for reader in readers}
    return specs.pop() if len(specs) == 1 and WHOLE not in specs else None


def _has_operands(trial: WideGrowth, node: fx.Node, read: _Specs) -> bool:
    """Whether the region computes or reads all that an added node reads."""
    operands = [operand for operand in node.all_input_nodes if not is_size(operand)]
    if any(value_of(operand) is None and operand not in trial.specs for operand in operands):
        return False

    def is_available(operand: fx.Node, spec: Spec) -> bool:
        is_input = operand.op == "placeholder" and operand not in trial.joint.backward
        return read.get(operand) == spec or (spec == WHOLE and is_input)

    return node in trial.joint.forward or trial.has_operands(node, is_available)


def _may_leave(trial: WideGrowth, node: fx.Node) -> bool:
    """Whether an added node may stay, by its readers: only gradients leave the loops."""
    inside = [user in trial.specs for user in node.users]
    if node not in trial.joint.backward:
        return all(inside)
    return not ops.is_view(node) or any(inside)


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
    closed = trial.copy()
    try:
        for in_backward in (False, True):
            closed.close(trial.part(in_backward))
    except CannotTake:
        return False
    return closed.specs.keys() == trial.specs.keys()
