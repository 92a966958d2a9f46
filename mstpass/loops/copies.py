"""Plans of regions that are equal but for names (graph/alike.py): made once, and renamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from mstpass.graph.alike import Alike
from mstpass.graph.joint import JointGraph
from mstpass.plans import ChunkPlan, LoopPlan, Region

_TRIED = 4  # regions that another one is compared with: the layers of a model are of few kinds

Names = Mapping[str, str]  # of the nodes of a copy, by those of its original


class Originals:
    """The regions of one graph that are no copies of others."""

    def __init__(self, joint: JointGraph):
        self.joint, self.alike = joint, joint.cached(Alike)
        self.regions: list[Region] = []

    def of(self, region: Region) -> tuple[Region, Names] | None:
        """The region that this one is a copy of; None if it is the first of its kind.

        What is computed before a loop is not next to its region, and not compared.
        """
        if region.prelude:
            return None
        for original in self.regions[-_TRIED:]:
            names = self._names(original, region)
            if names is not None:
                return original, names
        self.regions.append(region)
        return None

    def _names(self, original: Region, region: Region) -> Names | None:
        if len(original.members) != len(region.members):
            return None
        node = self.joint.by_name
        part = {node[name] for name, _ in original.members}
        last, others_last = (node[each.members[-1][0]] for each in (original, region))
        found = self.alike.as_in(part, last, others_last)
        if found is None:
            return None
        names = {one.name: other.name for one, other in found.items()}
        return names if renamed_region(original, names, region) == region else None


def renamed_region(region: Region, names: Names, like: Region) -> Region:
    """A region with other names, and with the place in the model of another one."""
    all_of = _all_of(names)
    return dataclasses.replace(
        region,
        source=like.source,
        members=tuple((names.get(name, name), spec) for name, spec in region.members),
        outputs=all_of(region.outputs),
        backward=frozenset(all_of(tuple(region.backward))),
        unit=names.get(region.unit, region.unit) if region.unit is not None else None,
        returned=all_of(region.returned),
    )


def renamed_plan(plan: ChunkPlan, names: Names, region: Region | ChunkPlan) -> ChunkPlan | None:
    """The plan of a region for a copy of it; None if it has nodes that are not next to the region.

    A loop may read what a view next to the region shows.
    """
    if not _knows(names, plan):
        return None
    return dataclasses.replace(
        plan,
        source=region.source,
        loops=tuple(_renamed_loop(loop, names) for loop in plan.loops),
        saved=_all_of(names)(plan.saved),
        members=region.members,
    )


def _renamed_loop(loop: LoopPlan, names: Names) -> LoopPlan:
    all_of = _all_of(names)
    inputs = (dataclasses.replace(item, node=names[item.node]) for item in loop.inputs)
    outputs = (
        dataclasses.replace(
            item,
            node=names[item.node],
            relative_to=names.get(item.relative_to, ""),
            over=names.get(item.over, ""),
        )
        for item in loop.outputs
    )
    return dataclasses.replace(
        loop,
        members=all_of(loop.members),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        unit=names.get(loop.unit, loop.unit) if loop.unit is not None else None,
    )


def _all_of(names: Names) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    return lambda each: tuple([names.get(name, name) for name in each])


def _knows(names: Names, plan: ChunkPlan) -> bool:
    """Whether all nodes of a plan have a name."""
    used = {*(name for name, _ in plan.members), *plan.saved}
    for loop in plan.loops:
        used.update(loop.members, (item.node for item in loop.inputs))
    return used <= names.keys()


def is_copy(plan: ChunkPlan, names: Names, other: ChunkPlan) -> bool:
    """Whether another plan has the loops of this one under other names."""
    return renamed_plan(plan, names, other) == other
