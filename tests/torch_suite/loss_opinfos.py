"""Gradients of every loss function on torch's own samples, compiled and in eager mode.

The samples are those of torch's table of operators (OpInfo) in the installed torch: shapes,
reductions, weights, smoothing, ignored labels, padding. Each is run twice: alone, and behind a
product that widens, as behind an LM head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils import _pytree as pytree

_WIDTH = 2  # features before the product

LOSSES = [
    op for op in op_db if any(word in op.name for word in ("_loss", "cross_entropy", "kl_div"))
]


class TestLosses(TestCase):
    @ops(LOSSES, allowed_dtypes=(torch.float32,))
    def test_graphs(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """The graphs of every sample, run without a compiler."""
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            self._compare(op, sample, "aot_eager_decomp_partition")

    @ops(LOSSES, allowed_dtypes=(torch.float32,))
    def test_compiled(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """The first sample under Inductor."""
        for sample in list(op.sample_inputs(device, dtype, requires_grad=True))[:1]:
            self._compare(op, sample, "inductor")

    def _compare(self, op: Any, sample: Any, backend: str) -> None:
        for step, inputs in (_alone(op, sample), _behind_a_product(op, sample)):
            torch.compiler.reset()
            torch.manual_seed(0)
            expected = _gradients(step, inputs)
            torch.manual_seed(0)
            found = _gradients(torch.compile(step, backend=backend), inputs)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


Step = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]


def _alone(op: Any, sample: Any) -> Step:
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def step(*given: torch.Tensor) -> torch.Tensor:
        new = iter(given)
        filled = [next(new) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        value, args, kwargs = pytree.tree_unflatten(filled, tree)
        return op.op(value, *args, **kwargs).sum()

    return step, tensors


def _behind_a_product(op: Any, sample: Any) -> Step:
    """The loss of ``hidden @ weight``, whose last dim is that of the sample's input."""
    step, (given, *others) = _alone(op, sample)
    shape = given.shape if given.dim() else (1,)
    hidden = torch.randn(*shape[:-1], _WIDTH, requires_grad=True)
    weight = torch.randn(_WIDTH, shape[-1], requires_grad=True)

    def behind(hidden: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return step((hidden @ weight).sigmoid().reshape(given.shape), *others)

    return behind, [hidden, weight, *others]


def _gradients(step: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[Any]:
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    value = step(*leaves)
    if value.requires_grad:
        value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


instantiate_device_type_tests(TestLosses, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
