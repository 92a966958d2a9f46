"""The host memory that a step may use for its saved values."""

from __future__ import annotations

import torch

from mstpass.byte_sizes import bytes_text
from mstpass.graph import device_costs, host_copies
from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.options import OptionError, Options
from mstpass.problem.host_memory import Host


class NoDeviceError(OptionError):
    """``host_budget`` is given for a step that runs on the CPU."""


def host_memory(joint: JointGraph, options: Options) -> Host | None:
    """The host memory beside the GPU that a step runs on; None for a step on the CPU.

    Raises:
        NoDeviceError: the options have a budget for it, and the step runs on the CPU.
    """
    budget_bytes = options.host_budget
    device = _gpu_of(joint)
    if device is not None:
        bytes_per_us = device_costs.host_bytes_per_us(device)
        return Host(budget_bytes, bytes_per_us, bytes_per_us)
    if budget_bytes and joint.backward:
        raise NoDeviceError(
            f"host_budget={bytes_text(budget_bytes)}: this step has no tensor on a GPU, so its "
            "saved values are in host memory already. Leave host_budget out, or move the step to "
            "a GPU"
        )
    return None


def _gpu_of(joint: JointGraph) -> torch.device | None:
    values = (value for node in joint.nodes for value in tensors_of(node.meta.get("val")))
    return next(
        (value.device for value in values if value.device.type == host_copies.DEVICE_TYPE), None
    )
