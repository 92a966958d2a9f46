"""Ops of our own, ``torch.ops.mstpass``: a schema, what runs, and what a fake value is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from mstpass.torch_internals.graphs import OpOverload

_LIBRARY = library.Library("mstpass", "FRAGMENT")


def own_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Define an op without a gradient, for every device.

    Args:
        schema: its name, arguments and results.
        fake: what stands for its results while a graph is traced.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"mstpass::{name}", fake, lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.mstpass, name).default
    return op
