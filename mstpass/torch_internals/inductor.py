"""Compile a graph with Inductor, with passes at its hooks, and tell it how to lower and to order.

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
Source: torch/_inductor/compile_fx.py, custom_graph_pass.py, lowering.py, decomposition.py, ir.py,
fx_passes/control_dependencies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.graphs import OpOverload

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # torch 2.11 wants a graph pass before fusion, and takes any function after it
    CustomSchedulerPass = CustomGraphPass  # type: ignore[assignment, misc]

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "CustomSchedulerPass",
    "compile_fx",
    "compile_fx_inner",
    "select_decomp_table",  # for graphs that are traced after AOTAutograd
]


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled graph that takes a list and empties it, marked so for AOTAutograd."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class SchedulerPass(CustomSchedulerPass):
    """A pass of ours over the scheduler's kernels; the user's pass runs first.

    Attributes:
        graphs: how many it was called with.
    """

    def __init__(self, users_pass: Callable[..., Any] | None = None):
        self.users_pass, self.graphs = users_pass, 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.graphs += 1
        return nodes if self.users_pass is None else self.users_pass(nodes)

    def uuid(self) -> Any:
        """Of both; None if theirs has none. Our sources are in the keys of other hooks."""
        if self.users_pass is None:
            return "mstpass"
        uuid = getattr(self.users_pass, "uuid", None)
        theirs = uuid() if uuid is not None else None
        return None if theirs is None else f"mstpass-{theirs}"


def write_to_memory(op: OpOverload) -> None:
    """Lower an op of one tensor to that tensor, written where the op stands."""
    if op not in lowering.lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_written)


def _written(value: Any) -> Any:
    value.realize()
    return value


def call_as_it_is(op: OpOverload) -> None:
    """Have Inductor call an op that it has no lowering for.

    It does so by itself, except where the environment variable CI is set: there it asserts that
    the op has no decomposition (2.11 and 2.13).
    """
    if op not in lowering.lowerings:
        lowering.make_fallback(op, warn=False)


def call_with_aligned_result(op: OpOverload) -> None:
    """Have Inductor call an op as it is, and take its result to begin at a multiple of 16 bytes.

    Inductor does not take that for granted where an operand of the op is on the CPU, and makes
    slower kernels for what reads the result.
    """
    if op in lowering.lowerings:
        return
    call = lowering.fallback_handler(op)

    def aligned(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        V.graph.unaligned_buffers.discard(result.get_name())
        return result

    lowering.register_lowering(op, type_promotion_kind=None)(aligned)


def make_wait(
    graph: fx.Graph,
    waits: Mapping[fx.Node, Iterable[fx.Node]],
    inlined: Callable[[fx.Node], bool] = lambda node: False,
) -> None:
    """Have each node wait for others, in place; the others come before it in the graph.

    They need have no data in common. Inductor's own passes order collectives so: a node becomes a
    call of the op ``control_deps``, which has the nodes to wait for among its inputs.

    Args:
        inlined: whether an operand has no buffer of its own. From torch 2.15 on the call would
            write it to memory, so it is computed once more within the call.
    """
    earlier = set(graph.find_nodes(op="call_function", target=control_deps))
    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in waits.items()})
    for call in graph.find_nodes(op="call_function", target=control_deps):
        if call not in earlier:
            _take_in(call, inlined)


def _take_in(call: fx.Node, inlined: Callable[[fx.Node], bool]) -> None:
    """Compute the inlined operands of a call of ``control_deps`` in the graph that it calls."""
    arguments: Any = call.args
    before, name, *operands = arguments
    owner: Any = call.graph.owning_module
    body: Any = getattr(owner, str(name.target))
    inputs = body.graph.find_nodes(op="placeholder")
    first = next(node for node in body.graph.nodes if node.op != "placeholder")
    pairs = list(zip(operands, inputs, strict=True))
    known = {outer: node for outer, node in pairs if not inlined(outer)}

    def inside(outer: fx.Node) -> fx.Node:
        if outer not in known:
            is_copied = inlined(outer)
            given: Any = fx.map_arg((outer.args, outer.kwargs), inside) if is_copied else ()
            with body.graph.inserting_before(first if is_copied else inputs[0]):
                known[outer] = (
                    body.graph.create_node(outer.op, outer.target, *given)
                    if is_copied
                    else body.graph.placeholder(outer.name)
                )
            known[outer].meta = outer.meta.copy()
        return known[outer]

    taken = [(outer, node) for outer, node in pairs if inlined(outer)]
    for outer, node in taken:
        node.replace_all_uses_with(inside(outer))
    for _, node in taken:
        body.graph.erase_node(node)
    if taken:
        outer_of = {node: outer for outer, node in known.items()}
        rest = (outer_of[node] for node in body.graph.find_nodes(op="placeholder"))
        call.args = (before, name, *rest)
        body.recompile()
