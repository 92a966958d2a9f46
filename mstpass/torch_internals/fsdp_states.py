"""What FSDP2 keeps of the modules that it wraps: their tensors, and the state of its hooks.

``fully_shard`` puts hooks around a module. They gather the module's weights from shards that FSDP2
keeps beside the module, and note in objects of their own what is gathered and what comes next. A
trace that runs the hooks on fake tensors needs fakes of those shards, or one rank alone would
gather real ones. Afterwards the objects say that weights are gathered, which are fake; they must be
restored, or the next real step would fail.

Source: torch/distributed/fsdp/_fully_shard (``FSDPState``, ``FSDPParamGroup``, ``FSDPParam``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mstpass.torch_internals.private_apis import PrivateApis

_PACKAGE = "torch.distributed.fsdp._fully_shard"
APIS = PrivateApis(
    names=(
        ("torch.distributed.fsdp.FSDPModule._get_fsdp_state",)
        if torch.distributed.is_available()
        else ()
    ),
)


def containers(modules: Iterable[nn.Module]) -> list[Any]:
    """The attributes of FSDP2's objects of these modules, and the lists, dicts and sets in them."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    attributes = [vars(own) for own in _objects(states)]
    return attributes + [v for own in attributes for v in own.values() if _is_container(v)]


@contextmanager
def contents_kept(containers: Iterable[Any]) -> Iterator[None]:
    """Restore afterwards what is in these lists, dicts and sets."""
    kept = [(container, container.copy()) for container in containers]
    try:
        yield
    finally:
        for container, before in kept:
            container.clear()
            container.extend(before) if isinstance(before, list) else container.update(before)


def _objects(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects of FSDP2 that can be reached from the roots through their attributes."""
    stack, seen = list(roots), set()
    while stack:
        value = stack.pop()
        if _is_container(value) or isinstance(value, tuple):
            stack += value.values() if isinstance(value, dict) else value
        elif id(value) not in seen and _is_of_fsdp(value):
            seen.add(id(value))
            yield value
            stack += vars(value).values()


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


def _is_of_fsdp(value: Any) -> bool:
    kind = type(value)
    is_state = kind.__module__.startswith(_PACKAGE) and not issubclass(kind, nn.Module | enum.Enum)
    return is_state and hasattr(value, "__dict__")


def probe() -> None:
    """That a step is right after a trace is tested: tests/test_fsdp.py."""
    APIS.require()
