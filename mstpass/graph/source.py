"""Where a node comes from, for people: module path or file:line of the user's code."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from torch import fx

from mstpass.graph.joint import JointGraph

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_OF_TORCH = re.compile(r"[/\\]torch[/\\](?:_\w+|nn|autograd|utils|optim)[/\\]")


def source_of(node: fx.Node) -> str:
    """``layers.0.mlp.gate_proj`` where the module is known, ``file.py:12`` otherwise, or ``""``."""
    near = (node, *node.all_input_nodes, *node.users)
    return next(filter(None, map(_module, near)), "") or next(filter(None, map(_line, near)), "")


def line_of(node: fx.Node) -> str:
    """``file.py:12`` of the user's code, of the node itself or one next to it, or ``""``."""
    return next(filter(None, map(_line, (node, *node.all_input_nodes, *node.users))), "")


class Place(NamedTuple):
    """``model.layers.0.mlp`` and ``file.py:12``; each empty where it is not known."""

    module: str
    line: str


class Places:
    """The place of every node of a joint graph.

    A backward node has that of the forward node whose gradient it is part of
    (``fwd_nn_module_stack``, and its stack trace). A node that says nothing of itself (gradients
    that are added up, what a pass has written) has that of its last operand that has one, and an
    input of the step, such as a parameter, that of its first reader.
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
        summed = node.meta.get("is_gradient_acc", False)  # its stack trace is that of the compiler
        own = Place("", "") if summed else Place(_module(node), _line(node))
        if own.module or own.line:  # a line without a module is outside of all modules
            return own
        places = (self._of[operand] for operand in reversed(node.all_input_nodes))
        return next((place for place in places if place.module or place.line), own)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return _clean(str(list(stack.values())[-1][0])) if stack else ""


def _line(node: fx.Node) -> str:
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _innermost(stack_trace: str) -> str:
    """The innermost frame that is not torch's."""
    frames = _FRAME.findall(stack_trace)
    own = [frame for frame in frames if not _OF_TORCH.search(frame[0])]
    if not own:
        return ""
    file, line, _ = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


@functools.lru_cache(maxsize=4096)
def _clean(path: str) -> str:
    """Dynamo's ``L['self']._modules['mlp']`` as ``mlp``, a closure's or a global model likewise.

    The variable's name stays where a number would be left alone, as in an ``nn.Sequential``, or,
    of a global model, nothing.
    """
    path = re.sub(r"^G\['__import_[^']*'\]\.(\w+)", r"G['\1']", path)  # a global of another file
    root = re.match(r"[LG]\['(\w+)'\]", path)
    path = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
    path = re.sub(r"^__closure__\[\d+\]\.cell_contents\.?", "", path)
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(r"\[(?:'|\")?([^'\"\]]*)(?:'|\")?\]", r".\1", path)
    path = re.sub(r"\.{2,}", ".", path).strip(".")
    if root and path[:1].isdigit():
        return f"{root[1]}.{path}"
    return path or (root[1] if root and root[0].startswith("G") else "")
