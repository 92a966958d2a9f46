"""Token rules: how token dims pass through an op. The rows of the op table refer to them.

Two kinds of rules say how the token dims of an op's operands and of its result belong together
(a *spec* is the tuple of a value's token dims, see tokens.py):

    forward rule    (node, operand, spec of the operand)  ->  spec of the result, SUM, or a Refusal
    backward rule   (node, spec of the result)            ->  spec of each operand, or a Refusal

For ``c = a @ b`` with tokens in the rows of ``a``:

    forward(c, a, (0,)) = (0,)      the rows of ``c`` are tokens
    forward(c, a, (1,)) = SUM       the product contracts the tokens: every chunk gives a summand
    backward(c, (0,)) = {a: (0,), b: WHOLE}

``Refusal`` holds the reason why the op is not token-parallel in these dims.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mstpass.graph.tokens import Reduced, Refusal, Spec

OperandSpecs = dict[fx.Node, Spec]
ForwardRule = Callable[[fx.Node, fx.Node, Spec], Spec | Reduced | Refusal]
BackwardRule = Callable[[fx.Node, Spec], OperandSpecs | Refusal]
