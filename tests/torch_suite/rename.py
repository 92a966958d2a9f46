"""Put mst in the place of Inductor and of torch's partitioner, for code that names those.

- Every way to Inductor calls ``torch._inductor.compile_fx.compile_fx``: ``torch.compile`` with its
  default backend or ``backend="inductor"``, Dynamo's registry, and tests that call it themselves.
- ``aot_eager`` and its relatives run the graphs without a compiler. They get mst's partitioner, as
  do tests that pass ``min_cut_rematerialization_partition`` to AOTAutograd.

mst runs with ``strict=True``, so that a failure of its own is one of the test.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import partitioners

from mstpass.backend import mst
from mstpass.inductor_hooks import Partitioner
from mstpass.options import Options

compile_module = importlib.import_module("torch._inductor.compile_fx")  # a function hides its name

_OF_ITSELF = {"inner_compile", "decompositions", "ignore_shape_env"}  # of Inductor's own calls
_EAGER = ("aot_eager", "aot_eager_decomp_partition")


class Calls:
    """How often mst was called: a test that never calls it says nothing about it."""

    def __init__(self) -> None:
        self.count = 0


def rename(calls: Calls) -> None:
    """Rename the backends for the rest of this process."""
    original = compile_module.compile_fx

    @functools.wraps(original)
    def compile_fx(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        patches = kwargs.get("config_patches") or {}
        if args or _OF_ITSELF & set(kwargs) or "custom_partitioner_fn" in patches:
            return original(gm, example_inputs, *args, **kwargs)
        calls.count += 1
        return mst(gm, example_inputs, options={"strict": True, "inductor": dict(patches)})

    def partition(gm: Any, joint_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        kwargs.pop("compiler", None)
        return Partitioner(Options(strict=True))(gm, joint_inputs, **kwargs)

    replace(original, compile_fx)
    replace(partitioners.min_cut_rematerialization_partition, partition)
    for name in _EAGER:
        registry.lookup_backend(name)  # loads it
        registry._COMPILER_FNS[name] = _eager(partition, decompose=name != "aot_eager")


def replace(old: object, new: object) -> None:
    """Replace what torch's modules have imported; those of mstpass keep the original."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "functorch"):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _eager(partition: Callable[..., Any], decompose: bool) -> Callable[..., Any]:
    """A backend that runs the forward and the backward graph as they are."""

    def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        table = torch._inductor.decomposition.select_decomp_table() if decompose else None
        compiled = aot_autograd(
            fw_compiler=boxed_nop,
            decompositions=table,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        return compiled(gm, example_inputs, **kwargs)

    return backend
