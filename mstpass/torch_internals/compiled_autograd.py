"""Whether compiled autograd is on: the backward is then traced and compiled a second time.

Compiled autograd copies the backward graph of a compiled function into a graph of the whole
backward, which Dynamo traces. Dynamo knows no higher-order op of ours, so that graph would break at
each loop, and the loops would run op by op. A graph in which a tensor gets a backward hook has a
further input for the hook, a ``BackwardState``. Its backward is for compiled autograd alone:
Inductor cannot compile it (``count_tangents`` expects the tangents last). Source:
torch/_dynamo/compiled_autograd.py, torch/_dynamo/eval_frame.py, torch/_inductor/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch._dynamo.config as dynamo_config
from torch._dynamo import compiled_autograd
from torch.fx.experimental._backward_state import BackwardState

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.config.compiled_autograd",
        "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
        "torch._dynamo.compiled_autograd._enable(compiler_fn)",
        "torch.fx.experimental._backward_state.BackwardState",
    ),
)


def traces_backward_again() -> bool:
    """Whether backwards of what is compiled now may be traced by compiled autograd."""
    return bool(dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def has_backward_hooks(inputs: Iterable[object]) -> bool:
    """Whether the backward of the graph with these inputs is for compiled autograd alone."""
    return any(isinstance(value, BackwardState) for value in inputs)


def probe() -> None:
    APIS.require()
    before = traces_backward_again()
    with compiled_autograd._enable(lambda gm: gm):
        within = traces_backward_again()
    APIS.expect(within, "compiled_autograd._enable does not set compiled_autograd_enabled")
    hooks = has_backward_hooks([1, BackwardState()]) and not has_backward_hooks([1])
    APIS.expect(hooks, "a BackwardState is not told from other inputs")
    APIS.expect(before == traces_backward_again(), "compiled autograd stays on")
