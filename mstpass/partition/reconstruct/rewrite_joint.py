"""Write a decision: a joint graph in which backward reads what it can have.

Reconstructed values, and values recomputed from such, are new nodes; forward keeps reading the
originals, backward and the new nodes read the new ones. Every new node reads nodes that were
written before it, so the result is a DAG; the partition's own check (verify.py) then holds for it
as for any graph, each new node being a forward value that may be recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import same_shape
from mstpass.partition.reconstruct import encodings
from mstpass.partition.reconstruct.choose_drops import Decision, Step
from mstpass.partition.reconstruct.rule import Inverse, Writer, aten
from mstpass.partition.reconstruct.table import BY_NAME

_KEPT_META = ("seq_nr", "stack_trace", "nn_module_stack")


class CannotWrite(Exception):
    """The decision holds for the graph but cannot be written; the message says why."""


def rewrite(
    joint: JointGraph, decision: Decision, encodings: Mapping[str, str]
) -> tuple[JointGraph, frozenset[str]]:
    """The new joint graph and what to save in it, by name.

    Raises:
        CannotWrite: a symbolic size that no node of the graph holds, or a loop's operand in
            another layout.
    """
    writing = _Rewriting(joint, dict(decision.steps), encodings)
    try:
        return writing.run(decision.saved)
    except UnknownSize as error:
        raise CannotWrite(str(error)) from error


class _Rewriting:
    def __init__(self, joint: JointGraph, steps: Mapping[str, Step], encodings: Mapping[str, str]):
        self.joint, self.encodings = joint, encodings
        self.graph = fx.Graph()
        self.writer = Writer(self.graph, joint.nodes)
        self.env: dict[fx.Node, fx.Node] = {}
        self.packed: dict[fx.Node, fx.Node] = {}
        self.new: dict[fx.Node, fx.Node] = {}
        self.steps = self._changed(steps)

    def _changed(self, steps: Mapping[str, Step]) -> dict[fx.Node, Step]:
        """Values that backward does not have by copying the forward: inverses and what follows."""
        changed: dict[fx.Node, Step] = {}
        for name, step in steps.items():
            node = self.joint.by_name[name]
            follows = any(n in changed or n.name in self.encodings for n in node.all_input_nodes)
            if step is not None or follows:
                changed[node] = step
        return changed

    def run(self, saved: frozenset[str]) -> tuple[JointGraph, frozenset[str]]:
        # Forward values first, in their order: what is written later finds them all.
        outputs = self.joint.output
        late = [n for n in self.joint.nodes if n in self.joint.backward and n.op != "placeholder"]
        for node in self.joint.nodes:
            if node not in self.joint.backward or node.op == "placeholder":
                if node is not outputs:
                    self._copy(node, self.env)
                    if node.name in self.encodings:  # at once: what it is made from may die
                        self._encode(node)
        for node in late:
            if node is not outputs:
                self._copy(node, {n: self._read(n) for n in node.all_input_nodes})
        self._output(outputs)
        module = fx.GraphModule(self.joint.module, self.graph)
        module.meta = dict(self.joint.module.meta)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        names = {
            (self.packed if node in self.packed and node in self.new else self.env)[node].name
            for node in map(self.joint.by_name.__getitem__, saved)
        }
        return JointGraph(module, self.joint.num_fwd_outputs), frozenset(names)

    def _copy(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> None:
        built = self.graph.node_copy(node, env.__getitem__)
        self.env[node] = built
        self.writer.sizes.learn(built)

    def _output(self, output: fx.Node) -> None:
        results = output.args[0]
        assert isinstance(results, tuple | list)
        count = self.joint.num_fwd_outputs
        forward = fx.map_arg(tuple(results[:count]), self.env.__getitem__)
        backward = fx.map_arg(tuple(results[count:]), self._read)
        built = self.graph.output((*forward, *backward))
        built.meta = dict(output.meta)

    def _read(self, node: fx.Node) -> fx.Node:
        """Backward's version of a node of the joint graph."""
        if node in self.new:
            return self.new[node]
        if node.name in self.encodings and node not in self.joint.backward:
            self.new[node] = self._decoded(node)
        elif node in self.steps:
            self.new[node] = self._written(node, self.steps[node])
            self._check(node)
        else:
            return self.env[node]
        return self.new[node]

    def _decoded(self, node: fx.Node) -> fx.Node:
        return encodings.decode(self.writer, node, self.packed[node], self.encodings[node.name])

    def _encode(self, node: fx.Node) -> None:
        encoding = self.encodings[node.name]
        self.packed[node] = encodings.encode(self.writer, node, self.env[node], encoding)

    def _written(self, node: fx.Node, step: Step) -> fx.Node:
        if isinstance(step, Inverse):
            op = self.joint.by_name[step.op]
            return BY_NAME[step.rule].write(self.writer, op, node, self._read)
        env = {n: self._read(n) for n in node.all_input_nodes}
        if any(n.op == "get_attr" for n in env):
            return self._once_more(node, env)
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        # A new operand may be laid out in another way than the one that it stands for.
        target = aten.reshape.default if node.target is aten.view.default else node.target
        built = self.writer.call(target, *args, **kwargs)
        built.meta.update({key: node.meta[key] for key in _KEPT_META if key in node.meta})
        return built

    def _once_more(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A loop, whose body was traced for operands of these strides."""
        for old, new in env.items():
            was, is_now = value_of(old), value_of(new)
            if was is not None and is_now is not None and was.stride() != is_now.stride():
                raise CannotWrite(f"{node.name} needs {old.name} laid out as it was")
        return self.graph.node_copy(node, env.__getitem__)

    def _check(self, node: fx.Node) -> None:
        old, new = value_of(node), value_of(self.new[node])
        if old is None or new is None:
            return
        assert old.dtype == new.dtype and same_shape(old.shape, new.shape), (
            f"{node.name}: {new.dtype} {tuple(new.shape)} for {old.dtype} {tuple(old.shape)}"
        )
