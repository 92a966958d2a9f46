"""What backward may recompute: by the policies of ``torch.utils.checkpoint``, and by the op.

A checkpoint marks every op of its *checkpointed region* with a policy and with the number of the
region (``node.meta["recompute"]`` and ``node.meta["ac_graph_id"]``). Without a policy function the
policy is PREFER_RECOMPUTE. ``policies_of`` translates the policies to *tags* of the partition
problem (``Value.tag``):

    MUST_SAVE          the value is never recomputed; of a view, this holds for its base
    MUST_CPU_OFFLOAD   the same, and it crosses by way of the host (``Policies.offloaded``)
    PREFER_SAVE        no tag, as if the op had no policy
    PREFER_RECOMPUTE,  the value is not saved but recomputed, even if it is a matmul
    MUST_RECOMPUTE

A value that leaves its checkpointed region, because another region or an op outside reads it, may
be saved. Without a memory budget it is not recomputed if that takes a heavy op. So to recompute one
region never recomputes the region before it, and no region runs a second time only for its result.

torch differs in one point: it saves what the next region reads, except for views, and recomputes
what ops outside of regions read.

Source: ``cleanup_recompute_tags`` and ``solve_min_cut`` in torch/_functorch/partitioners.py.

An op with an effect, such as an error that it may raise, is never recomputed, as torch has it.

Inductor draws the seeds of a whole graph in one op, which belongs to no checkpoint. In new versions
of torch that op has the metadata of the first op that drew a seed, its policy included
(torch/_inductor/fx_passes/replace_random.py). That policy is ignored here.

Some ops are slow to recompute in backward (*heavy*), and some must not be (*pinned*).

heavy    matmuls, attention, loops, and every op that the op table does not know
pinned   ops whose second run may give other results: random draws, sorts and writes by index (ties
         may fall otherwise), collectives (graph/collectives.py), writes to operands, ops with an
         effect, and ops from outside of PyTorch that have no row in the op table

A pinned op is heavy, too. Ops that make opaque values, such as the process group of a mesh, are
neither.

*Writes to the inputs* of a step, such as the update of a buffer, are ``aten.copy_`` at its end.
AOTAutograd traces a step that writes to an input as one that computes the new value, and copies it
to the input after everything else. Such a write can be split and planned like any other op: it runs
once, in the forward, and is never recomputed. It takes no memory, and what it copies is computed
where it is written.

A partitioner that saves an input and recomputes from it in the backward reads the new value there.
So everything but the write reads the old value through ``BEFORE_WRITE``
(normalize/plain_values.py). That op is pinned: backward cannot repeat it.

``unproven_write`` names the first write that has another form. torch's own partitioner splits its
graph:

- the backward writes: a second call of it would find other values than the first;
- an op other than ``copy_``, as FSDP's graphs have them, or one that writes to a value of the
  graph;
- an op after the write reads the input, or the result of the write: its place in the order counts.

Source: ``create_functionalized_fn`` in torch/_functorch/_aot_autograd/graph_capture_wrappers.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, is_tangent, value_of
from mstpass.graph.op_rows.row import CHEAP, PINNED
from mstpass.graph.op_table import may_draw
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.problem.problem import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, RECOMPUTED
from mstpass.torch_internals.graphs import is_opaque, own_op
from mstpass.walk import walk, walk_once

aten = torch.ops.aten
_EXTREMA = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)


def is_heavy(node: fx.Node) -> bool:
    """Whether the op is slow to recompute."""
    if node.op != "call_function" or is_opaque(node):
        return False
    return ops.row(node).repeats != CHEAP or draws_random_numbers(node)


def is_pinned(node: fx.Node) -> bool:
    """Whether backward must not recompute the op.

    Loops are not pinned: the mode of their region says whether they may run again.
    """
    if node.op != "call_function" or is_opaque(node):
        return False
    return ops.row(node).repeats == PINNED or draws_random_numbers(node)


def has_effect(node: fx.Node) -> bool:
    """Whether the op runs for its effect: ``with_effects(token, op, ...) -> (token, *results)``.

    Tokens, tensors without elements, hold such ops in their order.
    """
    return node.target is torch.ops.higher_order.with_effects


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the op reads or advances a random state.

    Attention is tagged as random but does so only if its dropout is not 0.
    """
    if not may_draw(node.target):
        return False
    if has_argument(node, "dropout_p"):
        return bool(argument(node, "dropout_p") != 0.0)
    return True


def compared(node: fx.Node) -> set[fx.Node]:
    """A maximum, its views, the flags of values that equal it, and how many these are.

    Values that are computed again in another form may differ from it in their last bits. Nothing if
    there are no such flags.
    """
    if node.target not in _EXTREMA:
        return set()
    found = {*walk_once([node], lambda one: filter(_shows, one.users))}
    return found if any(one.target is aten.eq.Tensor for one in found) else set()


def _shows(user: fx.Node) -> bool:
    if user.target is aten.eq.Tensor or ops.is_view(user) or ops.is_copy(user):
        return True
    values = list(map(value_of, user.all_input_nodes))
    return all(value is not None and value.dtype == torch.bool for value in values)


# ---- heavy and pinned ops ------------------------------------------------------------------------
# The ops with which Inductor draws the seeds of all random ops of a graph.
_SEEDS_OF_GRAPH = ("prims.inductor_seeds.default", "prims.inductor_rand_eager_offsets.default")
_TAG_OF_POLICY = {
    CheckpointPolicy.MUST_SAVE: MUST_SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: PREFER_RECOMPUTE,
}


@dataclasses.dataclass(frozen=True)
class Policies:
    """The tags that the user's checkpoints put on the forward of one joint graph.

    Attributes:
        tags: the tag of each node that has one (problem/problem.py); views have none.
        boundary: values that leave a checkpointed region and depend on a heavy op of it.
        offloaded: values that must cross by way of the host.
    """

    tags: Mapping[fx.Node, str]
    boundary: Set[fx.Node]
    offloaded: Set[fx.Node] = frozenset()


def tag_of(node: fx.Node) -> str:
    """The tag of the op's own policy, regardless of its readers; empty if it has none."""
    if node.op != "call_function" or has_effect(node) or ops.op_name(node) in _SEEDS_OF_GRAPH:
        return ""
    policy: Any = node.meta.get("recompute")
    return _TAG_OF_POLICY.get(policy, "")


def policies_of(joint: JointGraph) -> Policies:
    """The tags of the forward nodes of a joint graph."""
    own_tags = {n: tag for n in joint.nodes if n not in joint.backward and (tag := tag_of(n))}
    if not own_tags:
        return Policies({}, frozenset())
    heavy = _with_heavy_op_before(own_tags)
    tags = {n: tag for n, tag in own_tags.items() if not ops.shares_storage(n)}
    boundary: set[fx.Node] = set()
    for node, tag in own_tags.items():
        base = ops.base_of(node)
        if base.op != "call_function":
            continue
        if tag == MUST_SAVE or _has_hook(node, own_tags):
            tags[base] = MUST_SAVE
        elif _leaves(node, joint) and tags.get(base) != MUST_SAVE:
            tags.pop(base, None)
            if base in heavy:
                boundary.add(base)
    for node in [n for n in tags if not _recomputable(n, tags)]:
        if tags[node] in RECOMPUTED:
            del tags[node]
    must_offload: Any = CheckpointPolicy.MUST_CPU_OFFLOAD
    offloaded = {ops.base_of(n) for n in own_tags if n.meta.get("recompute") is must_offload}
    return Policies(tags, boundary, offloaded)


def _with_heavy_op_before(tagged: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that take a heavy op to compute from the inputs of their checkpointed region."""
    heavy: set[fx.Node] = set()
    for node in tagged:
        before = (n for n in node.all_input_nodes if n in heavy)
        if is_heavy(node) or any(_region(n) == _region(node) for n in before):
            heavy.add(node)
    return heavy


def _region(node: fx.Node) -> object:
    return node.meta.get("ac_graph_id")


def _leaves(node: fx.Node, joint: JointGraph) -> bool:
    """Whether the forward reads the value outside of its checkpointed region, or returns it."""
    return node in joint.forward_outputs or any(
        user in joint.forward and not ("recompute" in user.meta and _region(user) == _region(node))
        for user in node.users
    )


def _has_hook(node: fx.Node, own_tags: Mapping[fx.Node, str]) -> bool:
    """Whether the node is the last of its region and has a backward hook, as FSDP sets one.

    The hook runs before the region is recomputed, because FSDP gathers its parameters there. So the
    value must not depend on that recomputation.
    """
    inside = any(own_tags.get(user) in RECOMPUTED for user in node.users)
    return bool(node.meta.get("has_backward_hook", False)) and not inside


def _recomputable(node: fx.Node, tags: Mapping[fx.Node, str]) -> bool:
    """Whether backward can recompute the node: an item of a tuple only together with its op."""
    is_item = node.target is operator.getitem
    return not is_item or tags.get(node.all_input_nodes[0]) in RECOMPUTED


# ---- writes to inputs ----------------------------------------------------------------------------
BEFORE_WRITE = own_op("before_write(Tensor x) -> Tensor", torch.clone, torch.clone)


def is_input_write(node: fx.Node) -> bool:
    """Whether the op copies a value to an input of the graph."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    written = node.args[0]
    return isinstance(written, fx.Node) and written.op == "placeholder"


def unproven_write(joint: JointGraph) -> str:
    """Why a write of the graph is left to torch's partitioner; empty if there is none such."""
    return joint.cached(_unproven_write)


def _unproven_write(joint: JointGraph) -> str:
    if joint.backward_writes:
        return f"the backward writes to an input ({joint.backward_writes[0].name})"
    for write in joint.forward_writes:
        if not is_input_write(write):
            return f"{write.name} writes to its operands"
        (written, *_) = write.all_input_nodes
        if is_tangent(written) or write in joint.backward:
            return f"{write.name} writes what the backward computes"
        through_views = lambda node: node.users if ops.shares_storage(node) else ()
        for reader in (*walk(written.users, through_views), *write.users):
            if reader is not joint.output and joint.index[reader] > joint.index[write]:
                return f"{reader.name} reads {written.name} after {write.name} has written to it"
    return ""
