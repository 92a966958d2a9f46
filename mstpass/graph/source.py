"""Where a node comes from, for people: module path or file:line of the user's code."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def source_of(node: fx.Node) -> str:
    """``layers.0.mlp.gate_proj`` where the module is known, ``file.py:12`` otherwise, or ``""``."""
    for candidate in (node, *node.all_input_nodes, *node.users):
        stack = candidate.meta.get("nn_module_stack")
        if stack:
            path = _clean(str(list(stack.values())[-1][0]))
            if path:
                return path
    for candidate in (node, *node.all_input_nodes, *node.users):
        frames = _FRAME.findall(candidate.meta.get("stack_trace") or "")
        if frames:
            file, line, _ = frames[-1]
            return f"{file.rsplit('/', 1)[-1]}:{line}"
    return ""


def _clean(path: str) -> str:
    """Dynamo's ``L['self']._modules['mlp']`` as ``mlp``, a closure's or a global model likewise."""
    path = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
    path = re.sub(r"^__closure__\[\d+\]\.cell_contents\.?", "", path)
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(r"\[(?:'|\")?([^'\"\]]*)(?:'|\")?\]", r".\1", path)
    return re.sub(r"\.{2,}", ".", path).strip(".")
