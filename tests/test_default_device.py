"""Dynamo traces a default device only where tensors are made, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from mstpass.torch_internals.default_device import default_device

META = torch.device("meta")


def _captured(fn: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, str]]:
    """The calls of the graph that Dynamo captures, each with its result's shape and device."""
    found: list[tuple[str, str]] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            value = node.meta.get("example_value")
            kind = f"{value.shape} {value.device}" if isinstance(value, Tensor) else ""
            found.append((node.format_node() or "", kind))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return found


class _Doubling(TorchFunctionMode):
    """Doubles each sine: a mode of the user's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


def _with_own_device(x: Tensor) -> Tensor:
    made = torch.zeros(4, device="cpu")
    return x + made.to("meta") + torch.full((4,), 2.0, device=None)


def _with_own_mode(x: Tensor) -> Tensor:
    with _Doubling():
        return torch.sin(x) + torch.zeros(4)


def _like(x: Tensor) -> Tensor:
    return x + torch.empty_like(x) + x.new_zeros(4) + torch.ones(4)


_linear = nn.Linear(4, 4, device="meta")


def _module(x: Tensor) -> Tensor:
    return _linear(x).view(4).transpose(0, -1)[1:] * torch.full((3,), 2.0)


@pytest.mark.parametrize("fn", [_with_own_device, _with_own_mode, _like, _module])
def test_the_graph_is_that_of_a_device_as_a_context(fn: Callable[..., Any]) -> None:
    x = torch.ones(4, device="meta")
    with META:
        expected = _captured(fn, x)
    with default_device(META):
        found = _captured(fn, x)
    assert found == expected and any("meta" in kind for _, kind in found)


def test_it_ends() -> None:
    with default_device(META):
        assert torch.zeros(1).device == META
    assert torch.zeros(1).device.type == "cpu"
    with META:  # the user's own is traced as ever
        assert _captured(_module, torch.ones(4))
