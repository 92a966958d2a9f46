"""What torch's partitioner does besides choosing what is saved, and the partitioner itself.

mstpass chooses the saved values, and has torch build the forward and the backward graph around
them. Graphs that it does not split go to torch's partitioner. Source:
torch/_functorch/partitioners.py, compile_utils.py; torch/fx/traceback.py.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.private_apis import PrivateApis
from mstpass.torch_internals.settings import merges_equal_nodes

__all__ = [
    "extract_forward_and_backward",
    "finish_forward_and_backward",
    "has_torch_budget",
    "is_write_of_backward",
    "merge_equal_nodes",
    "min_cut_rematerialization_partition",
    "saved_by_torch",
]

APIS = PrivateApis(
    names=(
        "torch._functorch.partitioners.min_cut_rematerialization_partition"
        "(num_fwd_outputs, static_lifetime_input_indices)",
        "torch._functorch.partitioners._extract_fwd_bwd_modules"
        "(saved_sym_nodes, num_fwd_outputs, static_lifetime_input_nodes)",
        "torch._functorch.partitioners._must_be_in_backward(node)",
        "torch._functorch.partitioners.thread_graphsafe_rng_from_hops(is_backward)",
        "torch._functorch.compile_utils.fx_graph_cse",
        "torch._functorch.compile_utils.raise_getitems",
        "torch.utils._ordered_set.OrderedSet",
    ),
)
_TAKES_OPAQUE_NODES = (  # from 2.12 on
    "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
)

Modules = tuple[fx.GraphModule, fx.GraphModule]


def merge_equal_nodes(gm: fx.GraphModule) -> None:
    """Remove dead code and common subexpressions of a joint graph, as torch's partitioner does."""
    gm.graph.eliminate_dead_code()
    if merges_equal_nodes():
        gm.graph = fx_graph_cse(gm.graph)
    gm.recompile()


def extract_forward_and_backward(
    gm: fx.GraphModule,
    saved: list[fx.Node],
    saved_sizes: list[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Iterable[fx.Node],
    saved_opaque: Iterable[fx.Node] = (),
) -> Modules:
    """The two graphs of a joint graph.

    Args:
        saved: what forward returns for backward, in this order; inputs of the step among it.
        static_inputs: inputs that stay at their addresses from step to step, as parameters do.
        saved_opaque: values that backward reads and that are neither tensors nor sizes, such as
            device meshes (opaque_values.py).
    """
    opaque: dict[str, Any] = {}
    if _TAKES_OPAQUE_NODES:
        opaque["saved_opaque_nodes"] = list(saved_opaque)
    else:
        saved = [*saved, *saved_opaque]
    return partitioners._extract_fwd_bwd_modules(
        gm,
        saved,
        saved_sym_nodes=saved_sizes,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static_inputs),
        **opaque,
    )


def finish_forward_and_backward(forward: fx.GraphModule, backward: fx.GraphModule) -> Modules:
    """Take results of calls right after them, and hand on the state of random draws."""
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def saved_by_torch(
    gm: fx.GraphModule, num_fwd_outputs: int, static_inputs: list[int] | None = None
) -> list[str]:
    """The names of what torch's partitioner would save, sizes and inputs of the step among it.

    The graph is changed as that partitioner changes it, so give a copy; equal nodes are merged.

    Args:
        static_inputs: the positions of inputs that stay at their addresses from step to step.

    Raises:
        Exception: the partitioner fails on this graph.
    """
    try:
        forward, _ = _choosing_alone()(
            gm, None, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_inputs
        )
    except _Chosen as chosen:
        return chosen.names
    # A backward that needs no tangent is left to another partitioner, which builds the graphs.
    outputs: Any = forward.graph.output_node().args[0]
    return [node.name for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node)]


class _Chosen(Exception):
    """torch's partitioner has chosen what to save."""

    def __init__(self, names: list[str]):
        super().__init__(names)
        self.names = names


def _choosing_alone() -> Callable[..., Modules]:
    """torch's partitioner up to its choice, with which it raises ``_Chosen``.

    To build the two graphs takes longer than to choose. It is the same code with other globals, so
    that a partition in another thread is not disturbed. It merges no nodes again, and asks no other
    rank: not every rank may come here.
    """

    def chosen(_: Any, saved: list[fx.Node], *args: Any, **kwargs: Any) -> NoReturn:
        opaque = kwargs.get("saved_opaque_nodes") or []
        nodes = [*saved, *opaque, *(kwargs.get("saved_sym_nodes") or [])]
        raise _Chosen([node.name for node in nodes])

    function = min_cut_rematerialization_partition
    replaced = {
        "_extract_fwd_bwd_modules": chosen,
        "_sync_decision_cross_ranks": lambda graph, saved, *args, **kwargs: saved,
        "fx_graph_cse": lambda graph, *args, **kwargs: graph,
    }
    copy = types.FunctionType(function.__code__, {**function.__globals__, **replaced})
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__defaults__ = function.__defaults__
    return copy


def is_write_of_backward(node: fx.Node) -> bool:
    """Whether an op that writes to its operands was traced in the backward and must run there."""
    return bool(partitioners._must_be_in_backward(node))


def has_torch_budget(nodes: Iterable[fx.Node]) -> bool:
    """Whether a node is under ``torch.autograd.graph.region_activation_memory_budget``.

    torch has that context manager from 2.13 on.
    """
    budget_of = getattr(fx.traceback, "_get_memory_budget_annotation", lambda _: None)
    return any(budget_of(node) is not None for node in nodes)


def probe() -> None:
    APIS.require()
    has_context = hasattr(torch.autograd.graph, "region_activation_memory_budget")
    has_reader = hasattr(fx.traceback, "_get_memory_budget_annotation")
    APIS.expect(
        has_reader or not has_context, "torch.fx.traceback._get_memory_budget_annotation is missing"
    )
    gm = _joint_graph()
    merge_equal_nodes(gm)
    sines = [node for node in gm.graph.nodes if node.target is torch.ops.aten.sin.default]
    APIS.expect(len(sines) == 1, "fx_graph_cse does not merge equal nodes")
    modules = extract_forward_and_backward(gm, sines, [], 1, [])
    forward, backward = finish_forward_and_backward(*modules)
    returned: list[Any] = [node.target for node in forward.graph.output_node().all_input_nodes]
    ops = [torch.ops.aten.exp.default, torch.ops.aten.sin.default]
    APIS.expect(returned == ops, "_extract_fwd_bwd_modules: forward returns other values")
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    names = [sines[0].name, "tangents_1"]
    write = forward.graph.call_function(torch.ops.aten.copy_.default)
    APIS.expect(not is_write_of_backward(write), "_must_be_in_backward: a write of the forward")
    write.meta["partitioner_tag"] = "must_be_in_backward"
    APIS.expect(is_write_of_backward(write), "_must_be_in_backward: a write of the backward")
    APIS.expect(inputs == names, "_extract_fwd_bwd_modules: backward has other inputs")
    forward, _ = min_cut_rematerialization_partition(_joint_graph(), None, num_fwd_outputs=1)
    crossing: Any = forward.graph.output_node().args[0]
    names = [node.name for node in crossing[1:]]
    APIS.expect(
        saved_by_torch(_joint_graph(), 1) == names,
        "min_cut_rematerialization_partition: its choice is not found",
    )


def _joint_graph() -> fx.GraphModule:
    """Of ``exp(x)``, with a gradient that reads ``sin(x)`` twice."""
    graph = fx.Graph()
    aten = torch.ops.aten
    x, tangent = (graph.placeholder(name) for name in ("primals_1", "tangents_1"))
    result = graph.call_function(aten.exp.default, (x,))
    for _ in range(2):
        sine = graph.call_function(aten.sin.default, (x,))
        tangent = graph.call_function(aten.mul.Tensor, (tangent, sine))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((result, tangent))
    return fx.GraphModule(torch.nn.Module(), graph)
