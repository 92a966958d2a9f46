"""Masks that follow from positions: bands that are found against those of the graph itself."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph import tiles
from mstpass.graph.bands import Band, band_of
from mstpass.graph.joint import JointGraph
from mstpass.torch_internals.batch_sizes import at_sizes
from tests.checks import examples

Program = Callable[[Tensor], Tensor]  # of a tensor whose sizes are those of the scores


def _traced(program: Program, shape: tuple[int, ...], symbolic: bool = False) -> JointGraph:
    mode = "symbolic" if symbolic else "real"
    trace = make_fx(lambda x: (program(x),), select_decomp_table(), tracing_mode=mode)
    with contextlib.nullcontext() if symbolic else FakeTensorMode():
        graph = trace(torch.zeros(shape))
    graph.graph.eliminate_dead_code()
    return JointGraph(graph, 1)


def _band(program: Program, shape: tuple[int, ...], symbolic: bool = False) -> Band | str:
    """The band of a program's mask, or why there is none."""
    return _band_in(_traced(program, shape, symbolic))


def _band_in(joint: JointGraph, other: Tensor | None = None) -> Band | str:
    """With symbolic sizes, of all batches that are at most as large as the traced one."""
    (scores,) = joint.module.graph.find_nodes(op="placeholder")
    x = scores.meta["val"]
    sizes = {n.node.expr: n.node.hint for n in x.shape if isinstance(n, torch.SymInt)}
    bounded = at_sizes(x.fake_mode.shape_env, sizes, sizes) if sizes else contextlib.nullcontext()
    with bounded:
        query = x if other is None else other
        return band_of(joint, joint.forward_outputs[0], query, query.transpose(-1, -2))


@pytest.fixture(params=["whole", "in tiles"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of few elements, computed as they are and as large ones are."""
    if request.param == "in tiles":
        monkeypatch.setattr(tiles, "_SMALL", 20)
        monkeypatch.setattr(tiles, "_PARTS", 2)


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
NO_BAND, DATA = "it is no band", ""
# What is read in another order, or summed, must be small, and its sizes must not vary.
OF_SMALL = ("flipped twice", "rows without a key get all")
OTHERS: dict[str, tuple[Program, Band | str]] = {
    "all": (lambda x: torch.ones(x.shape, dtype=torch.bool), Band()),
    "all, of one number": (lambda x: torch.ones((), dtype=torch.bool).expand(x.shape), Band()),
    "all, added": (lambda x: torch.zeros(x.shape[-1]), Band()),
    "positions that cannot be negative": (lambda x: _rows(x) + _columns(x) >= 0, Band()),
    "window": (lambda x: _window(x, 3), Band(2, 0)),
    "both sides": (lambda x: (_rows(x) - _columns(x)).abs() <= 2, Band(2, 2)),
    "strictly before": (lambda x: _columns(x) < _rows(x), Band(None, -1)),
    "one later": (lambda x: _columns(x) <= _rows(x) + 1, Band(None, 1)),
    "transposed": (lambda x: _columns(x) >= _rows(x), Band(0, None)),
    "upside down": (lambda x: (_columns(x) <= _rows(x)).flip(0), NO_BAND),
    "all but one": (lambda x: (_rows(x) != 2) | (_columns(x) != 1), NO_BAND),
    "causal but for one": (
        lambda x: (_columns(x) <= _rows(x)) & ((_rows(x) != 3) | (_columns(x) != 1)),
        NO_BAND,
    ),
    "blocks": (lambda x: _rows(x) // 3 == _columns(x) // 3, NO_BAND),
    "nothing": (lambda x: torch.zeros(x.shape, dtype=torch.bool), NO_BAND),
    "two sequences": (lambda x: _packed(x, lambda p: p % 4), NO_BAND),
    "a small number": (lambda x: _additive(_columns(x) <= _rows(x), -10.0), NO_BAND),
    "a slope": (lambda x: (_columns(x) - _rows(x)).float(), NO_BAND),
    "a wave": (lambda x: _columns(x).float().sin() < 0, NO_BAND),
    "not a number": (lambda x: _additive(_columns(x) <= _rows(x), math.nan), "no number"),
    "bytes that wrap": (
        lambda x: (_columns(x).byte() - 1 < 200) & (_columns(x) <= _rows(x)),
        NO_BAND,
    ),
    "a product of positions": (lambda x: _rows(x) * _columns(x) >= 0, Band()),
    "a product that wraps": (lambda x: (_rows(x) - 3) * (_columns(x) - 3) * 2**62 <= 0, NO_BAND),
    "squares": (lambda x: (_rows(x) - _columns(x)) ** 2 >= 1, NO_BAND),
    "of data": (lambda x: x > 0, DATA),
    "of data and positions": (lambda x: (x > 0) & (_columns(x) <= _rows(x)), DATA),
    "of random numbers": (lambda x: torch.rand(x.shape) < 2, DATA),
    "of the length": (lambda x: _columns(x) <= _rows(x) + x.shape[0] - 7, Band(None, 0)),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str, symbolic: bool) -> None:
    found = _band(CAUSAL[name], (7, 7), symbolic)
    in_tiles = tiles._SMALL < 49
    assert (found == Band(None, 0)) == (name not in OF_SMALL or not (symbolic or in_tiles)), found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    program, expected = OTHERS[name]
    found = _band(program, (7, 7))
    if isinstance(expected, Band):
        assert found == expected
    else:  # of large values less is known, so another reason may come first
        is_reason = isinstance(found, str) and bool(found) == bool(expected)
        assert is_reason and (tiles._SMALL < 49 or expected in found), found


def test_a_number_that_varies() -> None:
    """A mask of fixed sizes may depend on the length of something else."""

    def program(x: Tensor) -> Tensor:
        places = torch.arange(9)
        return (places[None] <= places[:, None]) & (places < x.shape[0] + 2)

    joint = _traced(program, (7, 7), symbolic=True)
    assert "other sizes" in _band_in(joint, torch.zeros(9, 9))


def test_sequence_lengths_that_differ() -> None:
    """The band counts positions from the first query and the first key."""
    assert _band(CAUSAL["comparison"], (5, 9)) == Band(None, 0)
    at_the_end: Program = lambda x: _columns(x) <= _rows(x) + 4
    assert _band(at_the_end, (5, 9)) == Band(None, 4)


def test_symbolic_sizes() -> None:
    """They need a bound, and a mask that says at the largest what it is at smaller ones."""
    for name, (program, expected) in OTHERS.items():
        if name == "of the length":
            assert "other sizes" in _band(program, (7, 7), symbolic=True), name
        elif isinstance(expected, Band):
            assert _band(program, (7, 7), symbolic=True) == expected, name
    joint = _traced(CAUSAL["comparison"], (7, 7), symbolic=True)
    (x,) = joint.module.graph.find_nodes(op="placeholder")
    scores = x.meta["val"]
    assert "sizes" in band_of(joint, joint.forward_outputs[0], scores, scores.transpose(-1, -2))


@pytest.mark.parametrize("kind", ["causal", "a window", "two windows"])
def test_a_mask_of_many_elements(kind: str) -> None:
    """4 * 10^9 of them: what is computed is a small part of it."""
    programs: dict[str, Program] = {
        "causal": lambda x: _additive(_packed(x)),
        "a window": lambda x: _window(x, 1000),
        "two windows": lambda x: torch.where(_rows(x) == 50_000, _window(x, 999), _window(x, 1000)),
    }
    expected = {"causal": Band(None, 0), "a window": Band(999, 0)}
    start = time.process_time()
    found = _band(programs[kind], (2**16, 2**16))
    assert found == expected.get(kind, "it is no band around the diagonal")
    assert time.process_time() - start < 10


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


def _sizes_that_fit(joint: JointGraph, symbolic: bool) -> list[int]:
    (x,) = joint.module.graph.find_nodes(op="placeholder")
    if not symbolic:
        return [x.meta["val"].shape[0]]
    environment = x.meta["val"].fake_mode.shape_env
    return [
        n
        for n in range(2, 7)
        if environment.evaluate_guards_for_args([x.meta["val"]], [torch.zeros(n, n)])
    ]


def _is(mask: Tensor, band: Band) -> bool:
    offset = _columns(mask) - _rows(mask)
    left, right = band.left, band.right
    inside = (left is None or offset >= -left) & (right is None or offset <= right)
    return bool((mask == inside).all())


def _check(seed: int, symbolic: bool) -> None:
    """Compare one program's band with what its graph computes."""
    joint = _traced(_program(seed), (6, 6), symbolic)
    for small in (2**20, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "_SMALL", small)
            patch.setattr(tiles, "_PARTS", 2)
            band = _band_in(joint)
        assert band, "it does not depend on data"
        masks = [joint.module(torch.zeros(n, n))[0] for n in _sizes_that_fit(joint, symbolic)]
        if isinstance(band, Band):
            assert all(_is(mask, band) for mask in masks), (seed, band)
        elif small > 36 and not symbolic:
            bands = [
                Band(left, right)
                for left in (None, *range(-5, 6))
                for right in (None, *range(-5, 6))
            ]
            assert not masks[0].any() or not any(_is(masks[0], one) for one in bands), (seed, band)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_random_programs(seed: int, symbolic: bool) -> None:
    _check(seed, symbolic)
