"""Modules have the names that ``named_modules()`` of the user's model gives them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from mstpass.graph.node_meta import module_path
from tests.models import Block, GatedMLP

D = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(D, GatedMLP(D, 2 * D, "silu")) for _ in range(2))
        self.head = nn.Linear(D, 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


def _paths(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    """The paths of the modules in all graphs of a compiled function."""
    found: set[str] = set()

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
        found.update(map(module_path, stacks))
        return gm.forward

    torch.compile(fn, backend=backend)(*args, **kwargs)
    return found - {""}


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules() if name}


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


class _Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, x: Tensor) -> Tensor:
        return _loss(self.model, x)


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(functools.partial(self.inner.__call__), x, use_reentrant=False)


def test_however_the_model_is_reached() -> None:
    x = torch.randn(3, D)
    model = Model()
    names = _names(model)
    leaves = {name for name in names if "norm" not in name and name.count(".") > 2}
    for step in (
        model,
        lambda x: model(x),
        functools.partial(_loss, model),
        functools.partial(functools.partial(_loss, model)),
        model.forward,
        functools.partial(model),
    ):
        torch.compiler.reset()
        found = _paths(step, x)
        assert leaves <= found <= names, step
    torch.compiler.reset()
    assert leaves <= _paths(functools.partial(_loss, model=model), x=x) <= names
    torch.compiler.reset()
    assert leaves <= _paths(_loss, model, x) <= names
    torch.compiler.reset()
    held = {f"model.{name}" for name in names}
    assert _paths(_Trainer(model).loss, x) <= {"model", *held}


def test_wrappers_have_no_part_in_a_path() -> None:
    model = Model()
    names = _names(model)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1].mlp = torch.compile(model.layers[1].mlp)  # type: ignore[assignment]
    found = _paths(model, torch.randn(3, D))
    assert {"layers.0.mlp.up", "layers.1.mlp.up"} <= found <= names


def test_checkpointed_by_a_partial() -> None:
    model = _Checkpointed(Model())
    found = _paths(model, torch.randn(3, D))
    assert "inner.layers.1.mlp.up" in found and found <= _names(model)


def test_a_sequential_has_a_name() -> None:
    x = torch.randn(3, D)
    layers = nn.Sequential(nn.Linear(D, D), GatedMLP(D, D, "silu"))
    assert "Sequential.1.up" in _paths(layers, x)
    torch.compiler.reset()
    assert "layers.1.up" in _paths(lambda x: layers(x), x)


@contextmanager
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's, on FSDP2's hooks
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_under_ddp_and_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(3, D)
    names = _names(Model())
    of_layer = {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}
    with _one_process():
        assert "layers.0.mlp.up" in (found := _paths(DistributedDataParallel(Model()), x))
        assert found <= names
        torch.compiler.reset()
        model = Model()
        for layer in model.layers:
            fully_shard(layer)
        found = _paths(fully_shard(model), x)
        assert "mlp.up" in {re.sub(r"^layers\.\d+\.", "", path) for path in found}
        assert found <= names | of_layer


EXPRESSIONS = {
    "L['self'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].layers.0": (
        "base_model.model.layers.0"
    ),
    "L['self'].layers._modules['0']._orig_mod._checkpoint_wrapped_module.mlp": "layers.0.mlp",
    "object.__getattribute__(getattr(L['self'], 'up-proj'), '_modules')['x']": "up-proj.x",
    "dict.__getitem__(L['self'].heads, 'small').proj": "heads.small.proj",
    "list(dict.values(L['self'].heads))[1]": "heads.1",
    "L['self'].func.mlp": "func.mlp",
    "layers.0.mlp": "layers.0.mlp",
    "": "",
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions(expression: str) -> None:
    stack = {"a": ("L['self']", Model), "b": (expression, nn.Linear)}
    assert module_path(stack) == EXPRESSIONS[expression]


def test_holders_are_those_of_the_outermost_module() -> None:
    holders = ("L['f'].args[0]", "L['f'].func.__self__", "L['f'].__closure__[0].cell_contents")
    variables = ("L['model']", "G['model']", "G['__import_a_dot_b'].model", "L['args'][0]")
    for holder, path in itertools.product((*holders, *variables), (".head", ".layers.0.mlp")):
        stack = {"a": (holder, Model), "b": (holder + path, nn.Module)}
        assert module_path(stack) == path[1:], holder
    assert module_path({"a": ("G['head']", nn.Linear)}) == "head"
    assert module_path({"a": ("L['head']", nn.Linear)}) == ""
    assert module_path({}) == module_path(None) == ""
