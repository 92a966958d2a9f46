"""Files of plain data: read within limits and without running anything; written whole or not.

    value = read_json(path)          lists, dicts, strings and numbers; gzip is unpacked
    plan = decoded(Plan, value)      checked against the annotations of the dataclass
    replace_text(path, text)         other processes read the old text or the new one
    printable(name)                  a name as it can stand in a terminal and in XML

A file that claims to be small and unpacks to gigabytes, a nesting of a million lists, a number that
is none, or a string where a number belongs is a ``ValueError`` or a ``TypeError`` with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import re
import reprlib
import sys
import threading
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26  # of JSON text; the report of 64 layers has 2 MB
MOST_CONFIG_BYTES = 2**20  # of what people write by hand
_MOST = {int: 2**63 - 1, float: sys.float_info.max}
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_GZIP = b"\x1f\x8b"


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """The value in a JSON file, which gzip may have packed.

    Raises:
        ValueError: the file holds no JSON, a number that is not finite, or too much of it.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if data[:2] == _GZIP and len(data) <= most_bytes:
        data = _unpacked(data, most_bytes)
    if len(data) > most_bytes:
        raise ValueError(f"too large: more than {most_bytes / 2**20:g} MiB of text")
    try:
        return json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def _unpacked(data: bytes, most_bytes: int) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as file:
            return file.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not JSON: {error}") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def printable(text: str) -> str:
    """The text without what a terminal would obey and XML cannot hold: each such sign as U+FFFD.

    These are control characters but for tab and newline, signs that turn the direction of writing,
    and halves of surrogate pairs.
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that whoever reads it finds the old text or the new one, and never a part.

    Raises:
        OSError: it cannot be written; then the old text stays.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# ---- values with types -------------------------------------------------------------------------
Decode = Callable[[Any], Any]


def decoded(kind: Any, value: Any, *, newer: bool = False) -> Any:
    """A JSON value as the type that an annotation names.

    Dataclasses are objects, tuples are lists; a field that is left out has its default.

    Args:
        newer: fields that the dataclasses do not have are left out, instead of refused.

    Raises:
        TypeError, ValueError: the value is of another type, or the dataclass refuses it.
    """
    return _decoder(kind, newer)(value)


@functools.cache
def _decoder(kind: Any, newer: bool) -> Decode:
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, newer)
    if kind in (str, int, bool, float):
        return functools.partial(_scalar, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # of one type and None
        (inner,) = (_decoder(each, newer) for each in arguments if each is not type(None))
        return lambda value: None if value is None else inner(value)
    assert origin is tuple, f"{kind} is not known here"
    if arguments[-1] is Ellipsis:
        return _list(arguments[0], _decoder(arguments[0], newer))
    return _row([_decoder(each, newer) for each in arguments])


def _scalar(kind: Any, value: Any) -> Any:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, got {reprlib.repr(value)}")
    if kind in _MOST and not abs(value) <= _MOST[kind]:  # nor NaN
        raise ValueError(f"expected a finite {kind.__name__}, got {reprlib.repr(value)}")
    return kind(value)


def _list(kind: Any, item: Decode) -> Decode:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {reprlib.repr(value)}")
        if kind in (str, int) and set(map(type, value)) <= {kind}:  # most lists are such
            if kind is int and value:
                item(max(value, key=abs))
            return tuple(value)
        return tuple(map(item, value))

    return decode


def _row(items: Sequence[Decode]) -> Decode:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise TypeError(f"expected {len(items)} values, got {reprlib.repr(value)}")
        return tuple(item(each) for item, each in zip(items, value, strict=True))

    return decode


def _dataclass(kind: Any, newer: bool) -> Decode:
    fields = {n: _decoder(each, newer) for n, each in typing.get_type_hints(kind).items()}

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(
                f"expected an object with the fields of {kind.__name__}, got {reprlib.repr(value)}"
            )
        unknown = [name for name in value if name not in fields]
        if unknown and not newer:
            raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
        return kind(**{n: fields[n](field) for n, field in value.items() if n in fields})

    return decode
