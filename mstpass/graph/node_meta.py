"""The metadata of a node: what one that replaces it must have as well, and the user's code.

The place in that code is the path of the module, and file:line. A node that runs once more is named
by the original, by which reports know a node.

Module paths are as a user writes them: ``layers.0.mlp`` for what Dynamo and AOTAutograd wrote down.

Of each call of a module, Dynamo notes the Python expression by which the module is reached, and its
class, the outermost module first (``nn_module_stack``)::

    L['step'].args[0].__dict__._modules.base_model.layers._modules['0']._orig_mod.mlp

Such an expression has three kinds of parts:

- the *holder*: the variable, closure, ``partial`` or bound method that holds the outermost module;
- the names of modules inside of modules, which are the path;
- *machinery*: the dicts of a module, and the wrappers of checkpoints, FSDP and torch.compile.

The path is what is left without holders and machinery. It is that of ``model.named_modules()`` if
the outermost module is the model.

"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mstpass.torch_internals.modules import WRAPPED

_POLICY_KEYS = ("recompute", "ac_graph_id")  # of torch.utils.checkpoint
_ORIGIN_KEYS = ("seq_nr", "partitioner_tag", "stack_trace", "nn_module_stack")


def policy_meta(node: fx.Node) -> dict[str, Any]:
    """The node's checkpoint policy and the number of its checkpointed region, if it has them."""
    return _selected(node, _POLICY_KEYS)


def inside_meta(node: fx.Node) -> dict[str, Any]:
    """The node's checkpointed region, if it has one, without what its policy asks for.

    With it a view that stands between two nodes of a region does not let the first one leave it.
    """
    policy = policy_meta(node)
    return {**policy, "recompute": CheckpointPolicy.PREFER_SAVE} if policy else {}


def origin_meta(node: fx.Node) -> dict[str, Any]:
    """The place in the user's code, and what torch's partitioner reads besides a policy."""
    return _selected(node, _ORIGIN_KEYS)


def replacement_meta(node: fx.Node) -> dict[str, Any]:
    """The checkpoint policy, the place in the user's code, and what torch's partitioner reads."""
    return _selected(node, (*_ORIGIN_KEYS, *_POLICY_KEYS))


def _selected(node: fx.Node, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: node.meta[key] for key in keys if key in node.meta}


# ---- names of copies -----------------------------------------------------------------------------
_SUFFIX = "__copy"
_COPY = re.compile(rf"(?P<original>.+?)(?:{_SUFFIX}(?:_\d+)?)+")


def copy_name(name: str) -> str:
    """The name to ask for when a node is copied; the graph adds a number if it is taken."""
    return f"{original_name(name)}{_SUFFIX}"


def original_name(name: str) -> str:
    """The name of the node that a copy was made from; any other name comes back as it is."""
    copy = _COPY.fullmatch(name)
    return copy["original"] if copy else name


# ---- metadata that stays -------------------------------------------------------------------------
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


# ---- paths of modules ----------------------------------------------------------------------------
# Calls in an expression: an attribute or item by name, and those of one argument or none.
_LOOKUP = re.compile(
    r"(?:object\.__getattribute__|getattr|dict\.__getitem__|___\w+)"
    r"\(([^()]*), (?:'([^']*)'|\"([^\"]*)\"|(\d+))\)"
)
_CALL = re.compile(r"\b[\w.]+\(([^(),]*)\)")
_CALLED = re.compile(r"(?<=[\w\])])\(\)")
_PART = re.compile(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|([^.\[\]]+)")
_IMPORTED = re.compile(r"__import_\w+")

_MACHINERY = frozenset({"__dict__", "_modules", *WRAPPED})
# In a holder: bound methods, partials, decorated functions and compiled ones.
_HOLDS_ONE = frozenset(
    {"__self__", "__func__", "func", "__wrapped__", "_torchdynamo_orig_callable", "cell_contents"}
)
# In a holder, with a part behind it that counts or names: closures, partials, default arguments.
_HOLDS_MANY = frozenset({"__closure__", "args", "keywords", "__defaults__", "__kwdefaults__"})
_ARGUMENTS = frozenset({"args", "kwargs"})  # names of variables that hold any arguments
_UNNAMED = frozenset({"self", "fn", *_ARGUMENTS})  # variables whose name says nothing of the model

Stack = Mapping[str, tuple[str, Any]]


def module_path(stack: Stack | None) -> str:
    """The path of the innermost module of a ``nn_module_stack``; empty if there is none.

    The variable that holds the model is left out of the path. Where only a number would remain, as
    in an ``nn.Sequential``, that variable stands before it, or the class of a model that is known
    as ``self`` only. A module that is a global variable itself has the name of the variable.
    """
    if not stack:
        return ""
    entries = list(stack.values())
    outermost, owner = entries[0]
    return _path(str(entries[-1][0]), str(outermost), getattr(owner, "__name__", ""))


@functools.lru_cache(maxsize=4096)
def _path(expression: str, outermost: str, owner: str) -> str:
    scope, root, parts = _read(expression)
    outer_scope, outer_root, outer = _read(outermost)
    held = (scope, root) == (outer_scope, outer_root) and parts[: len(outer)] == outer
    of_holder = _without_holder(root, parts[: len(outer)]) if held else []
    inside = parts[len(outer) :] if held else _without_holder(root, parts)
    path = [part for part in (*of_holder, *inside) if part not in _MACHINERY]
    if path and path[0].isdigit() and root:
        return ".".join([owner if root in _UNNAMED and owner else root, *path])
    return ".".join(path) or (root if scope == "G" else "")


def _read(expression: str) -> tuple[str, str, list[str]]:
    """``L`` or ``G`` (a local or a global), the variable, and the parts behind it."""
    before = ""
    while before != expression:
        before = expression
        expression = _LOOKUP.sub(_as_item, expression)
        expression = _CALL.sub(r"\1", _CALLED.sub("", expression))
    parts = [next(filter(None, found), "") for found in _PART.findall(expression)]
    if len(parts) < 2 or parts[0] not in ("L", "G"):
        return "", "", parts
    scope, root, *rest = parts
    if scope == "G" and _IMPORTED.match(root) and rest:  # a global of another file
        root, *rest = rest
    return scope, root, rest


def _as_item(lookup: re.Match[str]) -> str:
    base, *names = lookup.groups()
    return f"{base}['{next(filter(None, names), '')}']"


def _without_holder(root: str, parts: list[str]) -> list[str]:
    """The parts behind the closures, partials and methods through which a module is reached."""
    i = 1 if root in _ARGUMENTS and parts else 0
    while i < len(parts):
        if parts[i] in _HOLDS_MANY and i + 1 < len(parts):
            i += 2
        elif parts[i] in _HOLDS_ONE:
            i += 1
        else:
            break
    return parts[i:]
