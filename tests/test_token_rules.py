"""What the op table says of every op, checked on numbers: token rules first.

Each case (tests/token_rule_cases.py) names all ways in which the result of an op may be cut into
chunks of tokens. For each of them the op is run on chunks of its operands and compared with chunks
of the whole result. Every other way must be refused: no rule may accept tokens that its op mixes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx

from mstpass.graph import op_table, ops
from mstpass.graph.joint import tensors_of
from mstpass.graph.loop_op import combined, initial
from mstpass.graph.op_table import row_of
from mstpass.graph.recompute_rules import is_pinned
from mstpass.graph.tokens import SUM, Reduced, Refusal, Spec, chunk_shape, token_count
from mstpass.torch_internals.graphs import name_of
from tests.token_rule_cases import CASES, COLLECTIVES, FMA, B, Case, D, E, S, ids, x

aten = torch.ops.aten
prims = torch.ops.prims
CHUNK = 2


def _name(given: Case) -> str:
    return str(given.target).removeprefix("aten.")


# ---- running a case -----------------------------------------------------------------------------
def _node(given: Case) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """The case as a node of a graph, and the real tensors of its operands."""
    graph, values = fx.Graph(), {}

    def holder(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"operand_{len(values)}")
            node.meta["val"] = values[node] = value
            return node
        if isinstance(value, tuple):  # a tuple of tensors is one operand, an op's several results
            node = graph.placeholder(f"operand_{len(values)}")
            node.meta["val"] = values[node] = value
            return node
        if isinstance(value, list):
            return [holder(v) for v in value]
        return value

    args = tuple(holder(a) for a in given.args())
    node = graph.call_function(given.target, args, dict(given.kwargs))
    node.meta["val"] = _call(node, values)
    return node, values


def _call(node: fx.Node, values: dict[fx.Node, Any], **replaced: Any) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if replaced:
        args = (*args[: replaced["at"]], replaced["shape"], *args[replaced["at"] + 1 :])
    target = node.target if node.target is not aten.view.default else aten.reshape.default
    return target(*args, **kwargs)


def _chunk(value: Any, spec: Spec, first: int, length: int) -> Any:
    """Tokens ``first`` to ``first + length`` of a value in chunk form."""
    if isinstance(value, tuple | list):
        return tuple(_chunk(v, spec, first, length) for v in value)
    if not spec:
        return value
    rest = [d for d in range(value.dim()) if d not in spec]
    rows = value.permute(*spec, *rest).reshape(-1, *(value.shape[d] for d in rest))
    rows = rows[first : first + length]
    order = [*spec, *rest]
    shaped = rows.reshape(*[1] * (len(spec) - 1), length, *rows.shape[1:])
    result = shaped.permute(*(order.index(d) for d in range(len(order))))
    assert list(result.shape) == chunk_shape(value.shape, spec, length)
    return result


def _shapes(value: Any) -> list[torch.Size]:
    return [t.shape for t in tensors_of(value)]


def _all_specs(rank: int) -> list[Spec]:
    return [c for r in range(1, rank + 1) for c in itertools.combinations(range(rank), r)]


def _run_chunks(node: fx.Node, values: dict[fx.Node, Any], spec: Spec) -> None:
    needs = ops.operand_specs(node, spec)
    assert not isinstance(needs, Refusal), needs
    row = ops.lookup(node)
    assert isinstance(row, op_table.Row)
    shape = _shapes(node.meta["val"])[0]
    count = token_count(shape, spec)
    for operand, need in needs.items():
        if need:
            assert ops.result_spec(node, operand, need) == spec, (operand, need)
    for first in range(count - CHUNK + 1):
        cut = {n: _chunk(values[n], needs[n], first, CHUNK) for n in values}
        replaced = (
            {"at": row.shape_arg, "shape": chunk_shape(shape, spec, CHUNK)}
            if row.shape_arg is not None
            else {}
        )
        part = _call(node, cut, **replaced)
        expected = _chunk(node.meta["val"], spec, first, CHUNK)
        pairs = zip(tensors_of(part), tensors_of(expected), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_a_chunk_of_the_result_is_the_result_of_chunks(given: Case) -> None:
    node, values = _node(given)
    for spec in given.specs:
        _run_chunks(node, values, spec)


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_any_other_cut_is_refused(given: Case) -> None:
    node, _ = _node(given)
    shape = _shapes(node.meta["val"])[0]
    without_ones = [s for s in _all_specs(len(shape)) if all(shape[d] != 1 for d in s)]
    taken = [s for s in without_ones if not isinstance(ops.operand_specs(node, s), Refusal)]
    assert set(taken) <= set(given.specs), "taken without a numerical check"


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_what_operands_give_is_what_the_result_needs(given: Case) -> None:
    """Forward and backward rules agree, and sums over tokens are those that the case names."""
    node, values = _node(given)
    tensors = list(values)
    for operand in tensors:
        shape = _shapes(values[operand])[0]
        for spec in _all_specs(len(shape)):
            if any(shape[d] == 1 for d in spec):
                continue
            result = ops.result_spec(node, operand, spec)
            if isinstance(result, Reduced):
                _check_reduced(node, values, operand, spec, result.combine)
            elif isinstance(result, tuple) and result:
                needs = ops.operand_specs(node, result)
                assert isinstance(needs, Refusal) or needs[operand] == spec, (spec, result, needs)
    for position, spec in given.sums:
        assert ops.result_spec(node, tensors[position], spec) == SUM


def _check_reduced(
    node: fx.Node, values: dict[fx.Node, Any], operand: fx.Node, spec: Spec, combine: str
) -> None:
    needs = ops.sum_operands(node, operand, spec)
    assert not isinstance(needs, Refusal)
    count = token_count(values[operand].shape, spec)
    expected = node.meta["val"]
    total = torch.full_like(expected, initial(combine, expected.dtype))
    for first in range(count):
        part = _call(node, {n: _chunk(values[n], needs.get(n, ()), first, 1) for n in values})
        total = combined(combine, 0, [total], [part])
    torch.testing.assert_close(total, node.meta["val"])


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_what_is_said_to_be_linear_is(given: Case) -> None:
    node, values = _node(given)
    row = ops.lookup(node)
    assert not isinstance(row, Refusal)
    floats = [n for n, v in values.items() if all(t.is_floating_point() for t in tensors_of(v))]
    for count in range(1, len(floats) + 1):
        for operands in itertools.combinations(floats, count):
            if row.is_linear(node, set(operands)):
                _check_linear(node, values, operands)


def _check_linear(node: fx.Node, values: dict[fx.Node, Any], operands: tuple[fx.Node, ...]) -> None:
    """``f(2 a - 3 b) = 2 f(a) - 3 f(b)``, with the other operands held fixed."""

    def combined(left: Any, right: Any) -> Any:
        if isinstance(left, tuple | list):
            return tuple(map(combined, left, right))
        return 2 * left - 3 * right

    def result(part: dict[fx.Node, Any]) -> Any:
        found = _call(node, {**values, **part})
        if not isinstance(found, torch.Tensor):
            return tuple(found)
        return found.double() if found.itemsize == 1 else found  # no arithmetic in 8 bits

    others = {n: _random_like(values[n]) for n in operands}
    both = {n: combined(values[n], others[n]) for n in operands}
    expected = combined(result({}), result(others))
    torch.testing.assert_close(result(both), expected, rtol=1e-5, atol=1e-5)


def _random_like(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_random_like, value))
    return torch.randn_like(value)


NOT_LINEAR = (
    Case(aten.exp.default, lambda: (x(),)),
    Case(aten.abs.default, lambda: (x(),)),  # homogeneous, for positive factors
    Case(aten.mul.Tensor, lambda: (x(), x())),  # in both factors
    Case(aten.addmm.default, lambda: (x(S, E) * 0 + 1, x(S, D), x(D, E))),  # affine
    Case(aten.constant_pad_nd.default, lambda: (x(), [1, 0], 1.0)),
    Case(aten.scatter.value, lambda: (x(), 2, ids(B, S, 1, below=D), 1.0)),
    Case(prims.convert_element_type.default, lambda: (x(), torch.int32)),
    Case(prims.convert_element_type.default, lambda: (100 * x(), torch.float8_e4m3fn)),
)


@pytest.mark.parametrize("given", NOT_LINEAR, ids=_name)
def test_what_is_not_linear_fails_that_check_and_is_not_said_to_be(given: Case) -> None:
    node, values = _node(given)
    row = ops.row(node)
    operands = tuple(n for n, v in values.items() if v.is_floating_point() and not v.eq(1).all())
    assert not row.is_linear(node, set(operands))
    with pytest.raises(AssertionError):
        _check_linear(node, values, operands)


def test_no_cast_of_a_gradient_to_integers_or_to_eight_bits_is_linear() -> None:
    casts = [
        given for given in CASES if given.target is torch.ops.prims.convert_element_type.default
    ]
    linear = {}
    for given in casts:
        node, values = _node(given)
        row = ops.lookup(node)
        assert not isinstance(row, Refusal)
        linear[node.meta["val"].dtype] = row.is_linear(node, set(values))
    assert linear.pop(torch.float32)
    assert len(linear) == 3 and not any(linear.values())


# ---- what else a row says -----------------------------------------------------------------------
def _same_bits(first: Any, second: Any) -> bool:
    """Whether two results are equal bit for bit; zeros of both signs differ."""
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(value: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_what_may_run_twice_gives_the_same_bits(given: Case) -> None:
    node, values = _node(given)
    if not is_pinned(node):
        assert _same_bits(_call(node, values), node.meta["val"])


def test_random_draws_fail_that_check_and_are_pinned() -> None:
    node, values = _node(Case(aten.bernoulli.p, lambda: (x(), 0.5)))
    assert is_pinned(node) and not _same_bits(_call(node, values), node.meta["val"])


FUNCTIONS = [
    given
    for given in CASES
    if row_of(given.target).kind == "pointwise"
    and sum(isinstance(a, torch.Tensor) for a in given.args()) == 1
]


@pytest.mark.parametrize("given", FUNCTIONS, ids=_name)
def test_what_jumps_is_said_to(given: Case) -> None:
    """On a fine grid, neighbouring results of other functions differ by little, but at poles."""
    grid = torch.arange(-1000, 3001, dtype=torch.float64) / 1000
    result = given.target(grid, *given.args()[1:], **dict(given.kwargs))
    if result.is_floating_point() and result.itemsize > 1:
        differences = result.double().where(result.abs() < 5, torch.nan).diff()
        assert bool((differences.abs() > 0.4).any()) == row_of(given.target).jumps


def test_every_row_with_token_rules_has_a_case() -> None:
    cases = {given.target for given in (*CASES, *COLLECTIVES)}
    known = cases | set(map(name_of, cases))
    rows = {target for target, row in op_table.TABLE.items() if row.rule is not None}
    assert rows - {"prims::fma"} <= known
    assert not FMA or "prims::fma" in known


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten.mul.Tensor, lambda: (x(), x(S, 1)), "some of the token dims"),
        (aten.index.Tensor, lambda: (x(), [ids(E, below=B)]), "picks tokens"),
        (aten.index.Tensor, lambda: (x(S, D), [x(S, D) > 0]), "by a mask"),
        (aten.index_put.default, lambda: (x(), [ids(B, below=B)], x()), "along a token dim"),
        (aten.histc.default, lambda: (x(),), "counts over all"),
        (aten.bernoulli.p, lambda: (x(), 0.5), "random"),
        (aten.add_.Tensor, lambda: (x(), 1), "writes to its operands"),
        (aten.as_strided.default, lambda: (x(), [B], [1]), "addresses memory"),
        (aten.unfold.default, lambda: (x(), 1, 2, 1), "no token rule"),
    ],
)
def test_refusals_say_why(target: Any, args: Any, reason: str) -> None:
    node, values = _node(Case(target, args))
    operand = next(iter(values))
    found = [ops.result_spec(node, operand, (0,)), ops.operand_specs(node, (0, 1))]
    assert any(isinstance(r, Refusal) and reason in r.reason for r in found), found


def test_unknown_ops_are_told_from_known_refusals() -> None:
    node, _ = _node(Case(aten.unfold.default, lambda: (x(), 1, 2, 1)))
    assert isinstance(ops.lookup(node), ops.NoRule)
    node, _ = _node(Case(aten.histc.default, lambda: (x(),)))
    assert isinstance(ops.lookup(node), Refusal) and not isinstance(ops.lookup(node), ops.NoRule)
