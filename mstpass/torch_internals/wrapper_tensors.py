"""Tensors without memory: of a subclass that has a shape, a dtype and a device, but no storage.

All ops on them go to the subclass's ``__torch_dispatch__``. Source: torch/csrc/autograd/
python_variable.cpp (``THPVariable_make_wrapper_subclass``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=("torch.Tensor._make_wrapper_subclass",),
)

Subclass = TypeVar("Subclass", bound=torch.Tensor)


def without_storage(
    cls: type[Subclass], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Subclass:
    """A new instance of the subclass that requires no gradient."""
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=dtype, device=device, requires_grad=False
    )
    return made


class _Refusing(torch.Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _Reached


class _Reached(Exception):
    pass


def probe() -> None:
    APIS.require()
    made = without_storage(_Refusing, (2, 3), torch.bfloat16, torch.device("cpu"))
    known = (type(made), tuple(made.shape), made.dtype, made.requires_grad)
    APIS.expect(known == (_Refusing, (2, 3), torch.bfloat16, False), "a wrapper has other metadata")
    try:
        made.sum()
    except _Reached:
        return
    APIS.expect(False, "an op on a wrapper does not reach __torch_dispatch__")
