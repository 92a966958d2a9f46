"""Wide gradients of a region's products that no other wide value leads to.

A region grows through wide values. The gradient of logits that the loss reads only by their
maximum, their top k or a few gathered elements is made of narrow values::

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

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.regions.wide_growth import WideGrowth


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
