"""Write a program as the forward and the backward graph.

torch extracts the two graphs from the joint graph, with their inputs, results, sizes and state.
Their nodes are then copied in the order of the program (memory/program.py), those that it has
several times as often as it has them, and with its copies to the host and back::

    forward     v = op(...)                            backward    inputs: v_host
                copy = offload(v)                                  ...
                ...                                                copy = reload(v_host)
                v_host = wait(copy, v)                             ...
                ...                                                v = wait(copy)
                return ..., v_host                                 op(v)

schedule/delay_recomputation.py has Inductor keep the copies there. A loop that copies rows from the
host itself reads ``rows_on_host(v_host)``, or views of it (graph/loop_op.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import Modules, is_tangent
from mstpass.graph.node_meta import copy_name
from mstpass.graph.own_ops import materialize
from mstpass.graph.renew_values import Renewal
from mstpass.graph.sizes import is_size, is_static
from mstpass.memory.host_copies import host_name, offloaded_name
from mstpass.memory.program import Program
from mstpass.memory.simulate_graph import kind_of
from mstpass.problem.op import (
    AWAIT_OFFLOAD,
    AWAIT_RELOAD,
    OFFLOAD,
    POINTWISE,
    REALIZED,
    RELOAD,
    ROWS_ON_HOST,
    RUN,
    Op,
)
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.graphs import OpOverload, graph_module
from mstpass.walk import needed_first


def write_program(modules: Modules, program: Program) -> tuple[Modules, dict[str, str]]:
    """The graphs of a program.

    Args:
        modules: forward and backward, as torch extracts them around the program's saved values.
            They do not change.

    Returns:
        The graphs, and for each value that crosses by way of the host the name of what crosses.
    """
    offloaded = [copy.name for copy in program.offloads]
    forward = _Writer(modules[0], {name: offloaded_name(name) for name in offloaded})
    forward.write(program.forward)
    on_host = {name: forward.env[offloaded_name(name)].name for name in offloaded}
    backward = _Writer(modules[1], on_host=on_host)
    backward.write(program.backward)
    return (forward.module(), backward.module()), on_host


class _Writer:
    """Writes one graph.

    Attributes:
        env: the new nodes by the names of the program's ops; of nodes that it does not name, by
            their own.
    """

    def __init__(
        self,
        old: fx.GraphModule,
        returned: Mapping[str, str] | None = None,
        on_host: Mapping[str, str] | None = None,
    ):
        """
        Args:
            returned: results of the old graph, and the ops whose results are returned instead.
            on_host: inputs of the old graph, and the names of those on the host instead.
        """
        self.old, self.returned, self.on_host = old, returned or {}, on_host or {}
        self.nodes = {node.name: node for node in old.graph.nodes}
        self.graph = fx.Graph()
        self.renewal = Renewal(self.graph)
        self.env: dict[str, fx.Node] = {}
        self.node_of: dict[str, str] = {}  # of each op of the program
        self.named: set[str] = set()  # the nodes of ops; others only prepare operands of these
        self.host_copies = {
            OFFLOAD: self._offload,
            AWAIT_OFFLOAD: self._await_offload,
            RELOAD: self._reload,
            AWAIT_RELOAD: self._await_reload,
            ROWS_ON_HOST: self._rows_on_host,
        }

    def write(self, program: Sequence[Op]) -> None:
        """Write all nodes; what the program does not name comes before its first reader."""
        for node in self.old.graph.find_nodes(op="placeholder"):
            self._input(node)
        effects = self._with_effects()
        unread = [node for node in effects if is_collective(node) or is_wait(node)]
        self.named = {*(op.node_name for op in program), *(node.name for node in effects)}
        place = {node: number for number, node in enumerate(self.old.graph.nodes)}
        for op in program:
            self.node_of[op.name] = op.node_name
            node = self.nodes.get(op.node_name)
            if node is not None and is_collective(node):  # all ranks exchange in the traced order
                while unread and place[unread[0]] < place[node]:
                    self._copy_with_inputs(unread.pop(0))
            if op.action != RUN:
                self.env[op.name] = self.host_copies[op.action](op)
            elif op.name not in self.env and op.node_name in self.nodes:
                self.env[op.name] = self._run(op)
        for node in effects:
            self._copy_with_inputs(node)
        self._copy_with_inputs(self.old.graph.output_node())

    def module(self) -> fx.GraphModule:
        self.graph.lint()
        module = graph_module(self.old, self.graph)
        module.meta = dict(self.old.meta)
        return module

    def _input(self, node: fx.Node) -> None:
        if node.name not in self.on_host:
            self.env[node.name] = self.graph.node_copy(node)
            return
        name = self.on_host[node.name]
        given = self.graph.placeholder(name)
        assert given.name == name, "the names agree"  # by which forward returns it
        given.meta.update(node.meta, val=_on_host(node.meta["val"]))
        given.meta.pop("tensor_meta", None)
        self.env[host_name(node.name)] = given

    def _with_effects(self) -> list[fx.Node]:
        """The nodes that have to run although nothing reads them.

        In a backward they come after the first reader of a tangent, but for writes: what comes
        before has run in the forward.
        """
        nodes = list(self.old.graph.nodes)
        tangents = [node for node in nodes if is_tangent(node)]
        readers = {user for tangent in tangents for user in tangent.users}
        first = next((i for i, node in enumerate(nodes) if node in readers), 0)
        writes = [n for n in nodes[:first] if n.target is torch.ops.aten.copy_.default]
        impure = [n for n in nodes[first:] if n.op == "call_function" and n.is_impure()]
        return [*writes, *impure]

    def _run(self, op: Op) -> fx.Node:
        """The node of an op, which reads what the op reads."""
        node = self.nodes[op.node_name]
        read = {self.node_of[name]: name for name in op.inputs if name in self.node_of}
        prepared: dict[fx.Node, fx.Node] = {}

        def operand(old: fx.Node) -> fx.Node:
            if old in prepared:
                return prepared[old]
            return self._copy_with_inputs(old, read.get(old.name, old.name))

        before = lambda n: filter(self._prepares, n.all_input_nodes)
        for one in needed_first(node, before, prepared):
            if one is not node:
                prepared[one] = self.graph.node_copy(one, operand)
                self.renewal.renew(prepared[one])
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        name = node.name if op.name == node.name else copy_name(node.name)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        new.meta = dict(node.meta)
        self.renewal.renew(new)
        if op.kind != REALIZED or kind_of(node) != POINTWISE:
            return new
        # Otherwise its readers would compute it, from operands that are kept for that.
        written = materialize(new)
        self.renewal.replaced(new, written)
        return written

    def _prepares(self, node: fx.Node) -> bool:
        """Whether the node is none of an op: it is written with each op that reads it."""
        is_call = node.op == "call_function" and node.name not in self.named
        return is_call and not is_size(node)

    def _copy_with_inputs(self, old: fx.Node, name: str = "") -> fx.Node:
        """The new node for an old one; what is not written yet is written first."""
        name = name or old.name
        if name not in self.env:
            missing = lambda n: [i for i in reversed(n.all_input_nodes) if i.name not in self.env]
            for node in needed_first(old, missing, ()):
                if node.name not in self.env:
                    self.env[node.name] = new = self.graph.node_copy(node, self._operand_of(node))
                    self.renewal.renew(new)
            assert name in self.env, f"{name} is not available where {old.name} is read"
        return self.env[name]

    def _operand_of(self, node: fx.Node) -> Callable[[fx.Node], fx.Node]:
        returned = self.returned if node.op == "output" else {}
        return lambda old: self.env[returned.get(old.name, old.name)]

    # ---- copies to the host and back -----------------------------------------------------------
    def _offload(self, op: Op) -> fx.Node:
        value = self.env[op.node_name]
        name = f"{value.name}_offload"
        return self._call(host_copy_ops.OFFLOAD, (value,), name, _on_host(value.meta["val"]))

    def _await_offload(self, op: Op) -> fx.Node:
        value, copy = (self.env[name] for name in op.inputs)
        args = (copy, value)
        return self._call(host_copy_ops.WAIT, args, f"{value.name}_host", copy.meta["val"])

    def _reload(self, op: Op) -> fx.Node:
        on_host, value = self.env[op.inputs[0]], self.nodes[op.node_name].meta["val"]
        strided = is_static(value) and not value.is_contiguous()
        args = (on_host, value.device, *([list(value.stride())] if strided else ()))
        return self._call(host_copy_ops.RELOAD, args, f"{op.node_name}_reload", value)

    def _await_reload(self, op: Op) -> fx.Node:
        copy, on_host = self.env[op.inputs[0]], self.env[host_name(op.node_name)]
        args = (copy, on_host)
        return self._call(host_copy_ops.WAIT, args, f"{op.node_name}_back", copy.meta["val"])

    def _rows_on_host(self, op: Op) -> fx.Node:
        on_host, value = self.env[op.inputs[0]], self.nodes[op.node_name].meta["val"]
        args = (on_host, value.device)
        return self._call(host_copy_ops.ROWS_ON_HOST, args, f"{op.node_name}_rows", value)

    def _call(
        self, target: OpOverload, args: tuple[object, ...], name: str, value: object
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {}, name)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node


def _on_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
