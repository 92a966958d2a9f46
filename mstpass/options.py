"""The options of one ``torch.compile(..., backend="mst", options={...})``.

They are parsed and checked once and then frozen. A value in ``options`` overrides the environment
variable ``MSTPASS_<OPTION>``, which overrides the default. Each option has one function below that
checks its value; ``_CHECKS`` lists them.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mstpass.byte_sizes import parse_bytes
from mstpass.problem.solver_registry import solver_names

ENV_PREFIX = "MSTPASS_"


class OptionError(ValueError):
    """An option's name or value is wrong; the message names it and says what is accepted."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user can ask for; docs/options.md explains each option.

    ``inductor`` holds the user's Inductor config as sorted pairs, so that options can be hashed.
    """

    memory_budget: str | float | int = "auto"
    reserve: str | int = "auto"
    free_overhead: float = 0.02
    chunk: str = "auto"
    chunk_tokens: int | None = None
    solver: str = "auto"
    reconstruct: str = "exact"
    accumulate: str = "auto"
    logits: str = "keep"
    repeat_collectives: str = "auto"
    lengths: tuple[int, ...] = ()
    host_budget: int = 0
    strict: bool = False
    verify: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()
    report: str | None = None

    @staticmethod
    def parse(
        given: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
    ) -> Options:
        """The options that a user gave, else those of the environment, else the defaults.

        Raises:
            OptionError: an unknown name or a wrong value (a ``ValueError``).
        """
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options must be a mapping, got {type(given).__name__}")
        names = [field.name for field in dataclasses.fields(Options)]
        values: dict[str, Any] = {}
        for name in names:
            variable = ENV_PREFIX + name.upper()
            if variable in environ:
                values[name] = _CHECKS[name](parse_value(environ[variable]), variable)
        for name, value in (given or {}).items():
            if name not in names:
                hint = _did_you_mean(str(name), names)
                known = ", ".join(names)
                raise OptionError(f"unknown mst option {name!r}.{hint} Known options: {known}.")
            values[name] = _CHECKS[name](value, f"option {name!r}")
        return Options(**values)

    @property
    def repeats_collectives(self) -> bool:
        """Whether backward may run collectives of the forward again."""
        return self.repeat_collectives == "auto"

    @property
    def may_choose(self) -> bool:
        """Whether mstpass itself chooses loops and saved values, and not the user."""
        return self.solver in ("auto", "peak_search") and self.chunk_tokens is None

    @property
    def inductor_patches(self) -> dict[str, Any]:
        """The user's Inductor config as a dict."""
        return dict(self.inductor)

    def fingerprint(self) -> str:
        """A hash that is the same for equal options in every process."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()


def parse_value(text: str) -> Any:
    """The value of text from the environment or the command line.

    JSON text is read as JSON, ``True``, ``False`` and ``None`` as in Python; other text stays as it
    is.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'chunk'?`` if a known name is close, else ``""``."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


ROOM = 4  # the longest batch of a range of lengths, relative to that of the range before


# ---- checks ------------------------------------------------------------------------------------
# Each gets a value and the words for where it was given, and returns the value or raises.
Check = Callable[[Any, str], Any]


def _one_of(*choices: str) -> Check:
    """A check for one of some words."""

    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            hint = _did_you_mean(str(value), choices)
            raise OptionError(f"{where} must be one of {list(choices)}, got {value!r}.{hint}")
        return value

    return check


def _memory_budget(value: Any, where: str) -> str | float | int:
    accepted = "'auto', 'free', a float from 0.0 to 1.0, a number of bytes, or a size like '24GiB'"
    if isinstance(value, str) and (value in ("auto", "free") or parse_bytes(value) is not None):
        return value
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 1:
            return value
        raise OptionError(
            f"{where}: a number of bytes must be at least 1, got {value}; "
            "for the least memory give 0.0, a float"
        )
    raise OptionError(f"{where} must be {accepted}, got {value!r}")


def _reserve(value: Any, where: str) -> str | int:
    return "auto" if value == "auto" else _bytes(value, where, "'auto', ")


def _bytes(value: Any, where: str, or_else: str = "") -> int:
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise OptionError(
            f"{where} must be {or_else}a number of bytes, or a size like '4GiB', got {value!r}"
        )
    return size


def _free_overhead(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10:
        raise OptionError(
            f"{where} must be a fraction of the step's time, at least 0 and below 10, got {value!r}"
        )
    return float(value)


def _chunk_tokens(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{where} must be None or an int of at least 1, got {value!r}")
    return value


def _solver(value: Any, where: str) -> Any:
    return _one_of(*solver_names())(value, where)  # users may have registered more


def _lengths(value: Any, where: str) -> tuple[int, ...]:
    """The ends of the ranges of lengths: those given, or those between two lengths."""
    accepted = "a range such as '256..131072', or a list of lengths that ascend"
    if isinstance(value, str):
        parts = value.split("..")
        if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
            raise OptionError(f"{where} must be {accepted}, got {value!r}")
        first, last = map(int, parts)
        if not 2 <= first <= last:
            raise OptionError(f"{where}: lengths ascend from at least 2, got {first}..{last}")
        ends = (ROOM**k for k in itertools.count())
        value = [*(end for end in itertools.takewhile(last.__gt__, ends) if end > first), last]
    if not isinstance(value, list | tuple) or not all(type(n) is int for n in value):
        raise OptionError(f"{where} must be {accepted}, got {value!r}")
    if any(n < 2 for n in value) or list(value) != sorted(set(value)):
        raise OptionError(f"{where}: lengths ascend from at least 2, got {list(value)}")
    return tuple(value)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{where} must be True or False, got {value!r}")
    return value


def _inductor(value: Any, where: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise OptionError(
            f"{where} must be a dict from names of Inductor's config to values, got {value!r}"
        )
    # Importing Inductor takes seconds, and the solvers' options need no torch.
    from mstpass.torch_internals.settings import inductor_settings, is_inductor_setting

    known = inductor_settings()
    for key in value:
        if key not in known and not is_inductor_setting(key):  # the settings lack aliases
            hint = _did_you_mean(key, sorted(known))
            raise OptionError(f"{where}: Inductor's config has no {key!r}.{hint}")
    return tuple(sorted(value.items()))


def _report(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise OptionError(f"{where} must be None or a path, got {value!r}")
    return None if value is None else os.fspath(value)


_CHECKS: dict[str, Check] = {
    "memory_budget": _memory_budget,
    "reserve": _reserve,
    "free_overhead": _free_overhead,
    "chunk": _one_of("auto", "blocks", "heads", "tokens", "off"),
    "chunk_tokens": _chunk_tokens,
    "solver": _solver,
    "reconstruct": _one_of("exact", "tolerant", "off"),
    "accumulate": _one_of("auto", "float32", "input"),
    "repeat_collectives": _one_of("auto", "off"),
    "logits": _one_of("keep", "drop"),
    "lengths": _lengths,
    "host_budget": _bytes,
    "strict": _switch,
    "verify": _switch,
    "inductor": _inductor,
    "report": _report,
}
