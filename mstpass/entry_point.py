"""What torch imports for ``backend="mst"``: the backend, or Inductor where this torch lacks a name.

A torch that renamed what mstpass imports would make ``torch.compile`` itself fail. Here it costs
one warning, and the step compiles as under Inductor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from mstpass.frame_stack import with_deep_stack
from mstpass.options import Options
from mstpass.torch_internals.plain_inductor import by_inductor_alone, options_of_mode
from mstpass.torch_internals.versions import ADVICE, CHECKED, installed


def mst(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: `mstpass.backend.mst`, which gets the same arguments.

    Raises:
        ImportError: under ``strict``, where torch lacks what mstpass imports.
    """
    try:
        # Imported here: that it may fail is what this file is for.
        from mstpass import backend
    except (ImportError, AttributeError) as error:
        return _by_inductor(gm, example_inputs, error, **kwargs)
    return with_deep_stack(backend.mst, gm, example_inputs, **kwargs)


def _by_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    error: Exception,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    parsed = Options.parse(options)
    if parsed.strict:
        raise error
    _warn_once(f"{type(error).__name__}: {error}")
    users = {**options_of_mode(mode), **parsed.inductor_patches}
    return by_inductor_alone(gm, example_inputs, users)


@functools.cache
def _warn_once(lacking: str) -> None:
    warnings.warn(
        "mstpass is off, and steps compile as under Inductor, because torch "
        f"{installed()} lacks what mstpass imports. {lacking}. mstpass was checked with "
        f"torch {CHECKED[0]} to {CHECKED[-1]}. {ADVICE}.",
        stacklevel=4,
    )
