"""Token dims through views, checked against what a view really does to indices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstpass.graph.tokens import WHOLE, Refusal, chunk_shape, through_view


@pytest.mark.parametrize(
    ("source", "target", "spec", "expected"),
    [
        ((2, 3, 8), (6, 8), (0, 1), (0,)),
        ((6, 8), (2, 3, 8), (0,), (0, 1)),
        ((1, 6, 8), (6, 8), (1,), (0,)),
        ((6, 8), (6, 2, 4), (0,), (0,)),
        ((2, 3, 2, 4), (6, 8), (0, 1), (0,)),
        ((8, 6), (8, 2, 3), (1,), (1, 2)),
        ((6, 8), (6, 8, 1), (0,), (0,)),
        ((2, 3, 8), (2, 3, 8), WHOLE, WHOLE),
    ],
)
def test_views(source, target, spec, expected) -> None:
    assert through_view(source, target, spec) == expected


@pytest.mark.parametrize(
    ("source", "target", "spec"),
    [((6, 8), (48,), (0,)), ((6, 8), (3, 16), (0,)), ((2, 3, 8), (2, 24), (0, 1))],
)
def test_views_that_mix_tokens_are_refused(source, target, spec) -> None:
    assert isinstance(through_view(source, target, spec), Refusal)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    cuts=st.lists(st.booleans(), min_size=4, max_size=4),
    first=st.integers(0, 3),
    count=st.integers(1, 2),
)
@settings(max_examples=300, deadline=None)
def test_a_mapped_view_keeps_each_element_with_its_token(sizes, cuts, first, count) -> None:
    """Number the tokens, view, and read the number back at the mapped dims."""
    source = list(sizes)
    target = [source[0]]
    for size, merge in zip(source[1:], cuts, strict=False):
        if merge:
            target[-1] *= size
        else:
            target.append(size)
    first = min(first, len(source) - 1)
    spec = tuple(d for d in range(first, min(first + count, len(source))) if source[d] != 1)
    result = through_view(source, target, spec)
    if isinstance(result, Refusal):
        return
    shape = [source[d] if d in spec else 1 for d in range(len(source))]
    tokens = torch.arange(math.prod(shape)).view(shape).expand(source).contiguous().view(target)
    expected = [target[d] if d in result else 1 for d in range(len(target))]
    again = torch.arange(math.prod(expected)).view(expected).expand(target)
    assert torch.equal(tokens, again)


def test_chunk_form() -> None:
    assert chunk_shape((2, 3, 8), (0, 1), 4) == [1, 4, 8]
    assert chunk_shape((8, 6), (1,), 4) == [8, 4]
    assert chunk_shape((8,), WHOLE, 4) == [8]
