"""Reconstruction: save fewer values, because backward can compute some of them from later ones.

    inverses   rules say how an operand of an op follows from the op's result             (table.py)
    drops      saved values that can be reconstructed are no longer saved         (choose_drops.py)
    encodings  the others are saved in fewer bytes, where nothing is lost            (encodings.py)
    rewrite    a joint graph in which backward reads reconstructed values        (rewrite_joint.py)

A rule is *exact* (the same bits) or *tolerant* (a bounded error, used only with
``reconstruct="tolerant"``), or it refuses with a reason. docs/reconstruction.md has the table of
rules, the proofs and measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Set

from mstpass.graph.joint import JointGraph, nbytes
from mstpass.graph.source_location import source_of
from mstpass.partition.reconstruct.choose_drops import Decision, choose_drops
from mstpass.partition.reconstruct.comparisons import is_compared
from mstpass.partition.reconstruct.encodings import BITS, NARROW, encoded_bytes, encoding_of
from mstpass.partition.reconstruct.rewrite_joint import CannotWrite, Rewritten, rewrite
from mstpass.partition.reconstruct.rule import EXACT, TOLERANT, Inverse, Refused
from mstpass.partition.reconstruct.table import RULES, inverses_of
from mstpass.plans import Reconstructed
from mstpass.problem.problem import CutProblem

__all__ = [
    "EXACT",
    "OFF",
    "RULES",
    "TOLERANT",
    "Inverse",
    "Refused",
    "inverses_of",
    "reconstruct",
]

log = logging.getLogger(__name__)

OFF = "off"
_LEAST_BYTES = 1024  # smaller values are not worth an encoding


def reconstruct(
    joint: JointGraph, problem: CutProblem, saved: Set[str], mode: str, pack_masks: bool = True
) -> tuple[Rewritten, tuple[Reconstructed, ...]]:
    """Rewrite a joint graph so that it needs fewer saved bytes.

    Args:
        problem: the partition problem of ``joint``.
        saved: names of the values that a solver saves.
        mode: ``"exact"``, ``"tolerant"`` or ``"off"``.
        pack_masks: whether masks may cross as bits, which takes time in forward and in backward.

    Returns:
        The new joint graph with the names of its nodes to save, and what was done to which value.
        The graph and the names are the given ones if nothing was done.
    """
    unchanged = Rewritten(joint, frozenset(saved), {}), ()
    if mode == OFF:
        return unchanged
    found = [i for node in joint.nodes if node not in joint.backward for i in inverses_of(node)]
    usable = [i for i in found if isinstance(i, Inverse) and _may_be_used(joint, i, mode)]
    decision = choose_drops(problem, saved, usable)
    encodings = _encodings(joint, decision.saved, (NARROW, BITS) if pack_masks else (NARROW,))
    if not decision.drops and not encodings:
        return unchanged
    try:
        named = {value.name for value in problem.values}
        rewritten = rewrite(joint, decision, encodings, named)
    except CannotWrite as refusal:
        log.info("nothing is reconstructed: %s", refusal)
        return unchanged
    return rewritten, (*_reconstructed(joint, decision), *_encoded(joint, encodings))


def _may_be_used(joint: JointGraph, inverse: Inverse, mode: str) -> bool:
    if inverse.grade == EXACT:
        return True
    return mode == TOLERANT and not is_compared(joint.by_name[inverse.target])


def _encodings(joint: JointGraph, saved: Set[str], allowed: tuple[str, ...]) -> dict[str, str]:
    """The encoding of each saved value that has one, by name."""
    found = {}
    for name in sorted(saved):
        node = joint.by_name[name]
        encoding = encoding_of(node)
        if encoding == NARROW and node not in joint.forward:
            continue  # a gradient that a fused loop computed: backward scales it in place
        if encoding in allowed and nbytes(node) >= _LEAST_BYTES:
            found[name] = encoding
    return found


def _reconstructed(joint: JointGraph, decision: Decision) -> list[Reconstructed]:
    """The report's entries of the dropped values."""
    result = []
    for drop in decision.drops:
        tolerant = [inverse for inverse in drop.inverses if inverse.grade == TOLERANT]
        targets = {inverse.target for inverse in drop.inverses}
        sources = dict.fromkeys(s for i in drop.inverses for s in i.sources if s not in targets)
        result.append(
            Reconstructed(
                node=drop.target,
                sources=tuple(sources),
                rule=", ".join(dict.fromkeys(inverse.rule for inverse in drop.inverses)),
                grade=TOLERANT if tolerant else EXACT,
                bytes=drop.bytes,
                bounds=tuple(f"{inverse.target}: {inverse.bound}" for inverse in tolerant),
                source=source_of(joint.by_name[drop.target]),
            )
        )
    return result


def _encoded(joint: JointGraph, encodings: dict[str, str]) -> list[Reconstructed]:
    """The report's entries of the encoded values."""
    result = []
    for name, encoding in encodings.items():
        node = joint.by_name[name]
        won = nbytes(node) - encoded_bytes(encoding, nbytes(node))
        result.append(Reconstructed(name, (name,), encoding, EXACT, won, source=source_of(node)))
    return result
