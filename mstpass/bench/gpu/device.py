"""What is measured on, behind one small interface: a CUDA device, or none in a dry run.

Peaks come from CUDA's caching allocator, times from CUDA events.

The machine of a run: the card, its driver and clocks, versions; and whether it will do.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from mstpass.bench.processes import ROOT
from mstpass.errors import UserError
from mstpass.measure import peak_bytes
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.versions import installed

LEAST_CAPABILITY = (8, 0)  # bf16 products and FlashAttention-2
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
_TIMEOUT_S = 20


class CannotRun(UserError):
    """This machine cannot run the benchmark; the message says why, and what can be done here."""


def check_machine(would_run: str) -> None:
    """Raise `CannotRun` unless there is a CUDA device that can run all parts.

    Args:
        would_run: what the command would run, for the message.
    """
    instead = f"It would run {would_run}. `--dry-run` traces and plans all of it without a GPU."
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {installed()} is built without CUDA)"
        raise CannotRun(f"torch sees no CUDA device{built}. {instead}")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise CannotRun(
            f"{name} has compute capability {_dotted(capability)}; the benchmark is in bfloat16, "
            f"which needs {_dotted(LEAST_CAPABILITY)} (A100 or newer). {instead}"
        )
    if find_spec("triton") is None:
        raise CannotRun(
            f"triton is not installed, and Inductor compiles CUDA kernels with it: "
            f"pip install triton. {instead}"
        )


def card() -> dict[str, Any]:
    """What the rows of a state file belong to: the card and torch."""
    if not torch.cuda.is_available():
        return {"card": "none", "torch": installed()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": installed(),
    }


def facts() -> dict[str, Any]:
    """What may differ from call to call, for the results."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "driver": nvidia_smi("driver_version"),
        "cuda": torch.version.cuda or "none",
        "triton": _version("triton"),
        "mstpass": mstpass_version(),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "clocks": clocks(),
    }


def clocks() -> str:
    """Clocks, temperature and power of the card as they are; empty where nobody tells."""
    values = nvidia_smi(*_CLOCKS).split(", ")
    if len(values) != len(_CLOCKS):
        return ""
    sm, memory, most, temperature, power = values
    return f"SM {sm} of {most}, memory {memory}, {temperature} C, {power}"


def nvidia_smi(*fields: str) -> str:
    """Fields of the first card as ``nvidia-smi`` prints them; empty where it cannot run."""
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = f"--query-gpu={','.join(fields)}"
    return _output("nvidia-smi", query, "--format=csv,noheader", f"--id={number}")


def mstpass_version() -> str:
    """The installed version, or that of the source tree."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        found = re.search(r'^version = "(.+)"', project.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
            return found[1] + (f" ({commit})" if commit else "")
    return _version("mstpass")


def _output(*command: str) -> str:
    """What a command prints; empty where it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# ---- the device ----------------------------------------------------------------------------------
Step = Callable[[], object]

_ROUNDS, _SLOW_ROUNDS, _QUICK_ROUNDS = 10, 3, 2
_SLOW_S = 2.0  # steps that are slower than this are timed in fewer rounds


class Device:
    """The current CUDA device.

    Attributes:
        torch_device: where the tensors of a step are.
        runs: whether steps run; otherwise they are traced and planned.
    """

    torch_device = torch.device("cuda", 0)
    runs = True

    def tensors(self) -> AbstractContextManager[Any]:
        """A context in which tensors are made and eager steps run."""
        return contextlib.nullcontext()

    def peak_bytes(self, step: Step) -> int:
        """The most bytes of tensors while a step runs, beyond those at its start."""
        return peak_bytes(step, self.torch_device)

    def seconds(self, step: Step) -> float:
        """The time of one step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def clocks(self) -> str:
        """The clocks of the device at this moment."""
        return clocks()


class NoDevice(Device):
    """The device of a dry run: tensors without memory, and a timer that says one second."""

    torch_device = torch.device("cpu")
    runs = False

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    def tensors(self) -> AbstractContextManager[Any]:
        return self._mode

    def peak_bytes(self, step: Step) -> int:
        return 0

    def seconds(self, step: Step) -> float:
        return 1.0

    def clocks(self) -> str:
        return ""


def time_in_turn(device: Device, steps: Mapping[str, Step], quick: bool) -> dict[str, list[float]]:
    """Seconds of each step in rounds A B, B A, ...: what disturbs one round disturbs all steps.

    Each step has run before; it runs once more before its first round.
    """
    first = {name: device.seconds(step) for name, step in steps.items()}
    slow = statistics.fmean(first.values()) > _SLOW_S
    rounds = _QUICK_ROUNDS if quick else _SLOW_ROUNDS if slow else _ROUNDS
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(device.seconds(steps[name]))
    return seconds
