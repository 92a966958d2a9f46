"""Each reconstruction rule on numbers: bit for bit where it says so, within its bound elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.partition.reconstruct.rewrite_joint import decode, encode, encoding_of, low_dtype
from mstpass.partition.reconstruct.rules import (
    EXACT,
    RULE_OF,
    RULES,
    TOLERANT,
    Inverse,
    inverses_of,
)

Fn = Callable[..., torch.Tensor]
INF, NAN = float("inf"), float("nan")
TINY = torch.finfo(torch.float32).smallest_normal
# zeros of both signs, subnormals, the ends of the range, infinities, NaN
EDGES = torch.tensor(
    [0.0, -0.0, TINY / 4, -TINY / 4, 3e38, -3e38, INF, -INF, NAN, 1.0, -2.5, 1e-30]
)


def traced(fn: Fn, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def said(fn: Fn, *inputs: torch.Tensor) -> list[Inverse]:
    return [found for node in traced(fn, inputs).graph.nodes for found in inverses_of(node)]


def undone(
    fn: Fn, rule: str, *inputs: torch.Tensor, target: int = 0
) -> tuple[Inverse, torch.Tensor, torch.Tensor]:
    """The rule's ``target``-th inverse, the original value, and the reconstructed value."""
    module = traced(fn, inputs)
    graph = module.graph
    by_name = {node.name: node for node in graph.nodes}
    found = [f for n in graph.nodes for f in inverses_of(n) if f.rule == rule]
    inverse = found[target]
    wanted = by_name[inverse.target]
    output = graph.output_node()
    with graph.inserting_before(output):
        builder = Builder(graph, fake_mode_of(graph.nodes))
        back = RULES[rule].write(builder, by_name[inverse.op], wanted, lambda node: node)
    assert set(back.all_input_nodes) <= set(graph.nodes)
    output.args = ((wanted, back),)
    module.recompile()
    right, found_value = module(*inputs)
    assert right.dtype == found_value.dtype and right.shape == found_value.shape
    return inverse, right, found_value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; NaN counts as NaN whatever its payload."""
    both_nan = torch.isnan(a) & torch.isnan(b) if a.is_floating_point() else torch.zeros(())
    signs = torch.signbit(a) == torch.signbit(b) if a.is_floating_point() else torch.ones(())
    return bool((((a == b) & signs.bool()) | both_nan.bool()).all())


aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
LOW = EDGES.to(torch.bfloat16)
EXACT_CASES: dict[str, tuple[Fn, str, tuple[torch.Tensor, ...]]] = {
    "view": (lambda a: a.view(3, 4), "view", (EDGES,)),
    "unsafe view": (lambda a: aten._unsafe_view.default(a, [3, 4]), "view", (EDGES,)),
    "squeeze, dims": (lambda a: aten.squeeze.dims(a, [0, 2]), "view", (EDGES.view(1, 12, 1),)),
    "cast": (lambda a: cast(a, torch.float32), "cast", (EDGES.bfloat16(),)),
    "unsqueeze": (lambda a: a.unsqueeze(0), "view", (EDGES,)),
    "squeeze": (lambda a: a.squeeze(1), "view", (EDGES.view(12, 1),)),
    "permute": (lambda a: a.permute(2, 0, 1), "permute", (EDGES.view(2, 3, 2),)),
    "transpose": (lambda a: a.transpose(0, -1), "permute", (EDGES.view(2, 3, 2),)),
    "t": (lambda a: a.t(), "permute", (EDGES.view(3, 4),)),
    "clone": (lambda a: a.clone(), "copy", (EDGES,)),
}


@pytest.mark.parametrize("name", EXACT_CASES)
def test_exact_rules_are_exact_for_every_value(name: str) -> None:
    fn, rule, inputs = EXACT_CASES[name]
    inverse, right, back = undone(fn, rule, *inputs)
    assert inverse.grade == EXACT
    assert same_bits(right, back), (right, back)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_lossless_casts(low: torch.dtype) -> None:
    def widen(a: torch.Tensor) -> torch.Tensor:
        return torch.ops.prims.convert_element_type.default(a, torch.float32)

    inverse, right, back = undone(widen, "cast", EDGES.to(low))
    assert inverse.grade == EXACT and same_bits(right, back)


# ---- tolerant -----------------------------------------------------------------------------------
def test_sum_is_bounded_by_the_stream() -> None:
    for ratio in (1, 64, 2**10, 2**20):
        a, b = ratio * torch.randn(4096), torch.randn(4096)
        inverse, right, back = undone(lambda a, b: a + b, "sum", a, b, target=1)
        assert inverse.grade == TOLERANT
        assert ((right - back).abs() <= 2**-24 * ((a + b).abs() + right.abs()) * 1.01).all()


@pytest.mark.parametrize("power", range(15))
def test_a_bfloat16_branch_of_a_float32_stream_comes_back_whole(power: int) -> None:
    """While |c| < 2^14 |b|; the worst case is tried too: b just above a power of two."""
    torch.manual_seed(power)
    b = torch.cat([torch.randn(2000), torch.tensor([1.0, 2.0, -1.0, 1.0078125, 3e-30])])
    b = b.to(torch.bfloat16)
    a = torch.randn(b.numel()) * b.float().abs() * 2.0**power * 0.2
    c = a + b
    inside = c.abs() < 2.0**14 * b.float().abs()
    assert inside.float().mean() > 0.9
    inverse, right, back = undone(lambda a, b: a + b, "sum", a, b, target=1)
    assert inverse.grade == TOLERANT and "2^14" in inverse.bound
    assert torch.equal(right[inside], back[inside])


def test_beyond_the_bound_it_does_not() -> None:
    a, b = 2.0**20 * torch.randn(1000), torch.randn(1000).to(torch.bfloat16)
    _, right, back = undone(lambda a, b: a + b, "sum", a, b, target=1)
    assert not torch.equal(right, back)


X = torch.randn(8, 64)


TOLERANT_CASES: dict[str, tuple[Fn, str, tuple[torch.Tensor, ...], float]] = {
    "sub, left": (lambda a, b: a - b, "sum", (X, X.flip(0)), 1e-6),
    "scalar": (lambda a: a + 3.0, "sum", (X,), 1e-6),
    "scaling": (lambda a: a * 0.3, "product", (X,), 1e-6),
    "rsqrt": (
        lambda a: a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6),
        "product",
        (X,),
        1e-6,
    ),
    "quotient": (lambda a, f: a / f, "quotient", (X, X.flip(0) + 9), 1e-6),
}


@pytest.mark.parametrize("name", TOLERANT_CASES)
def test_tolerant_rules(name: str) -> None:
    fn, rule, inputs, tolerance = TOLERANT_CASES[name]
    inverse, right, back = undone(fn, rule, *inputs)
    assert inverse.grade == TOLERANT and inverse.bound != "none"
    assert float((right - back).norm() / right.norm()) <= tolerance


def test_every_op_of_a_rule_is_inverted_by_it() -> None:
    cases = [(fn, inputs) for fn, _, inputs in EXACT_CASES.values()]
    cases += [(fn, inputs) for fn, _, inputs, _ in TOLERANT_CASES.values()]
    inverted = {
        (node.target, found.rule)
        for fn, inputs in cases
        for node in traced(fn, inputs).graph.nodes
        for found in inverses_of(node)
    }
    inverted.add((aten.reshape.default, "view"))  # which is traced as another view
    assert inverted == set(RULE_OF.items()) and {rule for _, rule in inverted} == RULES.keys()


def test_a_rounding_cast_is_tolerant() -> None:
    def narrow(a: torch.Tensor) -> torch.Tensor:
        return torch.ops.prims.convert_element_type.default(a, torch.bfloat16)

    inverse, right, back = undone(narrow, "cast", X)
    assert inverse.grade == TOLERANT
    assert ((right - back).abs() <= 2**-8 * right.abs()).all()


@pytest.mark.parametrize("gain", [0.0, 1.0], ids=["weight", "1 + weight"])
def test_the_weight_of_a_norm(gain: float) -> None:
    """It is assumed not to be zero; where it is, what comes back is not finite, never plausible."""

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return y * (w + gain) if gain else y * w

    w = torch.randn(64) + 3
    _, right, back = undone(norm, "product", X, w, target=1)
    assert float((right - back).norm() / right.norm()) < 1e-6
    w[5] = -gain
    _, _, back = undone(norm, "product", X, w, target=1)
    assert not torch.isfinite(back[:, 5]).any()


# ---- not inverted -----------------------------------------------------------------------------
BF16 = X.to(torch.bfloat16)
LOST_CASES: dict[str, tuple[Fn, tuple[torch.Tensor, ...]]] = {
    "few digits of a bf16 stream": (lambda a, b: a + b, (BF16, BF16.flip(0))),
    "doubled": (lambda a: a + a, (X,)),
    "alpha": (lambda a, b: torch.add(a, b, alpha=2), (X, X.flip(0))),
    "integers": (lambda a, b: a + b, (X.long(), X.flip(0).long())),
    "factor that may be zero": (lambda a, f: a * f, (X, X.flip(0))),
    "zero": (lambda a: a * 0.0, (X,)),
    "infinity": (lambda a: a * INF, (X,)),
    "square": (lambda a: a * a, (X,)),
    "dropout": (lambda a, m: a * m, (X, X > 0)),
    "cast that may overflow": (lambda a: cast(a, torch.float16), (X,)),
    "cast to integers": (lambda a: cast(a, torch.int32), (X,)),
}


@pytest.mark.parametrize("name", LOST_CASES)
def test_what_is_lost_is_not_inverted(name: str) -> None:
    fn, inputs = LOST_CASES[name]
    assert said(fn, *inputs) == []


def test_the_dividend_of_a_quotient_follows_and_not_the_divisor() -> None:
    (found,) = said(lambda a, f: a / f, X, X.flip(0))
    assert found.target == "a_1"


def test_a_broadcast_term_is_in_several_sums() -> None:
    (found,) = (f for f in said(lambda a, b: b + a[:1], X, X.flip(0)) if f.rule == "sum")
    assert found.target == "b_1"


# ---- encodings, bounds, the table ---------------------------------------------------------------
def _encoded(fn: Fn, *inputs: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
    module = traced(fn, inputs)
    output = module.graph.output_node()
    (value,) = output.all_input_nodes
    name = encoding_of(value)
    with module.graph.inserting_before(output):
        builder = Builder(module.graph, fake_mode_of(module.graph.nodes))
        packed = encode(builder, value, value, name)
        output.args = ((value, packed, decode(builder, value, packed, name)),)
    module.recompile()
    return name, *module(*inputs)


@pytest.mark.parametrize("shape", [(8,), (3, 16), (2, 5, 64), (0, 8)])
def test_masks_cross_as_bits(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    name, right, packed, back = _encoded(lambda a: a > 0, x)
    assert name == "bits" and packed.numel() * 8 == x.numel() and packed.dtype == torch.uint8
    assert torch.equal(right, back)


def test_bfloat16_numbers_cross_as_such() -> None:
    cast = torch.ops.prims.convert_element_type.default
    name, right, packed, back = _encoded(lambda a: cast(a, torch.float32).view(3, 4), LOW)
    assert name == "narrow" and packed.dtype == torch.bfloat16
    assert same_bits(right, back)


def test_what_has_no_encoding() -> None:
    def last(fn: Fn, *inputs: torch.Tensor) -> fx.Node:
        return traced(fn, inputs).graph.output_node().all_input_nodes[0]

    cast = torch.ops.prims.convert_element_type.default
    assert encoding_of(last(lambda a: a > 0, torch.randn(3, 7))) == ""
    assert encoding_of(last(lambda a: a * 2, X)) == ""
    assert low_dtype(last(lambda a: cast(a, torch.float32) + 1, LOW)) is None


def test_every_rule_is_in_the_docs() -> None:
    import pathlib

    text = (pathlib.Path(__file__).parent.parent / "docs" / "reconstruction.md").read_text()
    for rule in RULES:
        assert f"| {rule} |" in text, rule
