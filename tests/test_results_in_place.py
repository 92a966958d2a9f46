"""The last kernel that reads a result of a loop may write over the buffer that the loop wrote."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.utils import run_and_get_code

from mstpass.torch_internals.scheduler_mends import keep_if_unlike
from tests.checks import compiled, errors

N, D, L, CHUNK = 2048, 32, 128, 256


def _mixed(x: Tensor, *weights: Tensor) -> Tensor:
    """Two MLPs; between them is an op over all tokens, whose gradient does not read its operand."""
    up, down, up2, down2 = weights
    y = (x @ up).relu() @ down
    z = (y * 8).softmax(0) * N**0.5
    mixed = z @ (z.t() @ z).softmax(-1)
    return ((mixed @ up2).relu() @ down2).square().sum(-1).mean()


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(a, b) / a**0.5 for a, b in ((D, L), (L, D), (D, L), (L, D))]
    return [tensor.requires_grad_() for tensor in (torch.randn(N, D), *weights)]


def test_a_value_is_written_over_the_result_of_a_loop() -> None:
    torch.compiler.reset()
    inputs = _inputs()
    step = compiled(_mixed, memory_budget=0.0, chunk_tokens=CHUNK)
    found, (forward, *_) = run_and_get_code(lambda: torch.autograd.grad(step(*inputs), inputs))
    call = forward[forward.index("def call(") :]
    (loop, after, *_) = re.split(r"^ +while should_loop:", call, flags=re.MULTILINE)
    (result,) = re.findall(rf"(\w+) = empty_strided_cpu\(\({N}, {D}\)", loop)
    assert f"= {result}; del {result}  # reuse" in after
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(_mixed(*wide), wide)
    eager = torch.autograd.grad(_mixed(*inputs), inputs)
    pairs = zip(errors(found, expected), errors(eager, expected), strict=True)
    assert all(ours <= 2 * theirs + 1e-6 for ours, theirs in pairs)


class _Buffer:
    def __init__(self, size: int):
        self.size = size


@pytest.mark.parametrize(("size", "kept"), [(8, False), (16, True), (None, True)])
def test_a_result_in_a_part_of_a_buffer_is_kept(
    size: int | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one in an input of the graph, which the scheduler has no buffer of."""
    module = "mstpass.torch_internals.scheduler_mends"
    monkeypatch.setattr(f"{module}.can_match_buffer_size", lambda a, b: a.size == b.size)
    node = ir.MutationOutput.__new__(ir.MutationOutput)
    object.__setattr__(node, "size", 8)
    object.__setattr__(node, "layout", None)
    buffers = {} if size is None else {"buffer": SimpleNamespace(node=_Buffer(size))}
    scheduler = SimpleNamespace(mutation_real_name={"result": "buffer"}, name_to_buf=buffers)
    user: Any = SimpleNamespace(can_inplace=True)
    keep_if_unlike(
        SimpleNamespace(node=node, scheduler=scheduler, users=[user], get_name=lambda: "result")
    )
    assert user.can_inplace != kept
