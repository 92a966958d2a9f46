"""Values of a graph that are neither tensors nor sizes, such as the device mesh of a DTensor.

torch calls them *opaque*: a graph passes them on and hands them to ops, but computes nothing with
them. From 2.12 on, a DTensor's mesh is an input of its graph, and ops make process groups from it.
AOTAutograd keeps opaque values that cross to the backward apart from tensors and sizes
(``_categorize_saved_tensors_for_backward`` in torch/_functorch/_aot_autograd/graph_compile.py). In
2.11 only TorchScript objects are opaque.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._library.fake_class_registry import FakeScriptObject

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._library.fake_class_registry.FakeScriptObject",
        "torch._functorch.partitioners",  # its is_opaque_node
    ),
)
_asks_torch: Any = getattr(partitioners, "is_opaque_node", None)  # from 2.12 on


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is opaque, so that it can cross to the backward as it is."""
    value = node.meta.get("val")
    if value is None or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, FakeScriptObject):
        return True
    return bool(_asks_torch(node)) if _asks_torch is not None else False


def probe() -> None:
    APIS.require()
    node = fx.Graph().placeholder("x")
    node.meta["val"] = 3
    APIS.expect(not is_opaque(node), "a number counts as an opaque value")
