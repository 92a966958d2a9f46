"""See every op that runs, below autograd; and tell storages apart.

The linter records a step's ops, the planner counts the storages that an eager step holds. Storages
are told apart by their address, which those of fake tensors have as well (``data_ptr`` is 0 there).
Source: torch/utils/_python_dispatch.py, torch/storage.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["TorchDispatchMode", "storage_key"]

APIS = PrivateApis(
    names=("torch.utils._python_dispatch.TorchDispatchMode", "torch.UntypedStorage._cdata"),
)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for two tensors that share a storage, as long as one of them lives."""
    return storage._cdata


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def probe() -> None:
    APIS.require()
    x = torch.ones(2, requires_grad=True)
    with _Names() as seen:
        x.exp().sum().backward()
    expected = {"aten.exp.default", "aten.sum.default", "aten.mul.Tensor"}
    APIS.expect(expected <= set(seen.names), f"a dispatch mode does not see {expected}")
    keys = [storage_key(t.untyped_storage()) for t in (x, x.view(2, 1), x.clone())]
    APIS.expect(keys[0] == keys[1] != keys[2], "storages cannot be told apart")
