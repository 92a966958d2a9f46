"""The joint graph of a function, traced as for a compilation and not compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from mstpass.backend import prepare
from mstpass.extras import UserError

T = TypeVar("T")


def at_joint(
    fn: Callable[..., Any], inputs: Sequence[Tensor], take: Callable[[fx.GraphModule, int], T]
) -> T:
    """What ``take`` makes of a function's joint graph and its number of forward outputs.

    The function is traced but not compiled.
    """
    found: list[T] = []

    class Take(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            prepare(gm)
            found.append(take(gm, kwargs["num_fwd_outputs"]))
            raise _Taken

        def uuid(self) -> Any:
            return None

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        patches = {"custom_partitioner_fn": Take(), "fx_graph_cache": False}
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not found:
            raise
    torch._dynamo.reset()
    if not found:
        raise UserError("the function has no backward: nothing to plan")
    return found[0]


class _Taken(Exception):
    pass
