"""Calls a function once a module has been imported, without importing it.

So ``register`` gives Dynamo the backend's name before anybody asks for it. Dynamo finds ``mst`` by
its entry point when it is first asked for, and registers it then. Two threads that ask at once both
do so, and the second one fails with ``duplicate name: mst``. A name that is registered while
Dynamo's registry is imported, which only one thread does, is found by all.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)
Function = Callable[[ModuleType], None]


def after_import(name: str, function: Function) -> None:
    """Call `function` with the module of that name: now, or as soon as somebody has imported it.

    Each function is called once, however often it is registered. One that fails is logged.
    """
    module = sys.modules.get(name)
    if module is None:
        _FINDER.waiting[name] = function
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    elif not getattr(module.__spec__, "_initializing", False):  # else its import is under way
        _call(function, module)


def _call(function: Function, module: ModuleType) -> None:
    try:
        function(module)
    except Exception as error:  # somebody else's import is under way
        told = "mstpass leaves %s as it is: %s. If 'mst' is unknown, use mstpass.compile(model)"
        log.warning(told, module.__name__, f"{type(error).__name__}: {error}")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are waited for, by the other finders, and changes their loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, Function] = {}
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting or name in self._asking:
            return None
        self._asking.add(name)  # the other finders are asked through sys.meta_path, with this one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader; the function that waits for the module is called behind it."""

    def __init__(self, own: importlib.abc.Loader):
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "an imported module has a spec"
        module.__spec__.loader = module.__loader__ = self._own  # as if nobody had waited
        self._own.exec_module(module)
        function = _FINDER.waiting.pop(module.__name__, None)
        if function is not None:
            _call(function, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


_FINDER = _Finder()
_REGISTRY = "torch._dynamo.backends.registry"


def register() -> None:
    """Register the name when the registry is imported; if it has been, the entry point is left to.

    This may be called from within the registry, by the import of the entry point.
    """
    if _REGISTRY not in sys.modules:
        after_import(_REGISTRY, _add)


def _add(module: ModuleType) -> None:
    entry_point = importlib.import_module("mstpass.entry_point")  # torch is imported by now
    module.register_backend(entry_point.mst, name="mst")
