"""The peak of a step that Inductor schedules alone: code is written, none is compiled or run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from mstpass.graph.joint import tensors_of
from mstpass.hook_checks import SCHEDULE_HOOK
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.torch_internals.inductor import compile_fx, compile_fx_inner
from mstpass.torch_internals.inductor_schedule import around_code
from mstpass.torch_internals.settings import backward_compiled_at_once, without_padding


class _Scheduled(Exception):
    """The code of the graph is written, or of the whole step: what comes after makes kernels."""


def scheduled_alone(step: Callable[..., Any], *args: Any) -> int | None:
    """Bytes at the peak of a step by Inductor's own schedule; None if it cannot be read.

    Args:
        step: a function of one graph, whose first result is a loss.
    """
    reader, given = ReadSchedule(), set[StorageWeakRef]()

    def stop(_: Any, write: Callable[[], None]) -> None:
        write()
        raise _Scheduled

    def schedule(nodes: list[Any]) -> Any:
        nodes = reader(nodes)
        around_code(nodes, stop)
        return nodes

    def schedule_only(module: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        before = reader.graphs
        try:
            compile_fx_inner(module, inputs, **more)
        except Exception:
            if reader.graphs == before:
                raise
        if more.get("is_backward"):
            _count_storages_once(reader, module.graph, given)
            raise _Scheduled
        given.update(storage for _, storage in _inputs(module.graph))
        return lambda values: None

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        patches = {SCHEDULE_HOOK: schedule, "fx_graph_cache": False, **without_padding()}
        with backward_compiled_at_once():
            compile_fx(module, list(inputs), inner_compile=schedule_only, config_patches=patches)

    torch.compiler.reset()
    try:
        torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(*args)
    except Exception:
        if reader.graphs < 2:
            raise
    return reader.peak_bytes


def _inputs(graph: fx.Graph) -> Iterator[tuple[str, StorageWeakRef]]:
    """The names of a graph's inputs, and their memory."""
    for node in graph.find_nodes(op="placeholder"):
        for value in tensors_of(node.meta.get("val")):
            yield str(node.target), StorageWeakRef(value.untyped_storage())


def _count_storages_once(
    reader: ReadSchedule, backward: fx.Graph, given: set[StorageWeakRef]
) -> None:
    """Of several views of a value, which torch's partitioner may save, count the one freed last.

    Views of the step's own inputs, whose memory is ``given``, count nothing.
    """
    if reader.failed:
        return
    schedule = reader.schedules[-1]
    freed_at = {name: i for i, line in enumerate(schedule.lines) for name in line.freed}
    names = defaultdict(list)
    for name, storage in _inputs(backward):
        if name in schedule.freed_inputs:
            names[storage].append(name)
    counted = {
        max(views, key=lambda name: freed_at.get(name, len(freed_at)))
        for storage, views in names.items()
        if storage not in given
    }
    freed = {name: size * (name in counted) for name, size in schedule.freed_inputs.items()}
    reader.schedules[-1] = dataclasses.replace(schedule, freed_inputs=freed)
