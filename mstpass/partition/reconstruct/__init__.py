"""Reconstruction: what backward needs, had from later values that are saved anyway.

    inverses:  for every op a rule says how an operand is had back from the result   (table.py)
    decide:    saved values that can be had otherwise are dropped, on plain data      (decide.py)
    encode:    what is left crosses in fewer bytes where nothing is lost              (encode.py)
    apply:     a joint graph in which backward reads the new values                   (apply.py)

Rules are *exact* (bit for bit), *tolerant* (bounded error; ``reconstruct="tolerant"`` only) or
refuse, with a reason. docs/reconstruction.md has the table, the proofs and what was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Set

from mstpass.graph.joint import JointGraph, nbytes
from mstpass.graph.source_location import source_of
from mstpass.partition.reconstruct.choose_drops import Decision, decide
from mstpass.partition.reconstruct.encodings import bytes_after, encoding_of
from mstpass.partition.reconstruct.rewrite_joint import CannotWrite, rewrite
from mstpass.partition.reconstruct.rule import EXACT, TOLERANT, Inverse, Refused
from mstpass.partition.reconstruct.table import RULES, inverses_of
from mstpass.plans import Reconstructed
from mstpass.problem.problem import CutProblem

__all__ = ["EXACT", "OFF", "RULES", "TOLERANT", "Inverse", "Refused", "inverses_of", "reconstruct"]

log = logging.getLogger(__name__)

OFF = "off"
_LEAST_BYTES = 1024  # what an encoding is worth writing for

Result = tuple[JointGraph, frozenset[str], tuple[Reconstructed, ...]]


def reconstruct(
    joint: JointGraph, problem: CutProblem, saved: Set[str], mode: str, pack_masks: bool = True
) -> Result:
    """A joint graph that needs fewer saved bytes, what to save in it, and what was done.

    Args:
        saved: a solver's answer for ``problem``.
        mode: ``"exact"``, ``"tolerant"`` or ``"off"``.
        pack_masks: masks cross as bits, which takes time on both sides.
    """
    unchanged = joint, frozenset(saved), ()
    if mode == OFF:
        return unchanged
    found = [i for node in joint.nodes if node not in joint.backward for i in inverses_of(node)]
    usable = [i for i in found if isinstance(i, Inverse) and i.grade in (EXACT, mode)]
    decision = decide(problem, saved, usable)
    encodings = _encodings(joint, decision.saved)
    if not pack_masks:
        encodings = {name: kind for name, kind in encodings.items() if kind != "bits"}
    if not decision.drops and not encodings:
        return unchanged
    try:
        rewritten, kept = rewrite(joint, decision, encodings)
    except CannotWrite as refusal:
        log.info("nothing is reconstructed: %s", refusal)
        return unchanged
    return rewritten, kept, (*_reconstructed(joint, decision), *_encoded(joint, encodings))


def _encodings(joint: JointGraph, saved: Set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(saved):
        node = joint.by_name[name]
        encoding = encoding_of(node)
        if encoding == "narrow" and node not in joint.forward:
            continue  # a fused loop's gradient, which the backward scales in place as it is
        if encoding and nbytes(node) >= _LEAST_BYTES:
            found[name] = encoding
    return found


def _reconstructed(joint: JointGraph, decision: Decision) -> list[Reconstructed]:
    result = []
    for drop in decision.drops:
        grade = TOLERANT if any(i.grade == TOLERANT for i in drop.inverses) else EXACT
        made = {inverse.target for inverse in drop.inverses}
        sources = dict.fromkeys(s for i in drop.inverses for s in i.sources if s not in made)
        result.append(
            Reconstructed(
                node=drop.target,
                sources=tuple(sources),
                rule=", ".join(dict.fromkeys(inverse.rule for inverse in drop.inverses)),
                grade=grade,
                bytes=drop.bytes,
                bounds=tuple(
                    f"{i.target}: {i.bound}" for i in drop.inverses if i.grade == TOLERANT
                ),
                source=source_of(joint.by_name[drop.target]),
            )
        )
    return result


def _encoded(joint: JointGraph, encodings: dict[str, str]) -> list[Reconstructed]:
    result = []
    for name, encoding in encodings.items():
        node = joint.by_name[name]
        won = nbytes(node) - bytes_after(node, encoding, nbytes(node))
        result.append(Reconstructed(name, (name,), encoding, EXACT, won, source=source_of(node)))
    return result
