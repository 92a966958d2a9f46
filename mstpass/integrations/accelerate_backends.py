"""Adds ``mst`` to the backends that Accelerate knows, and with it transformers' Trainer and TRL.

Torch finds the backend by its entry point, but Accelerate takes only the names of an enum,
``accelerate.utils.dataclasses.DynamoBackend``, and its command line only those of a list. Both get
one name more when Accelerate is imported:

- by ``import mstpass``, or
- by ``import torch`` alone: an installed mstpass is named in the entry points ``torch.backends``,
  which torch calls at the end of its import (unless TORCH_DEVICE_BACKEND_AUTOLOAD=0). So scripts
  that do not know of mstpass can name the backend, as ``accelerate launch`` does.

The enum gets no new member by its private tables. It has a hook for values that it lacks,
``_missing_``, and the hook answers with an object that is made once. An Accelerate that is built
differently stays as it is, with a line in the log that says what to do instead.

Upstream, two lines would do: docs/trainers.md.
"""

from __future__ import annotations

import enum
import logging
from types import ModuleType
from typing import Any

from mstpass.integrations.after_import import after_import

log = logging.getLogger(__name__)

NAME = "MST"  # Accelerate has the names in capitals, and torch gets them in small letters
KNOWN_VERSIONS = "1.1 to 1.15"


def register() -> None:
    """Make Accelerate accept the backend's name, now or when it is imported; never raises."""
    after_import("accelerate.utils.dataclasses", _add_to_enum)
    after_import("accelerate.commands.config.config_utils", _add_to_command_line)


def _add_to_enum(module: ModuleType) -> None:
    backends = getattr(module, "DynamoBackend", None)
    if not isinstance(backends, enum.EnumMeta) or str not in backends.__mro__:
        _warn("there is no enum of strings accelerate.utils.dataclasses.DynamoBackend")
        return
    members: Any = backends
    values = {member.value for member in members}
    if "INDUCTOR" not in values:
        _warn("accelerate's DynamoBackend names backends in another way")
    elif NAME not in values and not hasattr(backends, NAME):
        _answer_to_name(backends)


def _answer_to_name(backends: Any) -> None:
    """Let ``backends("MST")`` and ``backends.MST`` be one object, which is equal to ``"MST"``."""
    member = str.__new__(backends, NAME)
    member._name_ = member._value_ = NAME
    others = backends._missing_

    def missing(cls: Any, value: object) -> Any:
        return member if value == NAME else others(value)

    backends._missing_ = classmethod(missing)
    setattr(backends, NAME, member)


def _add_to_command_line(module: ModuleType) -> None:
    names = getattr(module, "DYNAMO_BACKENDS", None)
    if not isinstance(names, list) or "INDUCTOR" not in names:
        _warn("there is no list accelerate.commands.config.config_utils.DYNAMO_BACKENDS")
    elif NAME not in names:
        names.append(NAME)  # at the end: `accelerate config` stores positions


def _warn(reason: str) -> None:
    log.warning(
        "mstpass: this version of accelerate does not accept the backend 'mst' (%s; mstpass knows "
        "accelerate %s). Leave torch_compile, torch_compile_backend and --dynamo_backend out, and "
        "compile the model itself: mstpass.compile(model)",
        reason,
        KNOWN_VERSIONS,
    )
