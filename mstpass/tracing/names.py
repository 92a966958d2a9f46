"""Names for the user: of modules, of checkpointed functions, and of lines in the user's code."""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from mstpass.torch_internals.modules import WRAPPED, wrapped_in

_WRAPPERS = re.compile(rf"(?:^|\.)(?:{'|'.join(WRAPPED)})\b")


def module_names(roots: Iterable[nn.Module]) -> dict[int, str]:
    """``id`` of a module -> its path, for every module below the roots. Wrappers are left out.

    A root is named after its class. If two modules have the same path, the one of the smaller root
    gets the root's class and a number in front.
    """
    names: dict[int, str] = {}
    taken: dict[str, nn.Module] = {}
    largest_first = sorted(roots, key=lambda root: -sum(1 for _ in root.modules()))
    for number, root in enumerate(largest_first):
        for path, module in root.named_modules():
            if id(module) in names:
                continue
            name = _WRAPPERS.sub("", path).strip(".") or type(unwrapped(root)).__name__
            if taken.get(name, unwrapped(module)) is not unwrapped(module):
                name = f"{type(unwrapped(root)).__name__}-{number}.{path}".strip(".")
            names[id(module)], taken[name] = name, unwrapped(module)
    return names


def modules_near(fn: Any, args: Iterable[Any] = ()) -> list[nn.Module]:
    """The modules that a step is, holds in its closure, globals or object, or gets as arguments."""
    if isinstance(fn, functools.partial):
        return modules_near(fn.func, (*args, *fn.args, *fn.keywords.values()))
    owner = getattr(fn, "__self__", None)
    code = getattr(fn, "__code__", None)
    known = getattr(fn, "__globals__", {})
    values = [
        *(fn, owner, *args),
        *getattr(owner, "__dict__", {}).values(),
        *(_cell_content(cell) for cell in getattr(fn, "__closure__", None) or ()),
        *(known.get(name) for name in (code.co_names if code else ())),
    ]
    return [value for value in values if isinstance(value, nn.Module)]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of checkpoint and FSDP wrappers and of compiled modules."""
    inner = wrapped_in(module)
    return module if inner is None else unwrapped(inner)


def module_of(function: Any) -> nn.Module | None:
    """The module that a checkpointed function runs; None if there is not exactly one.

    The function may be a module, a method of one, a ``partial`` of these or with a module as an
    argument (Hugging Face), or a function with one module in its closure (``checkpoint_wrapper``).
    """
    if isinstance(function, nn.Module):
        return unwrapped(function)
    if isinstance(function, types.MethodType):
        return module_of(function.__self__) if isinstance(function.__self__, nn.Module) else None
    if isinstance(function, functools.partial):
        bound = next((a for a in function.args if isinstance(a, nn.Module)), None)
        return unwrapped(bound) if bound is not None else module_of(function.func)
    cells = (_cell_content(cell) for cell in getattr(function, "__closure__", None) or ())
    held = [value for value in cells if isinstance(value, nn.Module)]
    return unwrapped(held[0]) if len(held) == 1 else None


def forward_owner(function: Any) -> nn.Module | None:
    """The module whose ``forward`` the function is, which a checkpoint may run by itself."""
    inner = function.func if isinstance(function, functools.partial) else function
    return module_of(function) if getattr(inner, "__name__", "") == "forward" else None


def function_name(function: Any) -> str:
    """The name of a function that runs no module: ``step.<locals>.block (train.py:12)``."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return name
    return f"{name} ({location(code.co_filename, code.co_firstlineno)})"


def location(file: str, line: int) -> str:
    """``train.py:12``."""
    return f"{os.path.basename(file)}:{line}"


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
