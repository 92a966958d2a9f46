"""A row of the table of probes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from mstpass.torch_internals.versions import find

# What is lost where a probe fails.
LOOPS = "loops: every step compiles as under Inductor"
SCHEDULE = "peaks and order of Inductor's schedule: budgets are held to simulated peaks alone"
LINT = "the linter"
TRACES = "steps that are traced without running: the explainer, the planner and the linter"
NO_GPU = "plans and code for a GPU that is not there"
_COMMA = re.compile(r", (?![^(]*\))")  # none between parameters


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a part of an adapter needs of torch.

    Attributes:
        purpose: what the part is for.
        adapter: the file of mstpass/torch_internals that has it, without ``.py``.
        apis: as versions.py describes them.
        lost: what mstpass does without it.
        check: a check of behavior, which gets the adapter.
        applies: whether this build of torch has what is asked for; else there is nothing to probe.
    """

    name: str
    purpose: str
    adapter: str
    apis: tuple[str, ...]
    lost: str
    check: Callable[[Any], None]
    applies: Callable[[], bool]

    def require(self) -> None:
        """Check that all APIs exist and have their parameters.

        Raises:
            TorchChangedError: one does not.
        """
        for api in self.apis if self.applies() else ():
            find(api)

    def run(self) -> None:
        """Check the APIs, and what they do.

        Raises:
            Exception: torch lacks one, or does something else.
        """
        adapter = importlib.import_module(f"mstpass.torch_internals.{self.adapter}")
        self.require()
        if self.applies():
            self.check(adapter)


def probe(
    adapter: str, *where: str, lost: str = LOOPS, applies: Callable[[], bool] = lambda: True
) -> Callable[[Callable[[Any], None]], Probe]:
    """Make a probe of a check, whose name is the probe's and whose docstring is its purpose.

    Args:
        where: a module or class of torch each, with what is needed of it: ``torch.a: b(x, y), c``.
    """
    apis = [f"{home}.{name.replace(' | ', f' | {home}.')}" for home, name in _split(where)]

    def row(check: Callable[[Any], None]) -> Probe:
        purpose = (inspect.getdoc(check) or "").partition("\n")[0]
        return Probe(check.__name__, purpose, adapter, tuple(apis), lost, check, applies)

    return row


def _split(where: tuple[str, ...]) -> list[tuple[str, str]]:
    parts = (text.split(": ", 1) for text in where)
    return [(home, name) for home, names in parts for name in _COMMA.split(names)]
