"""What the installed torch is and has, and the errors that say what it lacks.

A version is in ``CHECKED`` once all probes and the tests of hooks have passed on it;
docs/versions.md says what else has been run. An API is a dotted name, with the parameters that are
passed by name in parentheses; ``a | b`` stands for an API that has had several names.

Files outside of this package name no version. What differs between versions for them:

=========== =======================================================================================
2.11        attention in float64 says that its logarithms are float32 (regions/attention.py); a
            profile of one cycle warns (measure.py); nodes that wait for others run under Inductor
            alone (fuzz/compiled.py); offsets of ``as_strided`` count from a subgraph's input
            (loops/lowering.py)
up to 2.12  Inductor scatters constants in the default dtype (normalize/plain_values.py) and
            holds kernels on the CPU to the limits of a GPU (memory/kernels.py, simulate_graph.py)
up to 2.13  a scatter may write over expanded zeros (schedule/finished_graphs.py);
            transformers builds masks under Dynamo (integrations/transformers_masks.py)
up to 2.14  a loop's carries are in the order of their first write (loops/lowering.py)
from 2.13   torch has a chunked head of its own: ``linear_cross_entropy``
from 2.15   the op that draws seeds has the metadata of another (graph/recompute_rules.py);
            ``Function.apply`` has no frame (linter/call_stack.py); products free their workspaces:
            ``frees_cublas_workspaces``
=========== =======================================================================================
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from pkgutil import resolve_name
from typing import Any

import torch

CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")
ADVICE = (
    "`python -m mstpass.torch_internals` runs all checks of the installed torch and names what it "
    "lacks"
)


class UncheckedTorchWarning(UserWarning):
    """The installed torch is newer than any that mstpass was checked on."""


class TorchChangedError(RuntimeError):
    """The installed torch lacks a private API, or has changed it; ``wrong`` says which and how."""

    def __init__(self, wrong: str):
        versions = ", ".join(CHECKED)
        super().__init__(
            f"torch {installed()}: {wrong} (mstpass was checked with torch {versions})"
        )


class LostLoopError(RuntimeError):
    """A loop that was planned is not in what torch compiled, or not where it must be."""


class NotCountedError(ValueError):
    """A graph has what is not counted: other subgraphs than loops, sizes that depend on data."""


# ---- which version -----------------------------------------------------------------------------
def installed() -> str:
    """The version of torch, such as ``2.13.0+cpu``."""
    return str(torch.__version__)


def has_release(release: str) -> bool:
    """Whether the installed torch is of this release, such as ``2.15``, or of a later one."""
    return _release(installed()) >= _release(release)


def is_newer(version: str) -> bool:
    """Whether a version of torch is a later release than any that was checked."""
    return _release(version) > max(map(_release, CHECKED))


@functools.cache
def warn_if_newer(version: str) -> None:
    """Warn of a torch that is newer than any that was checked; once in a process."""
    if is_newer(version):
        warnings.warn(
            f"mstpass was checked with torch {CHECKED[0]} to {CHECKED[-1]}, and this is torch "
            f"{version}. Each graph is checked while it compiles; one in which this torch left out "
            f"a part of mstpass is compiled by Inductor alone, and you are told. {ADVICE}.",
            UncheckedTorchWarning,
            stacklevel=3,
        )


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number, also of "2.16.0a0+git1234"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def frees_cublas_workspaces() -> bool:
    """Whether each product of cuBLAS allocates its workspace and frees it afterwards."""
    return has_release("2.15")


def linear_cross_entropy() -> tuple[Any, Any] | None:
    """torch's own chunked head and the class of its options; None if it has none."""
    found = find_or_none("torch.nn.functional.linear_cross_entropy")
    options = find_or_none("torch.nn.LinearCrossEntropyOptions")
    return None if found is None or options is None else (found, options)


# ---- which APIs --------------------------------------------------------------------------------
def find(api: str) -> Any:
    """An API; of several names that it has had, the first that is there.

    Raises:
        TorchChangedError: it is missing, or lacks a parameter.
    """
    wrong = []
    for name in api.split(" | "):
        path, _, parameters = name.rstrip(")").partition("(")
        try:
            found = resolve_name(path)
        except (ImportError, AttributeError):
            wrong.append(f"{path} is missing")
            continue
        known = inspect.signature(found).parameters if parameters else ()
        missing = [p for p in parameters.split(", ") if p and p not in known]
        if not missing:
            return found
        wrong.append(f"{path} has no parameter {', '.join(missing)}")
    raise TorchChangedError("; ".join(wrong))


def find_or_none(api: str) -> Any:
    """An API that not every version has."""
    try:
        return find(api)
    except TorchChangedError:
        return None


def expect(holds: bool, wrong: str) -> None:
    """Check a behavior of torch; ``wrong`` says what is different where it does not hold.

    Raises:
        TorchChangedError: it does not hold.
    """
    if not holds:
        raise TorchChangedError(wrong)
