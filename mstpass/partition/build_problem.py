"""Describe the partition of a joint graph as a ``CutProblem``: plain data that solvers read.

Each placeholder and each call of the joint graph becomes a ``Value``. The nodes that depend on a
tangent are the problem's backward, all others its forward values.

``host_memory`` is what a step may use of the host for its saved values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

import torch
from torch import fx

from mstpass.byte_sizes import bytes_text
from mstpass.graph import device_costs, loop_op, ops
from mstpass.graph.collectives import is_pending, may_repeat, sizes_agree
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.node_cost import time_us
from mstpass.graph.recompute_rules import Policies, is_heavy, is_input_write, is_pinned, policies_of
from mstpass.graph.renew_values import order_of_copy
from mstpass.graph.sizes import is_size
from mstpass.memory.simulate_graph import op_of
from mstpass.options import OptionError, Options
from mstpass.problem.problem import (
    MAY_OFFLOAD,
    MUST_OFFLOAD,
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    Host,
    RegionModes,
    Value,
    with_needs,
)
from mstpass.torch_internals.graphs import is_opaque

LEAST_OFFLOADED_BYTES = 2**20

Copies = Mapping[fx.Node, tuple[fx.Node, Mapping[str, str]]]


def cut_problem(
    joint: JointGraph,
    regions: tuple[RegionModes, ...] = (),
    scatters_delayed: bool = False,
    host: Host | None = None,
    repeats_collectives: bool = False,
    copies: Copies = MappingProxyType({}),
) -> CutProblem:
    """The partition problem of one joint graph.

    Args:
        regions: the modes in which each region can run.
        copies: nodes that are equal to others but for names (loops/mode_costs.py).
        scatters_delayed: as in ``memory.simulate_graph.simulate_step``.
        host: the host memory that saved values may use.
        repeats_collectives: backward may run collectives of the forward again.
    """
    repeats = repeats_collectives and joint.cached(sizes_agree)
    values = _Values(scatters_delayed, host is not None, repeats).of(joint, joint.nodes, copies)
    forward = tuple(value for n, value in values.items() if n not in joint.backward)
    backward = tuple(value for n, value in values.items() if n in joint.backward)
    written = (*joint.forward_outputs, *joint.forward_writes)
    gradients = tuple(n.name for n in joint.backward_outputs)
    return CutProblem(
        with_needs(forward, backward, gradients),
        backward=backward,
        outputs=tuple(n.name for n in written),
        gradients=gradients,
        regions=regions,
        host=host,
    )


def described(joint: JointGraph, nodes: Sequence[fx.Node], to_host: bool) -> list[Value]:
    """Some nodes as values; the problem of the others is known."""
    return [*_Values(False, to_host, False).of(joint, nodes).values()]


@dataclasses.dataclass(frozen=True)
class _Values:
    """The values of the forward, and those of the backward.

    Attributes:
        to_host: saved values may cross by way of the host.
        repeats_collectives: backward may run collectives of the forward again.
    """

    scatters_delayed: bool
    to_host: bool
    repeats_collectives: bool

    def of(
        self, joint: JointGraph, nodes: Sequence[fx.Node], copies: Copies = MappingProxyType({})
    ) -> dict[fx.Node, Value]:
        # The caller holds what forward returns to it; what backward returns is not read by an op.
        held = {ops.base_of(n) for n in (*joint.forward_outputs, *joint.backward_outputs)}
        every = [n for n in joint.nodes if n.op in ("placeholder", "call_function")]
        names, policies = {n.name for n in every}, policies_of(joint)
        stays = held if self.to_host else set(every)
        repeated = set(filter(may_repeat, nodes)) if self.repeats_collectives else set()
        copies = {n: copy for n, copy in copies.items() if copy[0] not in copies}
        described = [n for n in nodes if n.op in ("placeholder", "call_function")]
        known = {
            n: _value(joint, n, names, policies, self.scatters_delayed, n in stays, n in repeated)
            for n in described
            if n not in copies
        }

        def value(node: fx.Node) -> Value:
            if node in known:
                return known[node]
            original, new = copies[node]
            return known[original].renamed(lambda name: new.get(name, name), name=node.name)

        return {n: value(n) for n in described}


def _value(
    joint: JointGraph,
    node: fx.Node,
    names: Set[str],
    policies: Policies,
    scatters_delayed: bool,
    stays: bool,
    may_repeat: bool,
) -> Value:
    """One node.

    Args:
        stays: its value must not cross by way of the host.
        may_repeat: backward may run it again although it is a collective.
    """
    op = op_of(node, scatters_delayed=scatters_delayed)
    free = (node.op == "placeholder" and node not in joint.backward) or (
        is_size(node) or is_opaque(node)
    )
    tag = "" if is_opaque(node) else policies.tags.get(node, "")
    savable = (
        tag not in RECOMPUTED
        and value_of(node) is not None
        and not ops.shares_storage(node)
        and not is_pending(node)
        and not is_input_write(node)
    )
    offload = ""
    if savable and not free and not stays and node not in joint.backward:
        offload = _offload(node, must=node in policies.offloaded)
    inputs = tuple(name for name in op.inputs if name in names)
    known = vars(op) | {"inputs": inputs} | ({} if value_of(node) is not None else {"bytes": 0})
    return Value(
        **known,
        us=time_us(joint, node),
        free=free,
        heavy=is_heavy(node) or node in policies.boundary,
        pinned=tag == MUST_SAVE or (is_pinned(node) and tag not in RECOMPUTED and not may_repeat),
        savable=savable,
        forward=node in joint.forward,
        tag=tag,
        offload=offload,
    )


def _offload(node: fx.Node, must: bool) -> str:
    """Whether a value may cross by way of the host, or must, as in ``Value.offload``.

    It must lie dense in a GPU's memory. Small values may not, unless they must: a copy takes some
    microseconds whatever its size.
    """
    value = value_of(node)
    if value is None or value.device.type != loop_op.DEVICE_TYPE or is_size(node):
        return ""
    least = 1 if must else LEAST_OFFLOADED_BYTES  # torch tells copies apart by their addresses
    if order_of_copy(value) is None or nbytes(node) < least:
        return ""
    return MUST_OFFLOAD if must else MAY_OFFLOAD


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
        bytes_per_us = device_costs.kind_of_gpu(device).host_bytes_per_us
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
        (value.device for value in values if value.device.type == loop_op.DEVICE_TYPE), None
    )
