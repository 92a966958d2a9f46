"""Values computed from positions: known values and bands against those of the graph itself."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.positions import Band, Pieces, Positions, Unknown, band_of
from mstpass.graph.positions.calls import shape_of
from mstpass.graph.positions.polynomials import Floor, Index, Poly
from tests.checks import examples

Program = Callable[[Tensor], Tensor]  # of a tensor whose sizes are those of the scores


def _traced(program: Program, shape: tuple[int, ...], symbolic: bool = False) -> JointGraph:
    mode = "symbolic" if symbolic else "fake"
    graph = make_fx(lambda x: (program(x),), tracing_mode=mode)(torch.zeros(shape))
    graph.graph.eliminate_dead_code()
    return JointGraph(graph, 1)


def _value(joint: JointGraph) -> Pieces | Unknown:
    return Positions(joint).value(joint.forward_outputs[0])


def _band(program: Program, shape: tuple[int, ...], symbolic: bool = False) -> Band | str:
    """The band of a program's mask, or why there is none."""
    joint = _traced(program, shape, symbolic)
    mask, (scores,) = _value(joint), joint.module.graph.find_nodes(op="placeholder")
    if isinstance(mask, Unknown):
        return mask.reason
    found = value_of(joint.forward_outputs[0])
    assert found is not None
    return band_of(mask, found.dtype, shape_of(scores.meta["val"]))


# ---- masks ---------------------------------------------------------------------------------------
def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])[:, None]


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1])[None, :]


def _packed(x: Tensor, starts: Callable[[Tensor], Tensor] = lambda p: p) -> Tensor:
    """Causal attention within sequences, which begin where positions do not go on."""
    n = x.shape[-1]
    positions = starts(torch.arange(n)[None] + 0).expand(2, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    sequence = (steps != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    query, key = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    causal = torch.ones((), dtype=torch.bool) & (positions[batch, key] <= positions[batch, query])
    return (causal & (sequence[batch, key] == sequence[batch, query])).expand(2, -1, n, n)


def _window(x: Tensor, width: int) -> Tensor:
    return (_columns(x) <= _rows(x)) & (_columns(x) > _rows(x) - width)


def _additive(mask: Tensor, other: float = -math.inf) -> Tensor:
    return torch.where(mask, 0.0, other)


CAUSAL: dict[str, Program] = {
    "comparison": lambda x: _columns(x) <= _rows(x),
    "tril": lambda x: torch.ones(x.shape, dtype=torch.bool).tril(),
    "triu of minus infinity": lambda x: torch.full(x.shape, -math.inf).triu(1),
    "packed": _packed,
    "added": lambda x: _additive(_packed(x)),
    "added, the least number": lambda x: _additive(_packed(x), torch.finfo(torch.float32).min),
    "one less, times the least number": lambda x: (
        (1.0 - torch.ones(x.shape).tril()) * torch.finfo(torch.float32).min
    ),
    "not after": lambda x: ~(_columns(x) > _rows(x)),
    "flipped twice": lambda x: (_columns(x) <= _rows(x)).flip(0).flip(0),
    "counted": lambda x: torch.ones(x.shape[-1]).to(torch.int64).cumsum(0)[None] - 1 <= _rows(x),
    "rows without a key get all": lambda x: (
        (_columns(x) <= _rows(x)) | (_columns(x) > _rows(x)).all(-1, keepdim=True)
    ),
    "a wide window": lambda x: _window(x, 7),
    "chunks as long as the sequence": lambda x: (
        (_columns(x) <= _rows(x)) & (_columns(x) // 9 == _rows(x) // 9)
    ),
}
SHORT = ("a wide window", "chunks as long as the sequence")  # true of short sequences alone
OTHERS: dict[str, tuple[Program, Band | str]] = {
    "all": (lambda x: torch.ones(x.shape, dtype=torch.bool), Band()),
    "all, added": (lambda x: torch.zeros(x.shape[-1]), Band()),
    "positions that cannot be negative": (lambda x: _rows(x) + _columns(x) >= 0, Band()),
    "window": (lambda x: _window(x, 3), Band(2, 0)),
    "both sides": (lambda x: (_rows(x) - _columns(x)).abs() <= 2, Band(2, 2)),
    "strictly before": (lambda x: _columns(x) < _rows(x), Band(None, -1)),
    "one later": (lambda x: _columns(x) <= _rows(x) + 1, Band(None, 1)),
    "transposed": (lambda x: _columns(x) >= _rows(x), Band(0, None)),
    "upside down": (lambda x: (_columns(x) <= _rows(x)).flip(0), "it is no band"),
    "all but one": (lambda x: (_rows(x) != 2) | (_columns(x) != 1), "it is no band"),
    "causal but for one": (
        lambda x: (_columns(x) <= _rows(x)) & ((_rows(x) != 3) | (_columns(x) != 1)),
        "it is no band",
    ),
    "blocks": (lambda x: _rows(x) // 3 == _columns(x) // 3, "it is no band"),
    "nothing": (lambda x: torch.zeros(x.shape, dtype=torch.bool), "it allows no key"),
    "two sequences": (lambda x: _packed(x, lambda p: p % 4), "a sum over elements"),
    "a small number": (lambda x: _additive(_columns(x) <= _rows(x), -10.0), "it adds"),
    "a slope": (lambda x: (_columns(x) - _rows(x)).float(), "it adds"),
    "of data": (lambda x: x > 0, "its values are known when the step runs"),
    "bytes that wrap": (
        lambda x: (_columns(x).byte() - 1 < 200) & (_columns(x) <= _rows(x)),
        "-1 + 1*i1 may be no uint8",
    ),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str, symbolic: bool) -> None:
    found = _band(CAUSAL[name], (7, 7), symbolic)
    assert (found == Band(None, 0)) == (not symbolic or name not in SHORT), found


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, symbolic: bool) -> None:
    program, expected = OTHERS[name]
    found = _band(program, (7, 7), symbolic)
    if isinstance(expected, Band):
        assert found == expected
    else:  # of symbolic sizes less is known, so another reason may come first
        assert isinstance(found, str) and (symbolic or found.startswith(expected)), found


def test_sequence_lengths_that_differ() -> None:
    """The band counts positions from the first query and the first key."""
    assert _band(CAUSAL["comparison"], (5, 9)) == Band(None, 0)
    at_the_end: Program = lambda x: _columns(x) <= _rows(x) + 4
    assert _band(at_the_end, (5, 9)) == Band(None, 4)


def test_data_beside_positions() -> None:
    joint = _traced(lambda x: (x > 0) & (_columns(x) <= _rows(x)), (7, 7))
    found = _value(joint)
    assert isinstance(found, Unknown) and found.from_data
    joint = _traced(lambda x: _columns(x).float().sin() < 0, (7, 7))
    found = _value(joint)
    assert isinstance(found, Unknown) and not found.from_data and found.node == "sin"


# ---- random programs -----------------------------------------------------------------------------
def _step(draw: random.Random, values: list[Tensor], n: int) -> Tensor:
    """One more integer or boolean value, of one or two that there are."""
    a, b = draw.choice(values), draw.choice(values)
    number, dim = draw.randint(-4, 8), draw.randrange(2)
    is_square = a.dim() == 2 and a.shape[0] == n and a.shape[1] == n
    steps: list[Callable[[], Tensor]] = [
        lambda: a + b,
        lambda: a.long() - b.long(),
        lambda: a * draw.choice((-1, 2, 3)),
        lambda: a.long() // draw.choice((2, 3, 5)),
        lambda: a.long() % draw.choice((2, 3, 5)),
        lambda: (a.long() - number).abs(),
        lambda: a.long().clamp(min=0, max=max(number, 0)),
        lambda: torch.minimum(a.long(), b.long()),
        lambda: torch.where(a.bool(), b.long(), number),
        lambda: a <= b,
        lambda: a > b.long() + number,
        lambda: a == b,
        lambda: a != number,
        lambda: a.bool() & b.bool(),
        lambda: a.bool() | b.bool(),
        lambda: ~a.bool(),
        lambda: a.bool() ^ b.bool(),
        lambda: a.float().masked_fill(b.bool(), -math.inf) if a.shape == b.shape else a + 0,
        lambda: a.cumsum(dim % a.dim()),
        lambda: a.bool().any(dim % a.dim(), keepdim=True),
        lambda: a.bool().all(dim % a.dim(), keepdim=True),
        lambda: a.flip(dim % a.dim()),
        lambda: a.T if is_square else a,
        lambda: torch.cat((a[..., :1] - 1 if a.dtype != torch.bool else a[..., :1], a), -1)[
            ..., : a.shape[-1]
        ],
        lambda: torch.nn.functional.pad(a.long(), (1, 0), value=number)[..., :-1],
        lambda: a.expand(n, n).reshape(n * n).view(n, n),
        lambda: a.expand(n, n)[torch.arange(n)[:, None], torch.arange(n)[None] * 0 + n - 1],
        lambda: a.expand(n, n).tril(number - 2),
    ]
    return draw.choice(steps)()


def _program(seed: int) -> Program:
    def program(x: Tensor) -> Tensor:
        draw, n = random.Random(seed), x.shape[0]
        values = [
            torch.arange(n)[:, None],
            torch.arange(n)[None],
            torch.arange(n, dtype=torch.int32),
        ]
        for _ in range(draw.randint(1, 7)):
            new = _step(draw, values, n)
            values.append(new if not new.is_floating_point() else new == 0)
        return (
            values[-1].expand(n, n) & True
            if values[-1].dtype == torch.bool
            else (values[-1].expand(n, n) <= values[0])
        )

    return program


def _number(poly: Poly | float, at: tuple[int, ...], sizes: Mapping[str, int]) -> float:
    """The polynomial's value at one position, for these sizes."""
    if not isinstance(poly, Poly):
        return poly
    total = 0
    for monomial, coefficient in poly.terms:
        for one in monomial:
            if isinstance(one, Floor):
                coefficient *= int(_number(one.numerator, at, sizes)) // one.divisor
            else:
                coefficient *= at[one.dim] if isinstance(one, Index) else sizes[one.name]
        total += coefficient
    return total


def _at(value: Pieces, at: tuple[int, ...], sizes: Mapping[str, int]) -> float:
    """The value at one position, which is in one part alone."""
    (part,) = (part for part in value.parts if all(_number(c, at, sizes) >= 0 for c in part.where))
    return _number(part.number, at, sizes)


def _sizes_that_fit(joint: JointGraph, symbolic: bool) -> list[int]:
    (x,) = joint.module.graph.find_nodes(op="placeholder")
    if not symbolic:
        return [x.meta["val"].shape[0]]
    environment = x.meta["val"].fake_mode.shape_env
    return [
        n
        for n in range(2, 9)
        if environment.evaluate_guards_for_args([x.meta["val"]], [torch.zeros(n, n)])
    ]


def _check(seed: int, symbolic: bool) -> str:
    """Compare one program's known value and band with what its graph computes."""
    joint = _traced(_program(seed), (6, 6), symbolic)
    value = _value(joint)
    if isinstance(value, Unknown):
        assert not value.from_data
        return "unknown"
    (x,) = joint.module.graph.find_nodes(op="placeholder")
    shape = shape_of(x.meta["val"])
    band = band_of(value, torch.bool, shape)
    for n in _sizes_that_fit(joint, symbolic):
        sizes = {str(size): n for size in shape}
        sizes = {name.removeprefix("1*"): n for name in sizes}
        (mask,) = joint.module(torch.zeros(n, n))
        for i, j in itertools.product(range(n), repeat=2):
            assert _at(value, (i, j), sizes) == int(mask[i, j]), (seed, n, i, j)
            if isinstance(band, Band):
                inside = (band.left is None or j >= i - band.left) and (
                    band.right is None or j <= i + band.right
                )
                assert bool(mask[i, j]) == inside, (seed, n, band)
    return "band" if isinstance(band, Band) else "no band"


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_random_programs(seed: int, symbolic: bool) -> None:
    _check(seed, symbolic)
