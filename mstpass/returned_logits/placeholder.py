"""The tensor that a step returns in the place of its logits: a shape, a dtype, a device, no memory.

It can be passed on, moved, cast, detached, copied and pickled, as wrappers of modules do to all
outputs. Whatever needs a value of it raises `DroppedLogitsError`: there is none, and no NaN either.
It requires no gradient, so that nothing can be differentiated through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mstpass.torch_internals.fake_tensors import without_storage

aten = torch.ops.aten

# What makes no other values, as far as one can tell without any.
CASTS = (aten._to_copy.default,)
SAME = (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default)

_MESSAGE = (
    "{op} reads logits that the compiled step has not kept: under logits='drop' a step that "
    "returns its logits beside their loss returns a placeholder for them. Take what you need from "
    "the loss, compute it inside of the compiled step, or keep the logits: "
    'options={{"logits": "keep"}}, or mstpass.compile(model, logits="keep"). Under torch.no_grad() '
    "they are always kept"
)


class DroppedLogitsError(RuntimeError):
    """A value of logits is read that a step under ``logits="drop"`` has not kept."""


class DroppedLogits(torch.Tensor):
    """Stands for the logits of a step that has not kept them."""

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return without_storage(cls, shape, dtype, device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:  # kernels would read at address 0
            raise DroppedLogitsError(_MESSAGE.format(op=_name(func)))
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except DroppedLogitsError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # .numpy(), float(...)
            raise DroppedLogitsError(_MESSAGE.format(op=_name(func))) from error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        source = args[0] if args else None
        if isinstance(source, DroppedLogits) and func in (*SAME, *CASTS):
            given = kwargs or {}
            dtype, device = given.get("dtype"), given.get("device")
            return DroppedLogits(
                source.shape,
                source.dtype if dtype is None else dtype,
                source.device if device is None else torch.device(device),
            )
        raise DroppedLogitsError(_MESSAGE.format(op=func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"DroppedLogits(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}': "
            "not kept, because of logits='drop')"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DroppedLogits, (tuple(self.shape), self.dtype, self.device)

    def __deepcopy__(self, memo: Any) -> DroppedLogits:
        return self.clone()  # type: ignore[return-value]


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)
