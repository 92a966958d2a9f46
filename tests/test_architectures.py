"""Tiny Hugging Face architectures: rewritten graphs and, with ``--all``, steps under Inductor.

By default each joint graph is rewritten and run, without compiling, against the graph it was made
from. ``mstpass bench architectures`` measures larger ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from mstpass import pipeline
from mstpass.bench.huggingface import TINY, Architecture, architectures
from mstpass.graph.joint import JointGraph
from mstpass.options import Options
from mstpass.torch_internals.aot_autograd import merge_equal_nodes
from tests.checks import check_against_float64, compiled, errors, gradients, joint_graph
from tests.token_dataflow import missing_ops

pytest.importorskip("transformers")

# transformers' Mamba calls a cached function, of which Dynamo warns
pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a"),
]

prims = torch.ops.prims

LossOf = Callable[[nn.Module], Callable[..., torch.Tensor]]

ARCHITECTURES = architectures(TINY)
CHUNK_TOKENS = 64

# Numbers of chunked heads and MLPs, where they are not 1 and 2.
REGIONS = {
    "deepseek-v3": (1, 3),
    "llama4": (0, 4),  # the head runs in the loop of the last layer's experts
    "vit": (0, 2),
    "t5": (1, 4),
    "bart": (1, 4),
    "mamba": (1, 0),
}

# The default run takes these; the others are close relatives of one of them.
RELATIVES = frozenset(
    {"llama-tied", "mistral", "qwen2", "gemma", "olmo", "helium", "glm", "ernie4_5", "codegen"}
    | {"granite", "roberta", "nemotron", "gpt-neo", "starcoder2", "phi", "stablelm", "cohere"}
    | {"gemma2", "smollm3", "gpt-j", "gpt-neox", "bloom", "electra", "distilbert", "mpt"}
    | {"qwen3", "opt", "phi3", "albert", "qwen3-moe", "falcon", "bart"}
)


def _joint(arch: Architecture, model: nn.Module) -> tuple[fx.GraphModule, int]:
    loss, batch = arch.loss_of(model), arch.batch()
    names = list(batch)
    module, outputs = joint_graph(
        lambda *values: loss(**dict(zip(names, values, strict=True))), *batch.values()
    )
    merge_equal_nodes(module)
    return module, outputs


def _random_like(value: object) -> object:
    """Small indices, and floats around 1 for vectors, such as norm weights and frequencies."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, dtype = tuple(value.shape), value.dtype
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if not value.is_floating_point():
        return torch.randint(0, 2, shape, dtype=dtype)
    if value.dim() < 2:
        return 0.5 + torch.rand(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype) / math.sqrt(shape[-1])


def _same(ours: object, theirs: object) -> None:
    assert isinstance(ours, tuple | list) and isinstance(theirs, tuple | list)
    floats = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if isinstance(b, torch.Tensor) and b.is_floating_point()
    ]
    scale = max(float(b.double().square().mean().sqrt()) for _, b in floats)
    for position, (a, b) in enumerate(floats):
        distance = float((a.double() - b.double()).square().mean().sqrt())
        size = float(b.double().square().mean().sqrt())
        assert distance <= 1e-5 * size + 1e-9 * scale, (position, distance, size)


class _Seeded(fx.Interpreter):
    """Runs a graph; a random node draws by its seed, so the order of the nodes does not matter."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is prims.inductor_seeds.default:
            return torch.arange(args[0])
        if target is prims.inductor_random.default:
            size, seed, mode = args
            generator = torch.Generator().manual_seed(int(seed))
            return getattr(torch, mode)(size, generator=generator)
        return super().call_function(target, args, kwargs)


def _check_rewrite(name: str, dropout: float) -> None:
    arch = ARCHITECTURES[name]
    module, outputs = _joint(arch, arch.build(dropout))
    options = Options.parse({"chunk_tokens": CHUNK_TOKENS}, environ={})
    result = pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="apply")
    assert result.joint is not None
    taken = Counter(region.kind for region in result.outcome.regions)
    assert (taken["lm_head"], taken["mlp"]) == REGIONS.get(name, (1, 2)), result.outcome.rejections
    assert not missing_ops(JointGraph(module, outputs))
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    inputs = [_random_like(n.meta["val"]) for n in holders]
    with torch.no_grad():
        _same(_Seeded(result.joint).run(*inputs), _Seeded(module).run(*inputs))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_rewritten_graph_computes_the_same(name: str, request: pytest.FixtureRequest) -> None:
    if name in RELATIVES and not request.config.getoption("--all"):
        pytest.skip("a close relative of another architecture: --all runs it")
    _check_rewrite(name, dropout=0.0)


@pytest.mark.parametrize(
    "name",
    ["bert", "t5", *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt2", "phi", "vit"))],
)
def test_with_dropout_too(name: str) -> None:
    _check_rewrite(name, dropout=0.1)


# ---- under Inductor ------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_under_inductor(name: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--all"):
        pytest.skip("compiles with Inductor: --all runs it")
    arch = ARCHITECTURES[name]
    model, batch = arch.build(layers=1), arch.batch()
    keys = list(batch)

    def loss_of(m: nn.Module) -> Callable[..., torch.Tensor]:
        loss = arch.loss_of(m)
        return lambda *values: loss(**dict(zip(keys, values, strict=True)))

    check = check_against_float64 if arch.float64 else _check_against_eager
    check(model, loss_of, list(batch.values()), chunk_tokens=CHUNK_TOKENS)


def _check_against_eager(
    model: nn.Module, loss_of: LossOf, inputs: list[torch.Tensor], **options: object
) -> None:
    exact = gradients(model, loss_of(model), inputs)
    ours = gradients(model, compiled(loss_of(model), **options), inputs)
    assert max(errors(ours, exact)) <= 1e-5, errors(ours, exact)
