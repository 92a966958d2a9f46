"""Rewrites of the joint graph that change its form, not its results, so that regions are found."""

from __future__ import annotations

from mstpass.graph.joint import JointGraph
from mstpass.normalize.expand_to_tokens import expand_to_tokens
from mstpass.normalize.means_as_sums import means_as_sums
from mstpass.normalize.move_token_slices import move_slices
from mstpass.normalize.sizes_from_inputs import sizes_from_inputs


def normalized(joint: JointGraph) -> tuple[JointGraph, JointGraph, frozenset[str]]:
    """The graph with its sizes taken from its inputs, a normalized copy, and what differs in it.

    Returns:
        The graph; the copy, which is the graph itself if no rewrite applies; the names of the
        nodes that the rewrites changed or made.
    """
    joint = sizes_from_inputs(joint)
    prepared, sums = means_as_sums(joint)
    hoisted = move_slices(prepared)
    prepared = hoisted.joint if hoisted is not None else prepared
    prepared, spread = expand_to_tokens(prepared)
    return joint, prepared, sums | spread | (hoisted.moved if hoisted is not None else frozenset())
