"""Token rules: how token dims pass through an op. The rows of the op table refer to them.

Most ops keep dims apart. Of such an op a function says where each dim of each operand is in the
result: its *places*. From them follow all questions (a *spec* is the tuple of a value's token dims,
see tokens.py)::

    forward     the spec of an operand      ->  that of the result, SUM, or a Refusal
    backward    the spec of the result      ->  that of each operand, or a Refusal
    sums        the spec of an operand whose tokens are reduced  ->  that of each operand

A place is a dim of the result; a negative number for a dim that is contracted or reduced, the same
one in all operands that have it; or the reason why that dim can hold no tokens. For
``c = a @ b`` with ``[N, K] @ [K, M]``::

    places      a: [0, -1]    b: [-1, 1]
    forward     a: (0,) -> (0,), the rows of ``c`` are tokens; a: (1,) -> SUM, every chunk of
                tokens gives a summand
    backward    (0,) -> {a: (0,), b: WHOLE}: of a dim that it has not, an operand is whole

A dim of the result that no operand has is made by the op, so it can hold no tokens either. What an
operand is in two roles, it must be in the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from mstpass.graph.advice import ROWWISE, SEPARATE_DIMS, Advice, Reason
from mstpass.graph.token_rules.arguments import tensor_inputs
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, Spec

OperandSpecs = dict[fx.Node, Spec]
Place = int | Reason
Places = list[tuple[fx.Node, Sequence[Place]]]

WORKED = ROWWISE("{} works along a token dim")
_ALL_REDUCED = "{} reduces over all tokens"
_SOME_REDUCED = "{} reduces over some of the token dims"
_SOME_BROADCAST = SEPARATE_DIMS("an operand is broadcast over some of the token dims only")
_TWO_ROLES = ROWWISE("{} uses one value in two roles")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The token rules of an op that keeps dims apart; in reasons, ``{}`` stands for the op.

    Attributes:
        places: where the dims of each operand are; operands that are left out are whole.
        refused: why no tokens are in a dim that the op makes.
        combined: what the result is of an operand whose dims with negative places are tokens; None:
            chunks of it do not give that of all tokens.
        reduced: what to do about that.
        free: dims that no operand has may be token dims: all tokens are equal.
    """

    places: Callable[[fx.Node], Places | Refusal]
    refused: Reason = WORKED
    combined: Reduced | None = SUM
    reduced: Advice = ROWWISE
    free: bool = False

    def forward(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        places = self.places(node)
        if isinstance(places, Refusal):
            return places
        roles = [each for n, each in places if n is operand]
        if not roles or any(list(each) != list(roles[0]) for each in roles):
            return _refusal(_TWO_ROLES if roles else self.refused, node)
        found = [roles[0][d] for d in spec]
        if reasons := [place for place in found if isinstance(place, Reason)]:
            return _refusal(reasons[0], node)
        kept = tuple(place for place in found if isinstance(place, int) and place >= 0)
        if len(kept) == len(spec):
            return kept
        refused = self.reduced(_SOME_REDUCED if kept else _ALL_REDUCED)
        return self.combined if self.combined and not kept else _refusal(refused, node)

    def backward(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        places = self.places(node)
        if isinstance(places, Refusal):
            return places
        if not self.free and any(all(d not in each for _, each in places) for d in spec):
            return _refusal(self.refused, node)
        return _needed(node, places, spec)

    def sums(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        places = self.places(node)
        assert not isinstance(places, Refusal), "the op has a result"
        of_operand = next(each for n, each in places if n is operand)
        needs = _needed(node, places, [of_operand[d] for d in spec])
        assert not isinstance(needs, Refusal), "what is reduced is so in all operands"
        return needs


def _needed(node: fx.Node, places: Places, wanted: Sequence[Place]) -> OperandSpecs | Refusal:
    """The dims of each operand that are in these places."""
    needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
    known: OperandSpecs = {}
    for operand, each in places:
        dims = tuple(list(each).index(place) for place in wanted if place in each)
        if 0 < len(dims) < len(wanted):
            return Refusal(_SOME_BROADCAST)
        if known.setdefault(operand, dims) != dims:
            return _refusal(_TWO_ROLES, node)
    return {**needs, **known}


def _refusal(reason: Reason, node: fx.Node) -> Refusal:
    return Refusal(reason.of(node.target))
