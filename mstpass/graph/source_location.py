"""The place in the user's code that a node comes from: the path of the module, and file:line."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from torch import fx

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


def place_of(node: fx.Node) -> Place:
    """The place of a node; of one without a place of its own, that of an operand or a user."""
    near = (node, *reversed(node.all_input_nodes), *node.users)
    # The stack trace of a sum of gradients shows the compiler, not the user's code.
    known = (n for n in near if not n.meta.get("is_gradient_acc"))
    places = (Place(_module(n), _line(n)) for n in known)
    return next(filter(any, places), Place("", ""))


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
