"""The table of probes: one for each part of torch's private APIs that mstpass uses.

A *probe* asks an installed torch whether APIs are there and do what mstpass expects of them: their
names, the names of their parameters and, where that costs little, their behavior in a small case.
"""

from mstpass.torch_internals.probes import frontend, graphs, inductor, no_gpu
from mstpass.torch_internals.probes.row import LOOPS, Probe

__all__ = ["LOOPS", "PROBES", "Probe"]

PROBES = tuple(
    value
    for module in (graphs, frontend, inductor, no_gpu)
    for value in vars(module).values()
    if isinstance(value, Probe)
)
