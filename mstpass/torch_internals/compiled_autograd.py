"""Whether compiled autograd is on: the backward is then traced and compiled a second time.

Compiled autograd copies the backward graph of a compiled function into a graph of the whole
backward, which Dynamo traces. Dynamo knows no higher-order op of ours, so that graph would break at
each loop, and the loops would run op by op. Source: torch/_dynamo/compiled_autograd.py,
torch/_dynamo/eval_frame.py.
"""

from __future__ import annotations

import torch._dynamo.config as dynamo_config
from torch._dynamo import compiled_autograd

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.config.compiled_autograd",
        "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
        "torch._dynamo.compiled_autograd._enable(compiler_fn)",
    ),
)


def traces_backward_again() -> bool:
    """Whether backwards of what is compiled now may be traced by compiled autograd."""
    return bool(dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def probe() -> None:
    APIS.require()
    before = traces_backward_again()
    with compiled_autograd._enable(lambda gm: gm):
        within = traces_backward_again()
    APIS.expect(within, "compiled_autograd._enable does not set compiled_autograd_enabled")
    APIS.expect(before == traces_backward_again(), "compiled autograd stays on")
