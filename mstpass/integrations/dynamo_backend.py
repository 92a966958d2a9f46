"""Registers the backend's name with Dynamo before anybody asks for it.

Dynamo finds ``mst`` by its entry point when it is first asked for, and registers it then. Two
threads that ask at once both do so, and the second one fails with ``duplicate name: mst``. A name
that is registered while Dynamo's registry is imported, which only one thread does, is found by all.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

from mstpass.integrations.after_import import after_import

log = logging.getLogger(__name__)
_REGISTRY = "torch._dynamo.backends.registry"


def register() -> None:
    """Register the name when the registry is imported; if it has been, the entry point is left to.

    This may be called from within the registry, by the import of the entry point.
    """
    if _REGISTRY not in sys.modules:
        after_import(_REGISTRY, _add)


def _add(module: ModuleType) -> None:
    try:
        entry_point = importlib.import_module("mstpass.entry_point")  # torch is imported by now
        module.register_backend(entry_point.mst, name="mst")
    except Exception as error:  # somebody else's import is under way
        log.debug("mst is not registered with Dynamo, which finds its entry point: %s", error)
