"""What work costs on a device: one interface, with the measured or the estimated costs behind it.

``costs_of(device)`` gives the costs by which chunk lengths are chosen and times are estimated:

    a CPU                   the stored measurements, or those below (measured_costs.py)
    a GPU with measurements a model of the GPU with them in it (measured_costs.py)
    any other GPU           the model alone (gpu_costs.py), of the kind that torch reports (gpus.py)

``mstpass bench loops --store`` measures the present device, and stores its figures for every later
compilation on it. All times are in microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mstpass import gpus
from mstpass.errors import UserError
from mstpass.graph.gpu_costs import GpuCosts
from mstpass.graph.measured_costs import ChunkCosts, MeasuredCosts, MeasuredGpuCosts
from mstpass.plain_data import MOST_CONFIG_BYTES, decoded, read_json, replace_text

GOOD = 1.05  # limit of a loop's time relative to the computation in one piece, if there is a choice
_PATH_VARIABLE = "MSTPASS_COSTS"


Costs = MeasuredCosts | GpuCosts  # of one device


# Measured 2026-11-20 (medians of three sweeps) on 2 cores of an AMD EPYC, fp32, torch 2.13.
_CPU = ChunkCosts(
    slowdown=((64, 1.64), (128, 1.29), (256, 1.075), (512, 1.0)),
    chunk_us=600.0,
    flops_per_us=160_000.0,
)
_LEAST_SHARED_MEMORY = 48 * 1024  # bytes of a block, on every device
_CPU_BYTES_PER_US = 1e4  # 10 GB/s: one kernel on two cores


def costs_of(device: torch.device) -> Costs:
    """The costs of a device: stored measurements where there are any."""
    table = _stored(costs_path()).get(device_name(device))
    if device.type == "cpu":
        return _cpu_costs(table or _CPU, torch.get_num_threads())
    return _gpu_costs(cuda_device(device), _rounds_to_tf32(), table)


def kind_of_gpu(device: torch.device) -> gpus.Gpu:
    """The kind of a GPU, which tells its links to its host and to other GPUs."""
    found = cuda_device(device)
    return gpus.nearest_gpu(found.name, found.capability)


@functools.cache
def _cpu_costs(table: ChunkCosts, threads: int) -> Costs:
    return MeasuredCosts(table, table.copied_bytes_per_us or _CPU_BYTES_PER_US, threads)


@functools.cache
def _gpu_costs(found: CudaDevice, tf32: bool, table: ChunkCosts | None) -> Costs:
    nearest = gpus.nearest_gpu(found.name, found.capability)
    kind = nearest.with_multiprocessors(found.multiprocessors)
    return GpuCosts(kind, tf32) if table is None else MeasuredGpuCosts.of(kind, tf32, table)


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """The facts of a device that costs depend on, and kernels choose their workspaces by."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block_bytes: int
    name: str = ""


def cuda_device(device: torch.device) -> CudaDevice:
    """The facts of a device as torch reports them.

    Those of ``gpus.DEFAULT`` where there is no such device: a graph may be planned for a GPU on a
    machine without one.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        found: Any = torch.cuda.get_device_properties(device)
        shared = int(getattr(found, "shared_memory_per_block_optin", _LEAST_SHARED_MEMORY))
        capability = found.major, found.minor
        return CudaDevice(capability, found.multi_processor_count, shared, found.name)
    kind = gpus.gpu(gpus.DEFAULT)
    shared = kind.shared_memory_per_block_bytes
    return CudaDevice(kind.capability, kind.multiprocessors, shared, kind.full_name)


def _rounds_to_tf32() -> bool:
    """Whether products of float32 run in TF32, by the setting of torch."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends)
    chosen = (s.fp32_precision for s in settings if s.fp32_precision != "none")
    return next(chosen, "none") == "tf32"


def device_name(device: torch.device) -> str:
    """The name under which the costs of a device are stored; of a CPU it tells the threads."""
    if device.type == "cpu":
        return f"cpu {platform.machine()}, {torch.get_num_threads()} threads"
    return cuda_device(device).name


def costs_path() -> Path:
    """The file of stored costs: ``$MSTPASS_COSTS``, or one in the user's cache folder."""
    given = os.environ.get(_PATH_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(given or f"{cache}/mstpass/chunk-costs.json", os.environ.get("HOME"))


@functools.cache  # the costs are looked up for every matmul of a graph
def _expanded(path: str, _home: str | None) -> Path:
    """The path with ``~`` expanded, if there is a home; ``_home`` is a part of the cache's key."""
    return Path(os.path.expanduser(path))


def store(device: torch.device, costs: ChunkCosts) -> Path:
    """Write the costs of a device to the file, in place of older ones. Returns the file's path.

    Raises:
        UserError: the file cannot be written; the message says what to set.
    """
    path = costs_path()
    _stored.cache_clear()  # another process may have written
    known = {**_stored(path), device_name(device): costs}
    text = json.dumps({name: dataclasses.asdict(c) for name, c in known.items()}, indent=1)
    try:
        if path.parts[0].startswith("~"):
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text + "\n")
    except OSError as error:
        raise UserError(
            f"the measured costs cannot be written ({error}): name another file in {_PATH_VARIABLE}"
        ) from error
    _stored.cache_clear()
    return path


def fingerprint() -> str:
    """A hash of all that decides costs: what is stored, and what torch reports of GPUs.

    Costs decide chunk lengths, so caches of compiled graphs depend on it. Empty on a machine
    without a GPU on which nothing is stored.
    """
    stored = _stored(costs_path())
    facts: list[object] = [(name, repr(stored[name])) for name in sorted(stored)]
    if torch.cuda.is_available():
        devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        facts += [*map(cuda_device, devices), _rounds_to_tf32()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16] if facts else ""


@functools.cache
def _stored(path: Path) -> Mapping[str, ChunkCosts]:
    try:
        entries = read_json(path, MOST_CONFIG_BYTES)
        return {name: _parsed(name, entry) for name, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(
            f"mstpass ignores {path}: {type(error).__name__}: {error}. "
            "Run `mstpass bench loops --store` to write it anew.",
            stacklevel=2,
        )
        return {}


def _parsed(name: str, entry: Mapping[str, Any]) -> ChunkCosts:
    """The costs of one device; what older versions did not store gets its default."""
    measured_in = "float32" if name.startswith("cpu ") else "bfloat16"
    return decoded(ChunkCosts, {"dtype": measured_in, **entry}, newer=True)
