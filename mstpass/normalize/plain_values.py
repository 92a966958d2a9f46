"""Values and sizes as the passes and Inductor expect them: ordinary, of known dtype, from inputs.

``ordinary_tensors``: tensors whose zeros or signs are implied are replaced by ordinary ones.

``torch.func.jvp`` has tangents of zeros without memory (``_efficientzerotensor``), and the
imaginary part of a conjugate is a view that is read with the other sign (``_neg_view``). Each kind
has a dispatch key of its own, for which higher-order ops have no kernel, so that no loop could read
it. Inductor computes both.

``scattered_constants``: these get their own dtype again.

Inductor rewrites ``scatter(full(shape, b, dtype), dim, index, a)``, with numbers a and b, as
``where(index == iota, a, b)``. In older versions of torch the result has the default dtype instead
of ``dtype``, and the metadata of its readers stays as it was: the gradient of a loss of bfloat16
logits is float32 and is said to be bfloat16. Newer ones cast the result, and so does this pass,
wherever a reader's dtype is not the one that its operands give.

``sizes_from_inputs``: every symbolic size is taken from the inputs, not from a large value.

The backward of a slice, for instance, asks for the size of the sliced value with ``sym_size``. That
would keep the value alive, or keep it from becoming part of a loop. The size is rewritten as sums
and products of sizes that are inputs of the graph.

``assertions_of_sizes``: those about sizes that the data decides are left to Inductor.

Of a size that a mask makes, torch asserts in the graph that it lies within its bounds. Inductor
asserts the same where the size is made (``create_deferred_runtime_asserts`` in
torch/_inductor/graph.py), from what the ``ShapeEnv`` knows. What the graph asserts about other
numbers stays.

``inputs_before_writes``: backward reads an input that the step overwrites as it was before, by
``mstpass::before_write``.

A step may write to its inputs, as a model does to its buffers: AOTAutograd traces it without writes
and puts them after everything else. Some are ``aten.copy_`` at the end of the forward graph, others
are new values that the forward returns and that are copied when it has run. In both cases the
input's old value is gone in backward. A partitioner that saves the input, and recomputes from it
what the forward read, does so from the new value: gradients are silently wrong, or autograd refuses
the saved input, as its version is not the one that was saved. torch's own partitioner does not mind
this (pytorch/pytorch#197039 and #185876, both open in November 2026).

So everything but the write reads the input through an op that a partitioner cannot repeat and that
no loop takes in. It becomes a copy, which Inductor leaves out unless backward needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import fake_mode_of
from mstpass.graph.joint import JointGraph, Modules, tensors_of, value_of
from mstpass.graph.recompute_rules import BEFORE_WRITE
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import is_size
from mstpass.torch_internals.fake_tensors import is_ordinary
from mstpass.walk import walk_once

aten = torch.ops.aten
_ZEROS = aten._efficientzerotensor.default
_ORDINARY: dict[Any, Any] = {_ZEROS: aten.full.default, aten._neg_view.default: aten.neg.default}
_cast = torch.ops.prims.convert_element_type.default
_ASSERT = torch.ops.aten._assert_scalar.default


def ordinary_tensors(joint: JointGraph) -> Rewritten:
    """A copy of the graph with ordinary tensors, of which none counts as changed; the graph itself
    if it has no others."""
    if not any(node.target in _ORDINARY for node in joint.nodes):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    for node in rewriting.joint.nodes:
        if node.target is _ZEROS:
            node.args = (node.args[0], 0)
        node.target = _ORDINARY.get(node.target, node.target)
        values = tensors_of(node.meta.get("val"))  # assertions have none
        if node.op == "call_function" and not all(map(is_ordinary, values)):
            rewriting.builder.compute_value(node)
            rewriting.replace(node, node, [])  # it has memory of its own: views of it are renewed
    return rewriting.finished(), frozenset()


def scattered_constants(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the casts, which change no region; the graph itself if none is
    missing."""
    lost = {n.name: dtype for n in joint.nodes if (dtype := _lost_dtype(n)) is not None}

    def cast(rewriting: Rewriting, node: fx.Node) -> None:
        readers = list(node.users)
        with rewriting.graph.inserting_after(node):
            new = rewriting.builder.call(_cast, node, lost[node.name])
        rewriting.replace(node, new, readers)

    return rewritten(joint, (joint.by_name[name] for name in lost), cast)


def _lost_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that a choice of numbers must have for its readers to have theirs; None if it has
    it, and of other nodes."""
    branches = [n for n in node.all_input_nodes if n.target is aten.scalar_tensor.default]
    if node.target is not aten.where.self or len(branches) != len(node.args[1:]):
        return None
    for user in filter(ops.is_pointwise, node.users):
        said = user.meta["val"].dtype
        if _dtype(user, {}) != said and _dtype(user, {node: said}) == said:
            return said
    return None


def _dtype(node: fx.Node, casts: Mapping[fx.Node, torch.dtype]) -> torch.dtype:
    """The dtype of a pointwise op's result by its operands, some of which are cast."""

    def value(operand: fx.Node) -> Any:
        known = operand.meta["val"]
        return known.to(casts[operand]) if operand in casts else known

    target: Any = node.target
    with fake_mode_of([node]):
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        found: torch.dtype = target(*args, **kwargs).dtype
    return found


def sizes_from_inputs(joint: JointGraph) -> Rewritten:
    """A copy of the graph whose sizes come from its inputs, which changes no region.

    The graph itself if they do already.
    """
    found = (node for node in joint.nodes if node.target is torch.ops.aten.sym_size.int)
    return rewritten(joint, found, _from_inputs)


def _from_inputs(rewriting: Rewriting, node: fx.Node) -> None:
    first = next(other for other in rewriting.joint.nodes if other.op != "placeholder")
    with rewriting.graph.inserting_before(first):
        (size,) = rewriting.sizes.arguments([node.meta["val"]])
    if isinstance(size, fx.Node):
        rewriting.replace(node, size)


def assertions_of_sizes(joint: JointGraph) -> Rewritten:
    """A copy of the graph without them; the graph itself if it has none."""
    found = (node for node in joint.nodes if node.target is _ASSERT and _is_of_sizes(node))
    return rewritten(joint, found, lambda rewriting, node: rewriting.graph.erase_node(node))


def _is_of_sizes(node: fx.Node) -> bool:
    """Whether what is asserted compares sizes of tensors."""
    given = lambda n: n.target is torch.ops.aten.sym_size.int or n.op == "placeholder"
    operands = walk_once(node.all_input_nodes, lambda n: () if given(n) else n.all_input_nodes)
    of_size = lambda n: is_size(n) or isinstance(n.meta.get("val"), torch.SymBool)
    computed = (given(n) or (n.all_input_nodes and of_size(n)) for n in operands)
    return bool(node.all_input_nodes) and all(computed)


# ---- inputs that the step overwrites -------------------------------------------------------------
def inputs_before_writes(joint: JointGraph) -> Rewritten:
    """A copy of the graph that has the ops, of which none counts as changed; the graph itself if it
    needs none."""
    names = overwritten_inputs(joint)
    if not names:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    new = rewriting.joint
    first_call = next(node for node in new.nodes if node.op != "placeholder")
    for name in names:
        node = new.by_name[name]
        readers = _early_readers(node, new)
        with rewriting.graph.inserting_before(first_call):
            before = rewriting.builder.call(BEFORE_WRITE, node)
        rewriting.replace(node, before, readers)
    return rewriting.finished(), frozenset()


def overwritten_inputs(joint: JointGraph) -> list[str]:
    """The names of the inputs that need an op: without them gradients may be wrong."""
    return [node.name for node in _overwritten(joint) if _backward_depends_on(node, joint)]


def as_copies(modules: Modules) -> None:
    """Replace the ops by copies, in the forward and the backward graph."""
    for module in modules:
        found = module.graph.find_nodes(op="call_function", target=BEFORE_WRITE)
        for node in found:
            node.target = aten.clone.default
        if found:
            module.recompile()


def _overwritten(joint: JointGraph) -> Iterator[fx.Node]:
    """The inputs that are written after all other ops of the forward, and never before."""
    returned = set(_overwritten_by_returned_values(joint))
    for node in joint.nodes:
        if node.op != "placeholder" or node in joint.backward or value_of(node) is None:
            continue
        writes = [user for user in node.users if _writes(user, node)]
        reads = [joint.index[n] for n in _readers(node) if n not in joint.backward]
        at_end = bool(writes) and joint.index[writes[0]] > max(reads, default=0)
        if at_end or (not writes and getattr(node.meta.get("desc"), "idx", None) in returned):
            yield node


def _overwritten_by_returned_values(joint: JointGraph) -> Iterator[int]:
    """The positions, among the step's inputs, of those whose new values the forward returns.

    Source: ``InputMutationAOTOutput`` in torch/_functorch/_aot_autograd/descriptors.py. A
    graph without descriptions has no such input as far as this can tell.
    """
    for description in (joint.output.meta.get("desc") or ())[: joint.num_fwd_outputs]:
        position = getattr(getattr(description, "mutated_input", None), "idx", None)
        if position is not None:
            yield position


def _writes(node: fx.Node, value: fx.Node) -> bool:
    return node.target is aten.copy_.default and node.args[0] is value


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read the value; those that read its sizes alone are none."""
    return [user for user in node.users if not _writes(user, node) and not is_size(user)]


def _early_readers(node: fx.Node, joint: JointGraph) -> list[fx.Node]:
    """The ops that read the value before the first write to it.

    An op of the backward reads what is there when it runs, if only the backward writes: after two
    forwards, the second of their backwards reads what the first has written.
    """
    writes = [user for user in node.users if _writes(user, node)]
    if not writes or any(write in joint.forward_writes for write in writes):
        return _readers(node)
    return [reader for reader in _readers(node) if reader in joint.forward]


def _backward_depends_on(node: fx.Node, joint: JointGraph) -> bool:
    later = walk_once(_early_readers(node, joint), lambda reader: reader.users)
    return any(reader in joint.backward for reader in later)
