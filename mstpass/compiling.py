"""``mstpass.compile``: compile a module in place, with the options of the backend as keywords.

A module is compiled as ``module.compile(backend="mst", options={...})`` would, so it stays the same
object: its ``state_dict``, ``save_pretrained`` and ``generate`` are those it had. What is different
is one default: ``logits="drop"``, because a library's module returns its logits whether its caller
reads them or not. A function returns what its author wrote, so its logits are kept unless it is
compiled with ``logits="drop"``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from mstpass.entry_point import mst
from mstpass.integrations.transformers_masks import says_whether_packed
from mstpass.options import ENV_PREFIX, OptionError, Options
from mstpass.report.graph_ends import rnn_left_out
from mstpass.torch_internals.modules import compile_in_place, uncompile_in_place, uncompiled
from mstpass.torch_internals.plain_inductor import options_of_mode
from mstpass.tracing.names import modules_near

T = TypeVar("T", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)

_LOGITS = "logits"


def compile(
    model: T,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    **options: Any,
) -> T:
    """Compile a module in place, or a function, with the ``mst`` backend.

    A module is changed in place and returned. Where it is called with labels under gradients, so
    that a loss is among its results, the logits that it returns are a `DroppedLogits`: a tensor
    without memory, of which no value can be read. Everything else is as under
    ``model.compile(backend="mst")``: under ``torch.no_grad()``, in ``generate``, and where the
    module computes no loss, the logits are there. A copy (``copy.deepcopy``, pickle) is not
    compiled. `uncompile` undoes it.

    A function is not changed; what is returned is ``torch.compile(fn, backend="mst", ...)``.

    Args:
        model: the module or the function.
        fullgraph: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        mode: as for ``torch.compile``: a set of Inductor's settings, such as
            ``"max-autotune-no-cudagraphs"``.
        options: the options of the backend (``docs/options.md``), such as ``memory_budget=0.0``.
            ``logits`` is ``"drop"`` for modules, unless the environment says otherwise.

    Raises:
        OptionError: an unknown option, a wrong value or an unknown mode.
        TypeError: ``model`` is neither a module nor a function, or is already the result of
            ``torch.compile``.
    """
    if not callable(model):
        raise TypeError(f"mstpass.compile takes a module or a function, not {model!r}")
    if uncompiled(model) is not model:
        raise TypeError(
            "mstpass.compile takes a module or a function that torch.compile has not wrapped: "
            "call it on what you gave to torch.compile"
        )
    is_module = isinstance(model, nn.Module)
    if is_module and ENV_PREFIX + _LOGITS.upper() not in os.environ:
        options.setdefault(_LOGITS, "drop")
    given: dict[str, Any] = {
        "backend": mst,
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "options": _checked(options, mode),
    }
    if left_out := rnn_left_out(modules_near(model)):
        warnings.warn(f"mstpass.compile: {left_out}", stacklevel=2)
    if isinstance(model, nn.Module):
        _name_default_losses(model)
        whether_packed = functools.partial(says_whether_packed, model, signature_of=model.forward)
        compile_in_place(model, whether_packed, **given)
        return model
    compiled: Any = torch.compile(model, **given)
    return compiled


def _name_default_losses(model: nn.Module) -> None:
    """Name the loss of Hugging Face models whose class does not say which loss it has, as GPT-2's.

    Their loss is the one named here. But transformers warns that it takes that one, and Dynamo ends
    a graph where something is logged, so the logits would be parted from their loss.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for module in model.modules():
        if isinstance(module, library.PreTrainedModel) and module.loss_type is None:
            module.loss_type = "ForCausalLM"


def uncompile(model: M) -> M:
    """Undo ``mstpass.compile(model)``, or ``model.compile(...)``, and return the module.

    The module runs again as before. What was compiled is freed when nothing else uses it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"mstpass.uncompile takes a module that was compiled in place, not {model!r}; of a "
            "function, call the one that you gave to mstpass.compile"
        )
    uncompile_in_place(model)
    return model


def _checked(options: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """The options for ``torch.compile``, which takes no mode beside them.

    Raises:
        OptionError: there is something wrong with them.
    """
    for name in ("options", "backend"):
        if name in options:
            raise OptionError(
                f"mstpass.compile takes no {name}=: give each option of the backend by its name, "
                "as in mstpass.compile(model, memory_budget=0.0)"
            )
    parsed = Options.parse(options)
    if mode is None:
        return dict(options)
    try:
        of_mode = options_of_mode(mode)
    except RuntimeError as error:
        raise OptionError(f"unknown mode {mode!r}: {error}") from None
    return {**options, "inductor": {**of_mode, **parsed.inductor_patches}}
