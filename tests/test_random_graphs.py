"""Random programs of token-parallel ops and barriers: rewritten equals original, in float64.

A program starts with a wide matmul, applies random ops to its result, and ends in a projection back
or in a loss. The joint graph before and after the rewrite runs op by op on the same numbers.
Programs that failed once stay in ``tests/random_graph_failures`` and are run first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from torch import Tensor

from mstpass import pipeline
from mstpass.options import Options
from mstpass.torch_internals.aot_autograd import merge_equal_nodes
from tests.checks import examples, joint_graph

pytestmark = pytest.mark.sampled(8)

D, WIDE = 8, 64
Op = Callable[[Tensor, Tensor], Tensor]  # the wide value, [B, S, WIDE]; token numbers, [B, S]

TOKENWISE: dict[str, Op] = {
    "relu": lambda h, ids: F.relu(h),
    "gelu": lambda h, ids: F.gelu(h),
    "tanh": lambda h, ids: torch.tanh(h),
    "square": lambda h, ids: h * h,
    "softmax": lambda h, ids: torch.softmax(h, -1),
    "layer_norm": lambda h, ids: F.layer_norm(h, (WIDE,)),
    "rms_norm": lambda h, ids: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3),
    "row_scale": lambda h, ids: h * torch.cos(ids.double()).unsqueeze(-1),
    "sequence_scale": lambda h, ids: h * torch.cos(ids[:, :1].double()).unsqueeze(-1),
    "feature_scale": lambda h, ids: h * torch.linspace(0.5, 1.5, WIDE, dtype=h.dtype),
    "mask": lambda h, ids: torch.where((ids % 3 == 0).unsqueeze(-1), torch.zeros_like(h), h),
    "halves": lambda h, ids: torch.cat((h[..., WIDE // 2 :], -h[..., : WIDE // 2]), -1),
    "gate": lambda h, ids: torch.cat(
        (h[..., : WIDE // 2] * torch.sigmoid(h[..., WIDE // 2 :]),) * 2, -1
    ),
    "flat_and_back": lambda h, ids: h.flatten(0, 1).sin().view(h.shape),
    "swap_and_back": lambda h, ids: h.transpose(1, 2).sigmoid().transpose(1, 2),
    "top": lambda h, ids: h + h.amax(-1, keepdim=True),
    "flip_features": lambda h, ids: h.flip(-1),
}
BARRIERS: dict[str, Op] = {
    "running_sum": lambda h, ids: h.cumsum(1) / 8,
    "softmax_over_tokens": lambda h, ids: torch.softmax(h, 1),
    "flip_tokens": lambda h, ids: h.flip(1),
    "roll_tokens": lambda h, ids: h + h.roll(1, 1),
    "center": lambda h, ids: h - h.mean(1, keepdim=True),
    "shift": lambda h, ids: h + F.pad(h, (0, 0, 1, -1)),
    "attention": lambda h, ids: torch.softmax(h @ h.transpose(1, 2), -1) @ h,
}
OPS = {**TOKENWISE, **BARRIERS}


def _project(h: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    return (h @ down).sin().sum()


def _cross_entropy(h: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    return F.cross_entropy(h.flatten(0, 1), ids.flatten() % WIDE) + 0 * down.sum()


def _shifted(h: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    return F.cross_entropy(h[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % WIDE) + 0 * down.sum()


def _by_sequence(h: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    rows = torch.logsumexp(h, -1).sum(1)
    return F.softplus(rows * 0.1).mean() + 0 * down.sum()


ENDS = {
    "project": _project,
    "cross_entropy": _cross_entropy,
    "shifted": _shifted,
    "by_sequence": _by_sequence,
}


def _check(batch: int, length: int, chunk: int, names: list[str], end: str) -> int:
    torch.manual_seed(0)
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.double, requires_grad=True)
    inputs = [leaf(batch, length, D), leaf(D, WIDE), leaf(WIDE, D)]
    ids = torch.randint(0, 600, (batch, length))

    def program(x: Tensor, up: Tensor, down: Tensor, ids: Tensor) -> Tensor:
        h = x @ up
        for name in names:
            h = OPS[name](h, ids)
        return ENDS[end](h, ids, down)

    graph, outputs = joint_graph(program, *inputs, ids)
    merge_equal_nodes(graph)
    options = Options.parse({"chunk_tokens": chunk, "strict": True}, environ={})
    result = pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="apply")
    assert result.joint is not None
    values = []
    for node in graph.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        random = torch.randint(0, 600, fake.shape)
        values.append(torch.randn(fake.shape).to(fake) if fake.is_floating_point() else random)
    with torch.no_grad():
        expected, found = graph(*values), result.joint(*values)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))
    return len(result.outcome.regions)


programs = st.lists(
    st.one_of(st.sampled_from(sorted(TOKENWISE)), st.sampled_from(sorted(OPS))), max_size=4
)


@given(
    batch=st.integers(1, 3),
    length=st.integers(17, 40),
    chunk=st.integers(3, 30),
    names=programs,
    end=st.sampled_from(sorted(ENDS)),
)
@settings(
    max_examples=examples(40),
    deadline=None,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parent / "random_graph_failures"),
    suppress_health_check=list(HealthCheck),
)
def test_rewritten_equals_original(
    batch: int, length: int, chunk: int, names: list[str], end: str
) -> None:
    _check(batch, length, chunk, names, end)


@pytest.mark.parametrize("name", TOKENWISE)
def test_every_tokenwise_op_is_taken(name: str) -> None:
    assert _check(2, 33, 20, [name], "cross_entropy") == 1


@pytest.mark.parametrize("name", BARRIERS)
def test_every_barrier_is_refused(name: str) -> None:
    assert _check(2, 33, 20, [name], "cross_entropy") == 0


def test_a_scatter_over_features_is_not_the_scatter_of_a_slice_over_tokens() -> None:
    assert _check(2, 17, 3, ["gate"], "shifted") == 1


def test_a_sum_of_the_region_is_not_read_inside_it() -> None:
    """A metric that weighs tokens by a sum over all of them cannot join the loop of the loss."""
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.double, requires_grad=True)

    def program(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.logsumexp(x @ up, -1)
        weights = rows.detach()
        return rows.sum(), (weights * weights.sum()).sum()

    graph, outputs = joint_graph(program, leaf(64, 8), leaf(8, 64))
    merge_equal_nodes(graph)
    options = Options.parse({"chunk_tokens": 16}, environ={})
    result = pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="apply")
    assert result.joint is not None and len(result.outcome.regions) == 1
    inputs = [
        torch.randn(n.meta["val"].shape, dtype=torch.double)
        for n in graph.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad():
        for found, expected in zip(result.joint(*inputs), graph(*inputs), strict=True):
            if expected is not None:
                torch.testing.assert_close(found, expected)
