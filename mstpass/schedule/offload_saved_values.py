"""Write the copies of saved values to the host and back into the forward and the backward graph.

::

    forward     v = op(...)                            backward    inputs: v_host
                copy = offload(v)                                  ...
                ...                                                copy = reload(v_host)
                v_host = wait(copy, v)                             ...
                ...                                                v = wait(copy)
                return ..., v_host                                 op(v)

Each copy and each wait is where memory/host_copies.py has it for ops of these times.
By ``host_copy_waits`` Inductor keeps them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set

import torch
from torch import Tensor, fx

from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.host_copies import is_host_copy
from mstpass.graph.joint import Modules, nbytes, value_of
from mstpass.graph.node_copies import copy_nodes
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.graph.sizes import is_static
from mstpass.memory.host_copies import HostCopy, Moved, offload_copies, reload_copies
from mstpass.memory.reloads import reloads
from mstpass.memory.simulate_graph import op_of
from mstpass.problem.host_memory import Host
from mstpass.schedule.cheap_values import is_cheap
from mstpass.schedule.delay_recomputation import Waits
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.op_types import OpOverload

TimeOf = Callable[[fx.Node], float]  # the time of a node's op in microseconds


@dataclasses.dataclass(frozen=True)
class Copied:
    """The copies of both graphs, and the time that each graph's ops take by estimate.

    Attributes:
        host_names: what crosses in the place of each value.
    """

    forward: tuple[HostCopy, ...]
    backward: tuple[HostCopy, ...]
    forward_us: float
    backward_us: float
    host_names: Mapping[str, str]


def offload_saved_values(
    modules: Modules, names: Set[str], num_fwd_outputs: int, host: Host, time_of: TimeOf
) -> Copied:
    """Have these saved values cross by way of the host, in place.

    Args:
        names: of what forward returns for backward.
        num_fwd_outputs: how many results of the forward are for the caller.
    """
    forward, backward = (module.graph for module in modules)
    results = list(forward.output_node().args[0])  # type: ignore[arg-type]
    crossing = [n for n in results[num_fwd_outputs:] if isinstance(n, fx.Node) and n.name in names]
    offloads, forward_us, on_host = _offload(forward, crossing, num_fwd_outputs, host, time_of)
    reloads, backward_us = _reload(backward, on_host, host, time_of)
    for module in modules:
        module.graph.lint()
        module.recompile()
    return Copied(tuple(offloads), tuple(reloads), forward_us, backward_us, on_host)


def _offload(
    graph: fx.Graph, values: list[fx.Node], num_fwd_outputs: int, host: Host, time_of: TimeOf
) -> tuple[list[HostCopy], float, dict[str, str]]:
    nodes = _calls(graph)
    index = {node: i for i, node in enumerate(nodes)}
    times_us = [time_of(node) for node in nodes]
    by_name = {node.name: node for node in values}
    moved = [Moved(node.name, nbytes(node), index[node]) for node in values]
    copies = offload_copies(times_us, moved, host.offload_bytes_per_us)
    places = [*nodes, graph.output_node()]
    waits: dict[fx.Node, fx.Node] = {}
    for copy in copies:
        value = by_name[copy.name]
        fake = _on_host(value.meta["val"])
        with graph.inserting_before(places[copy.begun]):
            begun = _call(graph, host_copy_ops.OFFLOAD, (value,), f"{value.name}_offload", fake)
    for copy in copies:
        value = by_name[copy.name]
        begun = next(user for user in value.users if user.target is host_copy_ops.OFFLOAD)
        with graph.inserting_before(places[copy.awaited]):
            args = (begun, None, value)
            waits[value] = _call(
                graph, host_copy_ops.WAIT, args, f"{value.name}_host", begun.meta["val"]
            )
    results = graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    crossing = [waits.get(n, n) if isinstance(n, fx.Node) else n for n in results[num_fwd_outputs:]]
    graph.output_node().args = ((*results[:num_fwd_outputs], *crossing),)
    return copies, sum(times_us), {value.name: wait.name for value, wait in waits.items()}


def _reload(
    graph: fx.Graph, names: Mapping[str, str], host: Host, time_of: TimeOf
) -> tuple[list[HostCopy], float]:
    nodes = [n for n in graph.nodes if n.op != "output"]
    ops, times_us = [op_of(node) for node in nodes], [time_of(node) for node in nodes]
    inputs = {n.name: n for n in graph.find_nodes(op="placeholder") if n.name in names}
    sizes = {name: nbytes(node) for name, node in inputs.items()}
    returned = set(graph.output_node().all_input_nodes)
    cheap = {n.name for n in nodes if is_cheap(n) and n not in returned}
    free = {n.name for n in nodes if n.op == "placeholder" and str(n.target).startswith("primals")}
    found = reloads(ops, times_us, sizes, cheap, free, host.reload_bytes_per_us)
    copies = reload_copies(times_us, found.copies, host.reload_bytes_per_us)
    places = [*nodes, graph.output_node()]
    first_op = next(i for i, node in enumerate(places) if node.op != "placeholder")
    for name, given in inputs.items():
        _put_on_host(given, names[name])
    for reload, copy in zip(found.copies, copies, strict=True):
        given = inputs[reload.name]
        back = _reloaded(given, places[max(copy.begun, first_op)], places[copy.awaited])
        new = {given: back}
        chain, readers = (
            [nodes[i] for i in positions] for positions in (reload.chain, reload.readers)
        )
        if reload.again:
            copied = copy_nodes(chain, places[copy.awaited])
            new |= copied
            chain = list(copied.values())
        for reader in (*chain, *readers):
            for old in set(new).intersection(reader.all_input_nodes):
                reader.replace_input_with(old, new[old])
    for i in sorted(found.unread, reverse=True):
        graph.erase_node(nodes[i])
    for given in inputs.values():
        graph.erase_node(given)
    return copies, sum(times_us)


def _reloaded(given: fx.Node, begun: fx.Node, awaited: fx.Node) -> fx.Node:
    """A value that is copied back from the host, which is the input in front of ``given``."""
    graph, value, on_host = given.graph, given.meta["val"], given.prev
    strided = is_static(value) and not value.is_contiguous()
    layout = (list(value.shape), list(value.stride())) if strided else ()
    with graph.inserting_before(begun):
        args = (on_host, value.device, *layout)
        copy = _call(graph, host_copy_ops.RELOAD, args, f"{given.name}_reload", value)
    with graph.inserting_before(awaited):
        waited = (copy, None, on_host)
        return _call(graph, host_copy_ops.WAIT, waited, f"{given.name}_back", value)


def _put_on_host(given: fx.Node, name: str) -> None:
    """Put an input for the value on the host in front of the one that backward has now."""
    graph = given.graph
    with graph.inserting_before(given):
        on_host = graph.placeholder(name)
    assert on_host.name == name  # by which forward returns it
    on_host.meta.update(given.meta, val=_on_host(given.meta["val"]))
    on_host.meta.pop("tensor_meta", None)


def _on_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def _call(
    graph: fx.Graph, op: OpOverload, args: tuple[object, ...], name: str, val: object
) -> fx.Node:
    node = graph.create_node("call_function", op, args, {}, name)  # type: ignore[arg-type]
    node.meta["val"] = val
    return node


# ---- order -------------------------------------------------------------------------------------
def host_copy_waits(graph: fx.Graph) -> Waits:
    """What keeps each copy, and each wait for one, between the heavy ops around it.

    Inductor's scheduler knows only what depends on what. It might begin all copies of a backward at
    once, so that all values are back on the device from the start, or end them all at the end of a
    forward. So each of them waits for the heavy op in front of it, and the next heavy op for it.
    """
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    before: fx.Node | None = None
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if is_host_copy(node):
            if before is not None and before not in node.all_input_nodes:
                waits[node] = (before,)
            pending.append(node)
        elif _is_anchor(node):
            others = tuple(other for other in pending if other not in node.all_input_nodes)
            if others:
                waits[node] = others
            pending, before = [], node
    return waits


def _is_anchor(node: fx.Node) -> bool:
    """Whether other nodes may wait for the node, and it for them: a matmul or attention."""
    if not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return is_heavy(node) and not is_pinned(node) and value_of(node) is not None
