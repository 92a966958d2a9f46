"""Write a ``CutProblem`` as JSON and read it: for tests, bug reports, solvers in other languages.

A dataclass becomes an object with its fields; a field that has its default value is left out. A
file whose path ends in ``.gz`` is compressed. Equal problems give equal bytes. Nothing here needs
PyTorch.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from mstpass.plain_data import decoded, read_json

T = TypeVar("T")

FORMAT, VERSION = "mstpass cut problem", 4


class ProblemFileError(ValueError):
    """A file does not hold a cut problem; the message names the file and says what is wrong."""


def to_json(problem: object, path: str | os.PathLike[str]) -> None:
    """Write a problem; compressed if the path ends in ``.gz``."""
    record = {"format": FORMAT, "version": VERSION, **encoded(problem)}
    data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    target = Path(path)
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def from_json(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a file that ``to_json`` wrote, as an instance of the dataclass ``kind``.

    Raises:
        ProblemFileError: the file holds something else, or another version of the format.
        OSError: the file cannot be read.
    """
    try:
        record = read_json(path)
    except ValueError as error:
        raise ProblemFileError(f"{path}: {error}") from None
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise ProblemFileError(f"{path}: not a cut problem: its 'format' is not {FORMAT!r}")
    version = record.pop("version", None)
    if version != VERSION:
        raise ProblemFileError(f"{path}: version {version!r}; this mstpass reads {VERSION}")
    try:
        problem: T = decoded(kind, record)
    except (TypeError, ValueError) as error:
        raise ProblemFileError(f"{path}: {error}") from None
    return problem


def encoded(value: Any) -> Any:
    """A dataclass as an object of JSON, without the fields that have their defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: encoded(v) for f, v in fields if v != f.default}
    return [encoded(item) for item in value] if isinstance(value, tuple) else value
