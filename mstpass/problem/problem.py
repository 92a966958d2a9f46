"""The partition problem as plain data: solvers see no FX graph.

A value that backward needs is available there if it is free (an input of the step), saved, or if
all its inputs are available and it may be recomputed. A plan picks a mode for each region, which
decides its loops (modes.py), and the saved set; what it needs of memory is simulated
(simulate.py), what it costs in time is the sum over what backward does again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from mstpass.problem import json_format
from mstpass.problem.op import POINTWISE, Op

MUST_SAVE, MUST_RECOMPUTE = "must_save", "must_recompute"
PREFER_RECOMPUTE = "prefer_recompute"
LOOP = "loop:"  # before a name: see loop_name()
UNFINISHED = ":unfinished"  # behind a name: see unfinished()
RECOMPUTED = (MUST_RECOMPUTE, PREFER_RECOMPUTE)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Value(Op):
    """One forward value, or one op of the backward.

    Attributes:
        us: time that computing it takes, in microseconds, by the cost model.
        free: available in backward at no cost.
        heavy: slow to recompute (a matmul, attention, the result of a checkpointed region).
        pinned: must not be recomputed at all (a loop that computes gradients, a random draw).
        savable: may be saved; a view may not, its base is saved instead, so that no storage
            crosses twice.
        needed: backward uses it directly.
        forward: an output of the forward comes from it; others only serve the backward.
        tag: the user's checkpoint policy, where it binds (tags.py): ``MUST_SAVE`` is why a value is
            pinned; ``MUST_RECOMPUTE`` and ``PREFER_RECOMPUTE`` are why it is not savable, and let
            backward recompute it though it is heavy.
    """

    us: float = 0.0
    free: bool = False
    heavy: bool = False
    pinned: bool = False
    savable: bool = True
    needed: bool = False
    forward: bool = True
    tag: str = ""

    def __post_init__(self) -> None:
        if self.tag not in ("", MUST_SAVE, *RECOMPUTED):
            raise ValueError(f"{self.name} has the unknown tag {self.tag!r}")
        if self.tag == MUST_SAVE and not self.pinned:
            raise ValueError(f"{self.name} must be saved, but is not pinned")
        if self.tag in RECOMPUTED and (self.savable or self.pinned):
            raise ValueError(f"{self.name} is to be recomputed, but is savable or pinned")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a loop returns in a node's place.

    Attributes:
        bytes: of the loop's own buffer, which may be wider than the node's.
        scale: a node that the result is multiplied by after the loop; empty for none.
        cast: to the node's dtype after the loop, from a wider one that the sum is kept in.
    """

    node: str
    bytes: int
    scale: str = ""
    cast: bool = False

    @property
    def name(self) -> str:
        """Of what the loop returns: the node's own, unless that comes from it after the loop."""
        return unfinished(self.node) if self.scale or self.cast else self.node

    def finished(self, node: Value) -> Value:
        """The node itself, where it comes from the result after the loop."""
        inputs = (self.name, *([self.scale] if self.scale else []))
        return dataclasses.replace(node, inputs=inputs, kind=POINTWISE, heavy=False, us=0.0)


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop over chunks, in the place of its members.

    Attributes:
        needs: the nodes it reads whole or in slices.
        inner_bytes: what one chunk needs besides the results.
        us: time of all chunks.
    """

    name: str
    members: tuple[str, ...]
    needs: tuple[str, ...]
    results: tuple[Result, ...]
    inner_bytes: int
    us: float


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to run a region; without loops it stays as it is."""

    name: str
    loops: tuple[Loop, ...] = ()


@dataclasses.dataclass(frozen=True)
class RegionModes:
    """The modes that a region has; the first is taken where a plan names none."""

    region: str
    modes: tuple[Mode, ...]

    def __post_init__(self) -> None:
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"region {self.region} needs modes of different names, has {names}")

    def __getitem__(self, name: str) -> Mode:
        for mode in self.modes:
            if mode.name == name:
                return mode
        known = ", ".join(mode.name for mode in self.modes)
        raise KeyError(f"region {self.region} has no mode {name!r}, only {known}")


@dataclasses.dataclass(frozen=True)
class CutProblem:
    """All values of a step, forward and backward each in topological order.

    Attributes:
        values: the forward's, and what backward computes without a tangent.
        backward: ops that need a tangent, the tangents themselves included.
        outputs: values that the forward returns.
        gradients: what the backward returns.
        regions: the choices of loops; none once they are made.
        recompute_heavy: allow heavy values to be recomputed, for less memory and more time.
    """

    values: tuple[Value, ...]
    recompute_heavy: bool = False
    backward: tuple[Value, ...] = ()
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    regions: tuple[RegionModes, ...] = ()

    def keeps(self, value: Value) -> bool:
        """Whether backward may not recompute the value."""
        if value.tag in RECOMPUTED:
            return False
        return value.pinned or (value.heavy and not self.recompute_heavy)

    def allowing(self, recompute_heavy: bool) -> CutProblem:
        if recompute_heavy == self.recompute_heavy:
            return self
        return dataclasses.replace(self, recompute_heavy=recompute_heavy)

    def once(self, analysis: Callable[[CutProblem], T]) -> T:
        """``analysis`` of this problem, made at the first call: a problem never changes."""
        if analysis not in self._known:
            self._known[analysis] = analysis(self)
        found: T = self._known[analysis]
        return found

    @functools.cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, compressed where the path ends in ``.gz``."""
        json_format.to_json(self, path)

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> CutProblem:
        """Read what ``to_json`` wrote; ``json_format.ProblemFileError`` where that is not it."""
        return json_format.from_json(CutProblem, path)

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in (*self.values, *self.backward):
            if not known.issuperset(value.inputs):
                missing = [name for name in value.inputs if name not in known]
                raise ValueError(f"{value.name} needs {missing}, which do not come before it")
            if value.name in known:
                raise ValueError(f"{value.name} occurs twice")
            known.add(value.name)
        unknown = [name for name in (*self.outputs, *self.gradients) if name not in known]
        if unknown:
            raise ValueError(f"outputs or gradients that are no values: {unknown}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A solver's answer.

    Attributes:
        saved: the names of the values that cross from forward to backward.
        modes: a mode for each region, its first one where none is given.
        nested: values that backward, where it recomputes them, has in a pass of their own: what
            they are computed from is dropped again, and recomputed once more where it is used.
    """

    saved: frozenset[str]
    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nested: frozenset[str] = frozenset()


def loop_name(first: str) -> str:
    """Of the loop whose first result is this node."""
    return f"{LOOP}{first}"


def is_loop(name: str) -> bool:
    """Whether a value is a loop, not one of the results that it returns."""
    return name.startswith(LOOP)


def unfinished(name: str) -> str:
    """What a loop returns for a node that is scaled or cast after the loop."""
    return f"{name}{UNFINISHED}"


def with_needs(
    values: Iterable[Value], backward: Iterable[Value], gradients: Iterable[str]
) -> tuple[Value, ...]:
    """The forward values, each marked as needed where a backward op that is used reads it."""
    live = set(gradients)
    for op in reversed(list(backward)):
        if op.name in live:
            live.update(op.inputs)
    return tuple(
        value
        if value.needed == (value.name in live)
        else dataclasses.replace(value, needed=value.name in live)
        for value in values
    )
