"""Options of one ``torch.compile(..., backend="mst", options={...})``: parsed once, frozen.

Precedence: ``options`` > ``MSTPASS_<OPTION>`` environment variable > default.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from mstpass.byte_sizes import parse_bytes
from mstpass.problem.solver_registry import solver_names

ENV_PREFIX = "MSTPASS_"


class OptionError(ValueError):
    """An option's name or value is wrong; the message names it and says what is accepted."""


class NotAvailableYet(OptionError):
    """A valid option whose machinery this version does not have."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user can ask for. See docs/options.md for each option's meaning."""

    memory_budget: str | float | int = "auto"
    reserve: str | int = "auto"
    free_overhead: float = 0.02
    chunk: str = "auto"
    chunk_tokens: int | None = None
    solver: str = "auto"
    reconstruct: str = "exact"
    accumulate: str = "float32"
    logits: str = "keep"
    strict: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()
    report: str | None = None

    @staticmethod
    def parse(
        given: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
    ) -> Options:
        """Options from a user's mapping over the environment over the defaults.

        Raises:
            OptionError: unknown name or bad value (a ``ValueError``).
        """
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options must be a mapping, got {type(given).__name__}")
        names = [f.name for f in dataclasses.fields(Options)]
        values: dict[str, Any] = {}
        for name in names:
            text = environ.get(ENV_PREFIX + name.upper())
            if text is not None:
                values[name] = _check(name, from_text(text), f"{ENV_PREFIX}{name.upper()}")
        for name, value in (given or {}).items():
            if name not in names:
                raise OptionError(_unknown(str(name), names))
            values[name] = _check(name, value, f"option {name!r}")
        return Options(**values)

    @property
    def frees_memory_for_time(self) -> bool:
        """Whether plans may do work twice: under any budget but the free plan's."""
        return self.memory_budget not in ("auto", "free", 1.0)

    @property
    def inductor_patches(self) -> dict[str, Any]:
        return dict(self.inductor)

    def fingerprint(self) -> str:
        """A stable hash of everything that can change what the pass does."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()


def _unknown(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown mst option {name!r}{hint} Known options: {', '.join(names)}."


def from_text(text: str) -> Any:
    """Text of the environment or the command line as JSON where it is JSON, as itself otherwise."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _check(name: str, value: Any, where: str) -> Any:
    return _CHECKS[name](value, where)


def _one_of(*choices: str, later: tuple[str, ...] = ()) -> Any:
    def check(value: Any, where: str) -> str:
        if value in later and isinstance(value, str):
            raise NotAvailableYet(f"{where}: {value!r} is not available yet in this version")
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where} must be one of {list(choices)}, got {value!r}.{hint}")
        return value

    return check


def _memory_budget(value: Any, where: str) -> str | float | int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OptionError(
            f"{where} must be 'auto', 'free', a float in [0, 1], bytes or a size like '24GiB', "
            f"got {value!r}"
        )
    if isinstance(value, str):
        if value in ("auto", "free"):
            return value
        if parse_bytes(value) is None:
            raise OptionError(
                f"{where}: {value!r} is neither 'auto', 'free' nor a size like '24GiB'"
            )
        return value
    if isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise OptionError(f"{where}: a float budget lies in [0, 1], got {value!r}")
        return value
    if value < 1:
        raise OptionError(
            f"{where}: bytes must be at least 1, got {value}; the least memory is 0.0, a float"
        )
    return value


def _reserve(value: Any, where: str) -> str | int:
    if value == "auto":
        return "auto"
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise OptionError(f"{where} must be bytes or a size like '4GiB', got {value!r}")
    return size


def _free_overhead(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10:
        raise OptionError(f"{where} must be a fraction of at least 0, got {value!r}")
    return float(value)


def _chunk_tokens(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{where} must be an int of at least 1 or None, got {value!r}")
    return value


def _strict(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{where} must be True or False, got {value!r}")
    return value


def _inductor(value: Any, where: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise OptionError(f"{where} must map Inductor config names to values, got {value!r}")
    from mstpass.torch_internals.settings import inductor_settings, is_inductor_setting

    known = inductor_settings()
    for key in value:
        if key not in known and not is_inductor_setting(key):  # aliases are not copied
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where}: Inductor has no config {key!r}{hint}")
    return tuple(sorted(value.items()))


def _solver(value: Any, where: str) -> str:
    result: str = _one_of(*solver_names())(value, where)
    return result


def _report(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise OptionError(f"{where} must be a path or None, got {value!r}")
    return None if value is None else os.fspath(value)


_CHECKS: dict[str, Any] = {
    "memory_budget": _memory_budget,
    "reserve": _reserve,
    "free_overhead": _free_overhead,
    "chunk": _one_of("auto", "off"),
    "chunk_tokens": _chunk_tokens,
    "solver": _solver,
    "reconstruct": _one_of("exact", "tolerant", "off"),
    "accumulate": _one_of("float32", "input"),
    "logits": _one_of("keep", later=("drop",)),
    "strict": _strict,
    "inductor": _inductor,
    "report": _report,
}
