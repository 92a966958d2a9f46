"""Write a ``CutProblem`` as JSON and read it: for tests, bug reports, solvers in other languages.

A dataclass becomes an object with its fields; a field that has its default value is left out. A
file whose path ends in ``.gz`` is compressed. Equal problems give equal bytes. Nothing here needs
PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import typing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FORMAT, VERSION = "mstpass cut problem", 1


class ProblemFileError(ValueError):
    """A file does not hold a cut problem; the message names the file and says what is wrong."""


def to_json(problem: object, path: str | os.PathLike[str]) -> None:
    """Write a problem; compressed if the path ends in ``.gz``."""
    record = {"format": FORMAT, "version": VERSION, **_encoded(problem)}
    data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    target = Path(path)
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def from_json(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a file that ``to_json`` wrote, as an instance of the dataclass ``kind``.

    Raises:
        ProblemFileError: the file holds something else, or another version of the format.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        record = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise ProblemFileError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise ProblemFileError(f"{path}: not a cut problem: its 'format' is not {FORMAT!r}")
    version = record.pop("version", None)
    if version != VERSION:
        raise ProblemFileError(f"{path}: version {version!r}; this mstpass reads {VERSION}")
    try:
        problem: T = _decoded(kind, record)
    except (TypeError, ValueError) as error:
        raise ProblemFileError(f"{path}: {error}") from None
    return problem


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: _encoded(v) for f, v in fields if v != f.default}
    return [_encoded(item) for item in value] if isinstance(value, tuple) else value


def _decoded(kind: Any, value: Any) -> Any:
    """A JSON value, converted to the type that an annotation names."""
    if dataclasses.is_dataclass(kind):
        return _decoded_fields(kind, value)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r}")
        item = typing.get_args(kind)[0]
        return tuple(_decoded(item, element) for element in value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return kind(value)


def _decoded_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object with the fields of {kind.__name__}, got {value!r}")
    types_of = _types(kind)
    unknown = [name for name in value if name not in types_of]
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: _decoded(types_of[name], field) for name, field in value.items()})


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
