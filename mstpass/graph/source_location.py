"""The place in the user's code that a node comes from: the path of the module, and file:line."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.module_path import module_path

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_IN_TORCH = re.compile(r"[/\\]torch[/\\](?:_\w+|nn|autograd|utils|optim)[/\\]")


def source_of(node: fx.Node) -> str:
    """The module, such as ``layers.0.mlp.gate_proj``, else ``file.py:12``, else ``""``.

    If the node itself has neither, its operands are asked, then its users.
    """
    near = (node, *node.all_input_nodes, *node.users)
    return next(filter(None, map(_module, near)), "") or next(filter(None, map(_line, near)), "")


class Place(NamedTuple):
    """A place such as ``model.layers.0.mlp`` and ``file.py:12``; each is empty if unknown."""

    module: str
    line: str


class Places:
    """The place of every node of a joint graph.

    A backward node has the place of the forward node to whose gradient it belongs. A node without a
    place of its own, such as a sum of gradients or a node that a pass has made, has the place of
    its last operand that has one. An input of the step, such as a parameter, has the place of its
    first reader.
    """

    def __init__(self, joint: JointGraph):
        self._of: dict[fx.Node, Place] = {}
        for node in joint.nodes:
            self._of[node] = self._place(node)
        for node in joint.nodes:
            if node.op == "placeholder":
                self._of[node] = next((self._of[user] for user in node.users), Place("", ""))

    def __getitem__(self, node: fx.Node) -> Place:
        return self._of[node]

    def _place(self, node: fx.Node) -> Place:
        if node.op == "placeholder":
            return Place("", "")
        # The stack trace of a sum of gradients shows the compiler, not the user's code.
        is_gradient_sum = node.meta.get("is_gradient_acc", False)
        own = Place("", "") if is_gradient_sum else Place(_module(node), _line(node))
        if own.module or own.line:  # a line without a module: outside of all modules
            return own
        places = (self._of[operand] for operand in reversed(node.all_input_nodes))
        return next((place for place in places if place.module or place.line), own)


def _module(node: fx.Node) -> str:
    return module_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))


def _line(node: fx.Node) -> str:
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _innermost(stack_trace: str) -> str:
    """The innermost frame outside of torch, as ``file.py:12``; empty if there is none."""
    frames = _FRAME.findall(stack_trace)
    own = [frame for frame in frames if not _IN_TORCH.search(frame[0])]
    if not own:
        return ""
    file, line, _ = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"
