"""The placeholder of dropped logits can be passed on, and every reader of it gets an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass

LABELS = torch.zeros(3, dtype=torch.long)


@pytest.fixture
def logits() -> Tensor:
    return mstpass.DroppedLogits((3, 5), torch.bfloat16, torch.device("cpu"))


def _saved_and_loaded(logits: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


PASSED_ON: list[Callable[[Tensor], Any]] = [
    lambda x: x.detach(),
    lambda x: x.cpu(),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: x.data,
    copy.copy,
    copy.deepcopy,
    lambda x: pickle.loads(pickle.dumps(x)),
    _saved_and_loaded,
]

READ: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum(),
    lambda x: x[0],
    lambda x: x[:, :-1],
    lambda x: x.view(-1),
    lambda x: x.argmax(-1),
    lambda x: x + 1,
    lambda x: 1 + x,
    lambda x: torch.zeros(3, 5) * x,
    lambda x: torch.cat([x, x]),
    lambda x: torch.empty(3, 5).copy_(x),
    lambda x: x.zero_(),
    lambda x: torch.isnan(x).any(),
    lambda x: F.cross_entropy(x, LABELS),
    lambda x: F.cross_entropy(x.float(), LABELS),
    lambda x: x.requires_grad_().square(),
    lambda x: x.backward(torch.ones(3, 5)),
    lambda x: torch.autograd.grad(x, torch.ones(1, requires_grad=True)),
    lambda x: x.item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.detach().cpu().numpy(),
    numpy.asarray,
    list,
    bool,
    float,
    lambda x: x.data_ptr(),
    lambda x: x == x,
]


@pytest.mark.parametrize("pass_on", PASSED_ON)
def test_it_is_passed_on(pass_on: Callable[[Tensor], Any], logits: Tensor) -> None:
    other = pass_on(logits)
    assert isinstance(other, mstpass.DroppedLogits)
    assert (other.shape, other.dtype) == (logits.shape, logits.dtype)


@pytest.mark.parametrize("read", READ)
def test_it_cannot_be_read(read: Callable[[Tensor], Any], logits: Tensor) -> None:
    with pytest.raises(mstpass.DroppedLogitsError, match='"logits": "keep"'):
        read(logits)


def test_it_is_like_logits(logits: Tensor) -> None:
    assert isinstance(logits, Tensor)
    assert (len(logits), logits.dim(), logits.numel(), logits.size(-1)) == (3, 2, 15, 5)
    assert logits.float().dtype == torch.float32 and not logits.requires_grad
    assert logits.untyped_storage().nbytes() in (0, 30)  # what it would take, but it takes none
    assert "DroppedLogits" in repr(logits) and "[3, 5]" in f"{logits}"


def test_a_compiled_reader_gets_the_error_too(logits: Tensor) -> None:
    step = torch.compile(lambda x: x.float().sum(), backend="eager")
    with pytest.raises(Exception, match=r"logits='drop'|DroppedLogits"):
        step(logits)


def test_a_compiled_function_passes_it_on(logits: Tensor) -> None:
    step = torch.compile(lambda x, y: (x, y + 1), backend="eager")
    same, one = step(logits, torch.zeros(1))
    assert same is logits and one.item() == 1
