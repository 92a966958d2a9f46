"""The table of probes: one for each part of torch's private APIs that mstpass uses.

A *probe* asks an installed torch whether APIs are there: their names and the names of their
parameters. What they do is checked in the tests (tests/torch_probes/).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mstpass.torch_internals.versions import find

# Of each probe its name, the file of this package that it is for, what is lost where it fails, what
# that part is for, and where in torch the APIs are: a module or class, with what is needed of it.
_TABLE = Path(__file__).with_name("probes.txt").read_text()
# What not every build of torch has; without it there is nothing to ask for.
_APPLIES: dict[str, Callable[[], bool]] = {
    "fsdp_states": torch.distributed.is_available,
    "data_parallel": torch.distributed.is_available,
    "pretended_ranks": torch.distributed.is_available,
}
_COMMA = re.compile(r", (?![^(]*\))")  # none between parameters


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a part of an adapter needs of torch.

    Attributes:
        adapter: the file of mstpass/torch_internals, without ``.py``.
        lost: what mstpass lacks without it.
        purpose: what the part is for.
        apis: as versions.py describes them.
    """

    name: str
    adapter: str
    lost: str
    purpose: str
    apis: tuple[str, ...]

    def require(self) -> None:
        """Check that all APIs exist and have their parameters.

        Raises:
            TorchChangedError: one does not.
        """
        for api in self.apis if _APPLIES.get(self.name, lambda: True)() else ():
            find(api)


def _rows() -> Iterator[Probe]:
    for row in re.split(r"\n(?=\w)", _TABLE.strip()):
        head, purpose, *where = re.split(r"\n {4}(?=\w)", row)
        name, adapter, lost = head.split()
        homes = (" ".join(text.split()).split(": ") for text in where)
        apis = [
            f"{home}.{api.replace(' | ', f' | {home}.')}"
            for home, names in homes
            for api in _COMMA.split(names)
        ]
        yield Probe(name, adapter, lost, purpose, tuple(apis))


PROBES = tuple(_rows())
