"""Names in a memory timeline that are more than the name of a node.

==================  ============================================================================
``loop:v``          a loop over chunks whose first result is ``v``
``offload:v``       the copy of ``v`` to the host begins
``offloaded:v``     ``v`` is on the host: its memory on the device is freed
``reload:v``        the copy of ``v`` back to the device begins; the buffer that it is copied into
==================  ============================================================================
"""

from __future__ import annotations

from mstpass.problem.problem import LOOP

OFFLOAD, OFFLOADED, RELOAD = "offload:", "offloaded:", "reload:"
_PREFIXES = (LOOP, OFFLOAD, OFFLOADED, RELOAD)


def node_name(name: str) -> str:
    """The node of the joint graph that a name in a timeline belongs to."""
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)


def is_on_host(name: str) -> bool:
    """Whether the name stands for a value in host memory, which takes none on the device."""
    return name.startswith((OFFLOAD, OFFLOADED))
