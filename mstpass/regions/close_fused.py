"""Close a region as fused: its forward and its backward become one loop, which runs in the forward.

That is correct if everything that the backward nodes need from outside is linear in one scalar s,
and the backward nodes are linear in what they need. Then

    backward(s) = s * backward(1)

so the loop computes with 1 in the place of s, and its gradients are multiplied by s later.
The loss of an LM head is of this kind: s is the tangent of the loss, or a scalar computed from it.

``add_gradients``: wide gradients of a region's products that no other wide value leads to. A region
grows through wide values. The gradient of logits that the loss reads only by their maximum, their
top k or a few gathered elements is made of narrow values::

    gradient = zeros.scatter(index, narrow gradient)        [N, V]

It is found from what reads it. In the backward of ``product = tokens @ weight``

    gradient @ weight^T     is the gradient of the tokens
    tokens^T @ gradient     is the gradient of the weight

so the other factor of a product in the backward that shares a factor with ``product`` is its
gradient. Several heads may read the same tokens, or one head may run twice. Then a gradient belongs
to that product from which it is computed; where there are several, it stays outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, ancestors, numel, value_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec
from mstpass.regions.absorb import absorb_sums, absorb_users, check_linear
from mstpass.regions.anchors import anchor_spec
from mstpass.regions.grow import COMPLETE
from mstpass.regions.wide_growth import WideGrowth

# The most widening matmuls in a row in one fused loop. The time to compile the loop's body grows
# with their square: for MLPs with dropout 28 s for 4 of them, 134 s for 6 (2 busy CPU cores,
# 2026-11-21).
_MOST_IN_A_ROW = 3


def close_fused(growth: WideGrowth) -> tuple[fx.Node, ...]:
    """Close the region as fused.

    Returns:
        The scalar in which the backward is linear, in the place of which the loop computes with 1,
        and the nodes between it and the region. They run before the loop, with 1 in its place, too.

    Raises:
        CannotTake: the region cannot be fused. The members of ``growth`` are then of no use.
    """
    backward = growth.joint.backward
    if not any(n in backward for n in growth.specs):
        raise CannotTake(growth.anchor, "the region has no backward part")
    while True:
        entries = _pull_backward(growth)
        size = len(growth.specs)
        scalar = entries[0] if len(entries) == 1 and numel(entries[0]) == 1 else None
        growth.close({n for n, s in growth.specs.items() if s != WHOLE or n in backward}, scalar)
        if len(growth.specs) == size:
            break
    for node, reduced in growth.waits_for_reductions():
        if reduced in backward:
            raise CannotTake(node, f"{COMPLETE}, and the backward is a part of one loop")
    unit = _unit(growth, entries)
    check_linear(growth.joint.sorted(backward.intersection(growth.specs)), backward)
    absorb_users(growth)
    absorb_sums(growth)
    # of a weight that is used twice, the loop has one sum: dw = dw_1 + dw_2
    of_weights = filter(ops.is_matmul, backward.intersection(growth.specs))
    growth.join_sums({node for node in of_weights if growth.specs[node] == SUM})
    _check_matmuls_in_a_row(growth)
    return unit


def _pull_backward(growth: WideGrowth) -> list[fx.Node]:
    """Add the backward values with tokens that members read; return the others that they read.

    The latter enter the region. They must not depend on its results, for they are computed before
    the loop.
    """
    backward, matmuls = growth.joint.backward, growth.wide_matmuls()
    entries: dict[fx.Node, None] = {}
    seen = 0
    while seen < len(growth.specs):
        new = list(growth.specs)[seen:]  # members are kept in the order in which they joined
        seen = len(growth.specs)
        for member in new:
            for operand, spec in growth.required_specs(member).items():
                if operand in growth.specs or operand not in backward:
                    continue
                if numel(operand) == 1 or operand.op == "placeholder":
                    entries[operand] = None
                elif growth.depends_on(operand, matmuls):
                    growth.add(operand, spec)
                elif growth.try_add(operand, spec):
                    matmuls = growth.wide_matmuls()
                else:
                    entries[operand] = None
    return [entry for entry in entries if entry not in growth.specs]


def _unit(growth: WideGrowth, entries: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The scalar in which all entries are linear, the tangent itself if that is possible, and what
    is between them.

    With the tangent as the unit, the loop computes exactly what the graph without a loop computes
    for a tangent of 1. Otherwise a single scalar that depends on the region's own results, which
    exist only after the loop, is the unit.

    Raises:
        CannotTake: there is no such scalar.
    """
    if not entries:
        raise CannotTake(next(iter(growth.specs)), "no gradient enters the region")
    backward = growth.joint.backward
    for node in backward.intersection(growth.specs):
        value = value_of(node)
        if value is not None and value.dtype == torch.float16:
            # The loss scale arrives with the tangent; without it small gradients underflow.
            raise CannotTake(
                node, "float16 gradients need the loss scale, which is known only in the backward"
            )
    matmuls = growth.wide_matmuls()
    before = growth.joint.sorted(backward & ancestors(entries))
    needs_results = next((n for n in before if growth.depends_on(n, matmuls)), None)
    if needs_results is not None:
        if len(entries) == 1 and numel(entries[0]) == 1:
            return (entries[0],)
        raise CannotTake(
            needs_results, "a gradient that enters the region depends on the region's results"
        )
    tangents = [n for n in before if n.op == "placeholder"]
    if len(tangents) != 1:
        raise CannotTake(entries[-1], "several gradients enter the region")
    if numel(tangents[0]) != 1:
        raise CannotTake(tangents[0], "the gradient that enters the region is not a scalar")
    prelude = [n for n in before if n is not tangents[0]]
    check_linear(prelude, backward)
    return (tangents[0], *prelude)


def _check_matmuls_in_a_row(growth: WideGrowth) -> None:
    """Raise ``CannotTake`` if one loop would run too many widening matmuls in a row."""
    in_a_row: dict[fx.Node, int] = {}
    for node in growth.joint.sorted(growth.specs.keys() - growth.joint.backward):
        widens = ops.is_matmul(node) and anchor_spec(node) is not None
        before = max((in_a_row.get(n, 0) for n in node.all_input_nodes), default=0)
        in_a_row[node] = widens + before
        if in_a_row[node] > _MOST_IN_A_ROW:
            raise CannotTake(
                node,
                f"more than {_MOST_IN_A_ROW} widening matmuls in a row, which compile slowly as "
                "one loop",
            )


# ---- wide gradients that no other wide value leads to --------------------------------------------
def add_gradients(growth: WideGrowth) -> None:
    """Add to a region the gradients of its wide products, each if that is possible."""
    done: set[fx.Node] = set()
    while products := [n for n in growth.specs if n not in done and _is_product(growth, n)]:
        for product in products:
            done.add(product)
            for gradient, spec in _gradients(growth, product):
                if gradient not in growth.specs:
                    growth.try_add(gradient, spec)


def _is_product(growth: WideGrowth, node: fx.Node) -> bool:
    plain = ops.is_matmul(node) and not ops.is_grouped_matmul(node)
    return plain and growth.wide(node) and node not in growth.joint.backward


def _gradients(growth: WideGrowth, product: fx.Node) -> Iterator[tuple[fx.Node, Spec]]:
    """The wide values outside of the region that are gradients of a product, with their specs."""
    joint = growth.joint
    by_factor = joint.cached(_matmuls_by_factor)
    needs = growth.operand_specs(product, growth.held(product) or WHOLE)
    if isinstance(needs, Refusal):
        return
    for factor in ops.matmul_factors(product):
        tokens_are_shared = needs[factor] != WHOLE
        readers = by_factor[ops.base_of(factor)]
        alike = [n for n in readers if n not in joint.backward and numel(n) == numel(product)]
        for reader in readers:
            if reader not in joint.backward:
                continue
            gradient = _other_factor(reader, ops.base_of(factor))
            if gradient is None or numel(gradient) != numel(product):
                continue
            if gradient in joint.backward and _belongs_to(growth, gradient, product, alike):
                yield gradient, _token_dims(reader, gradient, tokens_are_shared)


def _matmuls_by_factor(joint: JointGraph) -> dict[fx.Node, list[fx.Node]]:
    """Of each value, the products of which it is a factor, perhaps viewed."""
    found: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in joint.nodes:
        if ops.is_matmul(node) and not ops.is_grouped_matmul(node):
            for factor in dict.fromkeys(map(ops.base_of, ops.matmul_factors(node))):
                found[factor].append(node)
    return found


def _other_factor(product: fx.Node, base: fx.Node) -> fx.Node | None:
    """The factor that is no view of ``base``; None if both are."""
    others = [n for n in ops.matmul_factors(product) if ops.base_of(n) is not base]
    return others[0] if others else None


def _belongs_to(
    growth: WideGrowth, gradient: fx.Node, product: fx.Node, alike: list[fx.Node]
) -> bool:
    """Whether a gradient is that of one product, of several with the same factor."""
    bits = {n: 1 << growth.joint.index[n] for n in alike}
    sources = [n for n in alike if growth.upstream[gradient] & bits[n]]
    return (sources or alike) == [product]


def _token_dims(reader: fx.Node, gradient: fx.Node, contracts_tokens: bool) -> Spec:
    """Where the gradient holds its tokens: in the dim that its reader contracts, or not."""
    rank = gradient.meta["val"].dim()
    contracts_last = gradient is ops.matmul_factors(reader)[0]
    return (rank - 1,) if contracts_last == contracts_tokens else (rank - 2,)
