"""Join attention and the MLP behind it to one region of tokens: a block of a transformer.

    x -> norm, queries, keys, values -> attention -> projection + x = h -> norm, MLP + h = y

Keys and values are computed of all tokens first, in a round of their own (loops/region_facts.py).
Then everything between ``x`` and ``y`` is computed chunk by chunk of the queries: attention reads
its queries row by row (graph/attention.py). In the backward, the gradients of keys and values are
sums over chunks; what is computed from them token by token follows in another round.

Pseudo-code::

    x        what the queries are computed from and the first residual sum behind attention reads
    y        the first residual sum behind the MLP
    forward  all nodes between x and y
    backward the MLP's and attention's, what is between them, and then, in the graph's order, each
             node that reads nothing but members, what members read, and weights of members
    specs    from x through all nodes; a node that has none is no member
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import OWN_LOOPS
from mstpass.graph.attention import (
    backwards_of,
    is_attention,
    is_attention_item,
    is_backward,
    mask_of,
    row_dims,
)
from mstpass.graph.axes import QUERIES, QUERY_AXIS
from mstpass.graph.joint import JointGraph, ancestors, numel, tensors_of, value_of
from mstpass.graph.sizes import generic_shape, is_size
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import (
    SUM,
    WHOLE,
    CannotTake,
    Reduced,
    Refusal,
    Spec,
    has_tokens,
    token_count,
)
from mstpass.plans import Region, Rejection
from mstpass.regions.grow import Growth, back_to, between, found_regions

KIND = "block"
_OF_MLP = ("source", "num_tokens", "width", "symbolic", "unbounded")
NO_RESIDUAL = OWN_LOOPS(
    "no residual sum joins attention's result to what its queries are computed from"
)
NO_MLP = OWN_LOOPS("no MLP that runs in chunks follows before the next attention")
LEAVES = OWN_LOOPS("another part of the model reads a value inside of the block")
MASK_OF_ANY_LENGTH = OWN_LOOPS(
    "attention with a mask needs chunks of queries of one length on this device"
)
NOT_BY_TOKEN = OWN_LOOPS("lies inside of the block and is not computed token by token")


def detect_blocks(
    joint: JointGraph, regions: Iterable[Region]
) -> tuple[list[Region], list[Rejection]]:
    """The blocks of the graph, each around one of the regions, and what was refused.

    Args:
        regions: those over tokens.
    """
    mlps = [r for r in regions if r.kind == "mlp" and not (r.fused or r.returned)]
    taken = {joint.by_name[name] for mlp in mlps for name, spec in mlp.members if spec != WHOLE}

    def region_of(attention: fx.Node) -> Region:
        mlp = _mlp_behind(joint, attention, mlps)
        others = taken - {joint.by_name[name] for name, _ in mlp.members}
        growth = _Block(joint, attention, mlp, others)
        region = growth.block()
        mlps.remove(mlp)
        taken.update(node for node, spec in growth.specs.items() if spec != WHOLE)
        return region

    forward = (node for node in joint.nodes if node not in joint.backward)
    attention = (node for node in forward if is_attention(node) and not is_backward(node))
    return found_regions(attention, region_of)


def _mlp_behind(joint: JointGraph, attention: fx.Node, mlps: Sequence[Region]) -> Region:
    """The first MLP that is computed from attention's result, before another attention is."""
    mlp_of = {name: mlp for mlp in reversed(mlps) for name in _forward(mlp)}
    for node in _behind(joint, [attention]):
        if node.name in mlp_of:
            return mlp_of[node.name]
    raise CannotTake(attention, NO_MLP)


def _behind(joint: JointGraph, starts: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What the forward computes from the starts, up to the next attention."""
    behind = set(starts)
    for node in joint.nodes[min(map(joint.index.__getitem__, starts)) :]:
        if node in joint.forward and not behind.isdisjoint(node.all_input_nodes):
            if is_attention(node):
                return
            behind.add(node)
            yield node


def _forward(region: Region) -> list[str]:
    return [n for n, spec in region.members if n not in region.backward and spec != WHOLE]


class _Block(Growth):
    """All between the two ends of a block.

    Attributes:
        read: what members read from outside, and how.
    """

    def __init__(self, joint: JointGraph, attention: fx.Node, mlp: Region, taken: Set[fx.Node]):
        super().__init__(joint, QUERY_AXIS)
        self.attention, self.mlp, self.others = attention, mlp, taken
        self.read: dict[fx.Node, set[Spec]] = {}
        self.bases: set[fx.Node] = set()  # of these
        mask = mask_of(attention)
        self.of_mask = set() if mask is None else ancestors([mask])

    def block(self) -> Region:
        """The block.

        Raises:
            CannotTake: there is none.
        """
        device = next(tensors_of(self.attention.meta["val"])).device
        if self.mlp.symbolic and mask_of(self.attention) is not None and device.type != "cpu":
            raise CannotTake(self.attention, MASK_OF_ANY_LENGTH)
        x, y = self._ends()
        self._add_forward(x, y)
        self._add_backward()
        mlp = {name: getattr(self.mlp, name) for name in _OF_MLP}
        return self.region(self._outputs(y), kind=KIND, axis=QUERIES, **mlp)

    # ---- the ends ------------------------------------------------------------------------------
    def _ends(self) -> tuple[fx.Node, fx.Node]:
        before = between(self.joint, None, [argument(self.attention, "query")])
        _, x = self._residual_sum([self.attention], before)
        widest = self._widest()
        before = between(self.joint, x, widest[:1]) | {x}
        y, _ = self._residual_sum(widest, before - set(widest))
        return x, y

    def _widest(self) -> list[fx.Node]:
        """The values of the MLP's forward that have its width."""
        specs = dict(self.mlp.members)
        found = []
        for name in _forward(self.mlp):
            node = self.joint.by_name[name]
            shape = generic_shape(next(tensors_of(node.meta["val"])))
            if numel(node) >= self.mlp.width * token_count(shape, specs[name] or WHOLE):
                found.append(node)
        return found

    def _residual_sum(
        self, starts: Collection[fx.Node], before: Set[fx.Node]
    ) -> tuple[fx.Node, fx.Node]:
        """The first sum of what is computed from ``starts`` and of one of the values before them.

        Raises:
            CannotTake: there is none.
        """
        for node in _behind(self.joint, starts):
            for operand in node.all_input_nodes:
                if operand in before and numel(operand) == numel(node):
                    return node, operand
        raise CannotTake(self.attention, NO_RESIDUAL)

    # ---- members -------------------------------------------------------------------------------
    def _add_forward(self, x: fx.Node, y: fx.Node) -> None:
        cone = between(self.joint, x, [y])
        if self.attention not in cone:
            raise CannotTake(self.attention, NO_RESIDUAL)
        self._read(x, self._spec_of_input(x, cone))
        for node in self.joint.sorted(cone):
            if is_attention(node) and node is not self.attention:
                raise CannotTake(node, OWN_LOOPS("another attention lies inside of the block"))
            if not self._try_add(node):
                raise CannotTake(node, NOT_BY_TOKEN)

    def _spec_of_input(self, x: fx.Node, cone: Set[fx.Node]) -> Spec:
        """The token dims of the block's input, from those of attention's queries."""
        specs: dict[fx.Node, Spec] = {self.attention: row_dims(self.attention)}
        for node in reversed(self.joint.sorted(cone)):
            needs = self._needs_of(node, specs[node]) if node in specs else {}
            for operand, spec in needs.items():
                if spec:
                    specs.setdefault(operand, spec)
        if x not in specs:
            raise CannotTake(x, NOT_BY_TOKEN)
        return specs[x]

    def _add_backward(self) -> None:
        joint = self.joint
        of_mlp = {joint.by_name[n]: spec for n, spec in self.mlp.members if spec != WHOLE}
        own = {node for node in of_mlp if not ops.is_constant(node)} - joint.forward
        own |= backwards_of(self.attention)
        own |= {item for node in own if is_attention(node) for item in node.users}
        if not any(map(is_attention, own)):
            raise CannotTake(
                self.attention, OWN_LOOPS("the backward of a block's attention is not one op")
            )
        own |= set(back_to(joint, own, own)) - joint.forward
        for node, spec in of_mlp.items():
            if node in own and spec:
                for operand, held in self._needs_of(node, spec).items():
                    if operand not in own and operand not in self.specs and held:
                        self._read(operand, held)
        for node in joint.nodes:
            if node in joint.forward or node in self.specs:
                continue
            if node in own:
                if not self._try_add(node):
                    if of_mlp.get(node, WHOLE) is not None:
                        raise CannotTake(node, NOT_BY_TOKEN)
                    self.specs[node] = SUM  # it adds sums up
            elif node not in self.others and self._reads_only_known(node):
                self._try_add(node)
        self._drop_unused()

    def _reads_only_known(self, node: fx.Node) -> bool:
        """Whether the node reads what the block has or reads, and nothing besides."""
        if node.op != "call_function" or is_attention(node):
            return False
        operands = [n for n in node.all_input_nodes if not is_size(n)]
        if not any(n in self.specs for n in operands):  # as x ** 2
            if not ops.is_pointwise(node) or not any(map(self.held, operands)):
                return False
        return all(n in self.specs or n in self.read or self._is_own_constant(n) for n in operands)

    def _is_own_constant(self, node: fx.Node) -> bool:
        """Whether the node is a constant, or shows what members read views of, as a weight.

        It may be cast to a wider dtype, as a norm's weight is by the norm's gradient in torch 2.15.
        """
        node = ops.behind(node, ops.widens)
        if ops.is_constant(node):
            return True
        base = ops.base_of(node)
        return base not in self.joint.backward and base in self.bases

    def _drop_unused(self) -> None:
        """Leave out what others make for themselves, and what no gradient is.

        The former are views of results, and their casts to wider dtypes.
        """
        for node in reversed(self.joint.sorted(self.specs)):
            if node in self.joint.forward or any(user in self.specs for user in node.users):
                continue
            is_small = ops.is_cheap_view(node) or ops.widens(node)
            if (is_small and has_tokens(self.specs[node])) or node not in self.joint.backward:
                del self.specs[node]

    # ---- specs ---------------------------------------------------------------------------------
    def _try_add(self, node: fx.Node) -> bool:
        """Add the node, if its op computes it token by token, or sums it over tokens."""
        if node in self.specs:
            return True
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            held = self.held(operand)
            result = self.result(node, operand, held) if held else WHOLE
            if isinstance(result, Refusal) or (result != SUM and not has_tokens(result)):
                continue
            needs = self.needs_for(node, result)
            if not isinstance(needs, Refusal) and self._fit(needs):
                self.add(node, result)
                return True
        return False

    def held(self, node: fx.Node) -> Spec | None:
        """How members may read the value chunk by chunk; None if they may not.

        The gradients of keys and values are read so once they are complete.
        """
        spec = self.specs.get(node)
        if spec == SUM and is_attention_item(node):
            spec = self.specs[node.all_input_nodes[0]]
        if spec is not None:
            return None if isinstance(spec, Reduced) else spec
        found = self.read.get(node, set()) - {WHOLE}
        return next(iter(found)) if len(found) == 1 else None

    def _fit(self, needs: Mapping[fx.Node, Spec]) -> bool:
        """Whether the block has, or can read, the operands with these specs."""
        for operand, spec in needs.items():
            if operand in self.specs and spec == WHOLE and self.specs[operand] != WHOLE:
                if is_attention_item(operand) or operand in self.joint.backward:
                    return False
                continue  # keys and values, complete
            held = self.held(operand)
            if spec != WHOLE and held is not None and held != spec:
                return False
        return True

    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        if operand in self.specs:
            return
        if self._is_pulled(operand, spec):
            self._put(operand, spec)
        else:
            self._read(operand, spec)

    def _pushes(self, member: fx.Node) -> bool:
        return False

    def _read(self, operand: fx.Node, spec: Spec) -> None:
        self.read.setdefault(operand, set()).add(spec)
        self.bases.add(ops.base_of(operand))

    def _is_pulled(self, node: fx.Node, spec: Spec) -> bool:
        """Whether a loop makes the value itself: a constant, or what masks are computed from."""
        if not spec or node.op != "call_function":
            return ops.is_constant(node)
        if not ops.is_constant(node) and node not in self.of_mask:
            return False
        return not isinstance(self.operand_specs(node, spec), Refusal)

    # ---- what leaves ---------------------------------------------------------------------------
    def _outputs(self, y: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        for node in self.joint.sorted(self.specs):
            if self.specs[node] == WHOLE or ops.is_constant(node):
                continue
            outside = [user for user in node.users if user not in self.specs]
            complete = [user for user in node.users if self._reads_complete(user, node)]
            if not outside and not complete:
                continue
            if value_of(node) is None:
                continue  # states of random numbers, which nobody reads
            if outside and node in self.joint.forward and node is not y:
                raise CannotTake(node, LEAVES)
            found.append(node)
        return found

    def _reads_complete(self, user: fx.Node, node: fx.Node) -> bool:
        own = self.specs[node]
        held = self.specs.get(user, WHOLE)
        return held != WHOLE and self.required_specs(user).get(node, own) != own
