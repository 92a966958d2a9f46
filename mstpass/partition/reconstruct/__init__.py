"""Reconstruction: save fewer values, because backward can compute some of them from later ones.

    inverses   rules say how an operand of an op follows from the op's result             (rules.py)
    drops      saved values that can be reconstructed are no longer saved         (choose_drops.py)
    encodings  the others are saved in fewer bytes, where nothing is lost        (rewrite_joint.py)
    rewrite    a joint graph in which backward reads reconstructed values        (rewrite_joint.py)

An inverse is *exact* (the same bits) or *tolerant* (a bounded error, used only with
``reconstruct="tolerant"``). docs/reconstruction.md has the table of rules, the proofs and
measurements.

**Comparisons.** A value must not be reconstructed within an error if backward compares it. ``relu``
gives exact zeros, and its gradient asks ``relu(x) <= 0``. A zero that is reconstructed as 1e-17
would let the gradient through: a small error of the value, a large one of the gradient. So it is
with every op that jumps, wherever values may lie on the jump. Sums and products spread values over
many numbers, and lie on a jump no more often than rounding puts them there.

``with_reconstruction`` changes a plan: fewer saved values, unless that raises the peak.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Set
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.node_meta import source_of
from mstpass.limit import Limit
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.build_problem import described
from mstpass.partition.reconstruct.choose_drops import Decision, choose_drops
from mstpass.partition.reconstruct.rewrite_joint import (
    BITS,
    NARROW,
    CannotWrite,
    Rewritten,
    encoded_bytes,
    encoding_of,
    rewrite,
)
from mstpass.partition.reconstruct.rules import EXACT, TOLERANT, Inverse, inverses_of
from mstpass.passes.runner import Pass, PassRunner
from mstpass.plans import Reconstructed
from mstpass.problem.problem import CutProblem, Plan, Value, with_needs
from mstpass.problem.saved_set import verify
from mstpass.walk import walk_once

log = logging.getLogger(__name__)

OFF = "off"
_LEAST_BYTES = 1024  # smaller values are not worth an encoding


def reconstruct(
    joint: JointGraph, problem: CutProblem, saved: Set[str], mode: str, pack_masks: bool
) -> tuple[JointGraph, Rewritten | None]:
    """Rewrite a joint graph so that it needs fewer saved bytes.

    Args:
        problem: the partition problem of ``joint``.
        saved: names of the values that a solver saves.
        mode: ``"exact"``, ``"tolerant"`` or ``"off"``.
        pack_masks: whether masks may cross as bits, which takes time in forward and in backward.

    Returns:
        The new joint graph, and what was written; the given one and None if nothing was.
    """
    if mode == OFF:
        return joint, None
    found = (i for node in joint.nodes if node not in joint.backward for i in inverses_of(node))
    usable = [inverse for inverse in found if _may_be_used(joint, inverse, mode)]
    decision = choose_drops(problem, saved, usable)
    encodings = _encodings(joint, decision.saved, (NARROW, BITS) if pack_masks else (NARROW,))
    if not decision.drops and not encodings:
        return joint, None
    try:
        named = {value.name for value in problem.values}
        rewritten = rewrite(joint, decision, encodings, named)
    except CannotWrite as refusal:
        log.info("nothing is reconstructed: %s", refusal)
        return joint, None
    done = (*_reconstructed(joint, decision), *_encoded(joint, encodings))
    return rewritten.joint, dataclasses.replace(rewritten, done=done)


RECONSTRUCT = Pass("reconstruct", reconstruct)


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


def is_compared(value: fx.Node) -> bool:
    """Whether an op that jumps reads the value, or what is computed from it element by element.

    That is by pointwise ops, views, and ops that move elements; in the bodies of loops as well.
    """
    handing_on = walk_once([value], lambda node: filter(_hands_on, _readers(node)))
    return any(_jumps(reader) for node in handing_on for reader in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node; of a loop, the inputs of its body that are the node's chunks."""
    for user in node.users:
        if user.target is mst_loop:
            yield from _inputs_of_body(user, node)
        else:
            yield user


def _inputs_of_body(loop: fx.Node, operand: fx.Node) -> Iterator[fx.Node]:
    arguments: Any = loop.args
    name, num_chunks, _, _, _, sliced, whole = arguments
    body: Any = getattr(loop.graph.owning_module, str(name.target))
    inputs = body.graph.find_nodes(op="placeholder")[num_chunks is None :]
    for given, placeholder in zip((*sliced, *whole), inputs, strict=False):
        if given is operand:
            yield placeholder


def _hands_on(node: fx.Node) -> bool:
    if node.op == "placeholder" or ops.is_pointwise(node) or ops.is_cheap_view(node):
        return True
    return ops.row(node).kind == "index"


def _jumps(node: fx.Node) -> bool:
    """Whether the op jumps; of floats, results of other types always do."""
    if node.op != "call_function":
        return False
    if ops.row(node).jumps:
        return True
    value = value_of(node)
    floats = value is None or value.is_floating_point()
    return not floats and any(
        tensor.is_floating_point()
        for operand in node.all_input_nodes
        for tensor in tensors_of(operand.meta.get("val"))
    )


def with_reconstruction(
    joint: JointGraph,
    problem: CutProblem,
    plan: Plan,
    options: Options,
    limit: Limit,
    runner: PassRunner,
) -> tuple[CutProblem, Plan, Rewritten] | None:
    """Save fewer values by reconstructing some in backward, unless that raises the peak.

    Args:
        problem: the problem in which the plan's modes are chosen.

    Returns:
        The problem and the plan of the graph that was written; None where there is none.
    """
    pack_masks, saved = not limit.is_free, plan.saved
    allowed = problem.allowing(True)
    mode = options.reconstruct
    _, rewritten = runner.run(RECONSTRUCT, joint, allowed, saved, mode, pack_masks)
    if rewritten is None:
        return None
    other = _with_inverses(problem, joint, rewritten)
    kept = rewritten.saved
    verify(other.allowing(True), kept)
    sets = {"offloaded": plan.offloaded & kept, "by_chunk": plan.by_chunk & kept}
    after = dataclasses.replace(plan, saved=kept, **sets)
    if simulate_plan(other, after).peak_bytes > simulate_plan(problem, plan).peak_bytes:
        return None
    return other, after, rewritten


def _with_inverses(problem: CutProblem, before: JointGraph, rewritten: Rewritten) -> CutProblem:
    """The problem with what was written for the backward, which reads that."""
    joint, read = rewritten.joint, rewritten.read
    others = [node for node in joint.nodes if node not in joint.backward]
    new = [node for node in others if node.name not in before.by_name]
    values = (*problem.values, *problem.backward)
    names = {*(value.name for value in values), *(node.name for node in new)}

    def inputs(node: fx.Node) -> tuple[str, ...]:
        further = lambda n: () if n.name in names else n.all_input_nodes
        return tuple(n.name for n in walk_once(node.all_input_nodes, further) if n.name in names)

    written = (
        dataclasses.replace(value, inputs=inputs(joint.by_name[value.name]))
        for value in described(joint, new, problem.host is not None)
    )
    place = {node.name: number for number, node in enumerate(joint.nodes)}

    def left(values: tuple[Value, ...]) -> list[Value]:
        """Those that are there still. A constant that only loops read is in their bodies."""
        kept = (value for value in values if value.name in place)
        return [v.changed(inputs=tuple(n for n in v.inputs if n in place)) for v in kept]

    backward = tuple(value.reading(read, value.name) for value in left(problem.backward))
    gradients = tuple(read.get(name, name) for name in problem.gradients)
    ordered = sorted((*left(problem.values), *written), key=lambda value: place[value.name])
    return dataclasses.replace(
        problem,
        values=with_needs(ordered, backward, gradients),
        backward=backward,
        gradients=gradients,
        torch_saved=None,
    )
