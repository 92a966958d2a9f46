"""Compile a graph with Inductor, with passes at its hooks.

``compile_fx`` runs AOTAutograd and Inductor on a graph of Dynamo's. ``config_patches`` hold until
the backward is compiled, which may be later. The hooks that mstpass sets there, in the order in
which they are called:

- ``custom_partitioner_fn``: gets the joint graph, returns forward and backward;
- ``post_grad_custom_pre_pass``, ``post_grad_custom_post_pass``: before and after Inductor's own
  rewrites of forward and backward;
- ``_pre_fusion_custom_pass``, ``_post_fusion_custom_pass``: get the scheduler's kernels before and
  after fusion.

The ``uuid()`` of each is a part of the keys of the compile caches. None keeps a graph out of them,
but only that of the post-grad passes: of the others, None is a key like any other one.
Source: torch/_inductor/compile_fx.py, custom_graph_pass.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # torch 2.11 wants a graph pass before fusion, and takes any function after it
    CustomSchedulerPass = CustomGraphPass  # type: ignore[assignment, misc]

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "CustomSchedulerPass",
    "boxed",
    "compile_fx",
    "key_of",
]

APIS = PrivateApis(
    names=(
        "torch._inductor.compile_fx.compile_fx(inner_compile, config_patches)",
        "torch._inductor.custom_graph_pass.CustomGraphPass.uuid",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn.uuid",
        "torch._inductor.custom_graph_pass.CustomSchedulerPass"
        " | torch._inductor.config._post_fusion_custom_pass",  # not in 2.11
        "torch._inductor.config.custom_partitioner_fn",
        "torch._inductor.config.post_grad_custom_pre_pass",
        "torch._inductor.config.post_grad_custom_post_pass",
        "torch._inductor.config._pre_fusion_custom_pass",
        "torch._inductor.config._post_fusion_custom_pass",
    ),
)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled graph that takes a list and empties it, marked so for AOTAutograd."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def key_of(users_pass: Any) -> Any:
    """The ``uuid`` of a pass of ours that runs the user's pass too; None if theirs has none.

    Our sources are in the keys of other hooks.
    """
    if users_pass is None:
        return "mstpass"
    uuid = getattr(users_pass, "uuid", None)
    theirs = uuid() if uuid is not None else None
    return None if theirs is None else f"mstpass-{theirs}"


class _Reached(Exception):
    pass


class _Partitioner(CustomPartitionerFn):
    """Keeps what it is called with, and ends the compilation."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.given: set[str] = set()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
        self.inputs = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        self.given = set(given)
        raise _Reached

    def uuid(self) -> Any:
        return None


def probe() -> None:
    APIS.require()
    partitioner = _Partitioner()
    weight = torch.ones(2, requires_grad=True)
    module = fx.symbolic_trace(lambda x: (x.sin().sum(),))
    with contextlib.suppress(Exception):  # whatever torch makes of _Reached
        compile_fx(module, [weight], config_patches={"custom_partitioner_fn": partitioner})
    inputs = ["primals_1", "tangents_1"]
    APIS.expect(bool(partitioner.inputs), "custom_partitioner_fn is not called by compile_fx")
    APIS.expect(partitioner.inputs == inputs, f"the joint graph's inputs are not named {inputs}")
    given = {"num_fwd_outputs", "static_lifetime_input_indices"}
    APIS.expect(given <= partitioner.given, f"a partitioner is not given {sorted(given)}")
