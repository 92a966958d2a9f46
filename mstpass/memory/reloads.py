"""How often backward copies a value back from the host, and which ops read each copy.

A value is used by the ops that read it, itself or through its *cheap chain*: views and pointwise
ops that are computed from it and little else, which Inductor computes inside the kernels that read
them. If an op so long lies between two uses that a second copy is nothing against its time, the
value is copied back once for the uses before it and once for those behind: its memory is free in
between. The later uses read copies of the chain. ::

    x = reload(host);  n = norm(x.float());  attention(n), 60 s;  gradient of the norm(x.float())

A gradient of a norm, behind attention's backward over a long sequence, is such a use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from mstpass.problem.op import POINTWISE, VIEW, Op
from mstpass.walk import walk_once

TOLERABLE_STALL = 0.02  # the part of an op's time that waiting for a copy may take beside it
_SMALL = 1 / 64  # of the value's bytes: other operands of its chain


@dataclasses.dataclass(frozen=True)
class Reload:
    """One copy of a value back to the device.

    Attributes:
        readers: the positions of the ops that use it, in order.
        chain: the positions of the ops of its cheap chain that these are computed from.
        again: it is not the value's first copy: the readers use copies of the chain.
    """

    name: str
    bytes: int
    readers: tuple[int, ...]
    chain: tuple[int, ...] = ()
    again: bool = False

    @property
    def first_use(self) -> int:
        """The position of the first op that needs it."""
        return self.readers[0] if self.again else min((*self.readers, *self.chain))


@dataclasses.dataclass(frozen=True)
class Reloads:
    """All copies of a backward, by their first uses.

    Attributes:
        unread: the positions of ops of chains that nothing reads any more, but for their copies.
    """

    copies: tuple[Reload, ...]
    unread: frozenset[int]


def reloads(
    ops: Sequence[Op],
    times_us: Sequence[float],
    sizes: Mapping[str, int],
    cheap: Set[str],
    free: Set[str],
    bytes_per_us: float,
) -> Reloads:
    """The copies of a backward's values.

    Args:
        sizes: the bytes of each value to be copied back; it is an input among the ops.
        cheap: names of ops that may be computed twice.
        free: names of inputs that are in memory all along.
    """
    bytes_of = {op.name: 0 if op.name in free else op.bytes for op in ops}
    chains, uses_of = _chains_and_uses(ops, sizes, cheap, bytes_of)
    found: list[Reload] = []
    unread: set[int] = set()
    for name, size in sizes.items():
        chain, uses = chains[name], uses_of[name]
        for number, group in enumerate(_groups(uses, times_us, size / bytes_per_us)):
            needed = _needed(ops, group, chain)
            found.append(Reload(name, size, tuple(group), needed, again=number > 0))
            if not number:
                unread.update(set(chain.values()) - set(needed))
        if not uses:  # loops copy its rows from the host
            unread.update(chain.values())
    found.sort(key=lambda reload: reload.first_use)
    return Reloads(tuple(found), frozenset(unread))


def _chains_and_uses(
    ops: Sequence[Op], sizes: Mapping[str, int], cheap: Set[str], bytes_of: Mapping[str, int]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[int, bool]]]:
    """Of each value the positions of the ops of its cheap chain, by name, and of those that use it.

    Each use with whether it reads the value's own memory. What a call reads of the chain besides is
    in memory of its own before the call. What is computed from several values is in no chain,
    because each value is copied back in its own time.
    """
    chains: dict[str, dict[str, int]] = {name: {} for name in sizes}
    uses: dict[str, dict[int, bool]] = {name: {} for name in sizes}
    value_of = {name: name for name in sizes}  # of the ops of chains too
    own = set(sizes)  # the values and views of them
    for i, op in enumerate(ops):
        read = {value_of[name] for name in op.inputs if name in value_of}
        others = sum(bytes_of.get(name, 0) for name in op.inputs if name not in value_of)
        is_cheap = op.name in cheap and op.kind in (POINTWISE, VIEW) and len(read) == 1
        for value in read:
            if is_cheap and others <= _SMALL * sizes[value]:
                chains[value][op.name], value_of[op.name] = i, value
                if op.kind == VIEW and not own.isdisjoint(op.inputs):
                    own.add(op.name)
            else:
                read_here = (name for name in op.inputs if value_of.get(name) == value)
                uses[value][i] = not own.isdisjoint(read_here)
    return chains, uses


def _groups(uses: Mapping[int, bool], times_us: Sequence[float], copy_us: float) -> list[list[int]]:
    """The uses, divided where a long op runs between two of them."""
    groups: list[list[int]] = []
    free_from = 0  # behind the last use, or with it where it does not read the value's own memory
    for position, reads_own in uses.items():
        between_us = max(times_us[free_from:position], default=0.0)
        if groups and copy_us > TOLERABLE_STALL * between_us:
            groups[-1].append(position)
        else:
            groups.append([position])
        free_from = position + reads_own
    return groups


def _needed(ops: Sequence[Op], readers: Iterable[int], chain: Mapping[str, int]) -> tuple[int, ...]:
    """The positions of the ops of a chain that these readers are computed from."""
    operands = lambda i: [chain[name] for name in ops[i].inputs if name in chain]
    return tuple(sorted(walk_once((at for i in readers for at in operands(i)), operands)))
