"""Compile a graph with Inductor and nothing else, and what its modes set.

This file imports only ``torch``, so that it is there where other files of this package lack a name.
Source: torch/_inductor/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def by_inductor_alone(
    gm: fx.GraphModule, example_inputs: Sequence[Any], users: Mapping[str, Any]
) -> Callable[..., Any]:
    """What ``torch.compile`` makes of a graph under the user's settings of Inductor."""
    compiled: Any = torch._inductor.compile(gm, list(example_inputs), options=dict(users))
    return compiled


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """Inductor's settings under a ``mode`` of ``torch.compile``."""
    return {} if mode in (None, "default") else dict(torch._inductor.list_mode_options(mode))
