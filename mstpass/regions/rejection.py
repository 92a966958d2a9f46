"""What was refused while regions were detected, as a value for the report."""

from __future__ import annotations

from torch import fx

from mstpass.graph.joint import nbytes
from mstpass.graph.source_location import source_of
from mstpass.graph.tokens import CannotTake
from mstpass.plans import Rejection


def rejection_of(anchor: fx.Node, refusal: CannotTake) -> Rejection:
    """No region grows from the anchor, for the reason of the refusal."""
    return Rejection("detect", refusal.node.name, refusal.reason, source_of(anchor), nbytes(anchor))
