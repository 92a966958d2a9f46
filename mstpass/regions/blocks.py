"""Join attention and the MLP behind it to one region of tokens: a block of a transformer.

    x -> norm, queries, keys, values -> attention -> projection + x = h -> norm, MLP + h = y

Keys and values are computed of all tokens first, in a round of their own (loops/rounds.py). Then
everything between ``x`` and ``y`` is computed chunk by chunk of the queries: attention reads
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

from collections.abc import Collection, Iterable, Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import (
    is_attention,
    is_attention_item,
    is_backward,
    mask_of,
    row_dims,
)
from mstpass.graph.axes import QUERIES, QUERY_AXIS
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import JointGraph, ancestors, numel, tensors_of, value_of
from mstpass.graph.sizes import generic_shape, is_size
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec, token_count
from mstpass.plans import Region, Rejection
from mstpass.regions.grow import rejection_of
from mstpass.regions.paths import between, between_each_other

KIND = "block"
NO_RESIDUAL = "no residual sum joins attention's result to what its queries are computed from"
NO_MLP = "no MLP that runs in chunks follows before the next attention"
LEAVES = "another part of the model reads a value inside of the block"
MASK_OF_ANY_LENGTH = "attention with a mask needs chunks of queries of one length on this device"
NOT_BY_TOKEN = "lies inside of the block and is not computed token by token"

Specs = dict[fx.Node, Spec | None]  # None: summed over tokens


def detect_blocks(
    joint: JointGraph, regions: Iterable[Region]
) -> tuple[list[Region], list[Rejection]]:
    """The blocks of the graph, each around one of the regions, and what was refused.

    Args:
        regions: those over tokens.
    """
    mlps = [r for r in regions if r.kind == "mlp" and not (r.fused or r.returned)]
    taken = {name for region in mlps for name, spec in region.members if spec != WHOLE}
    blocks: list[Region] = []
    rejections: list[Rejection] = []
    for node in joint.nodes:
        if node in joint.backward or not is_attention(node) or is_backward(node):
            continue
        try:
            mlp = _mlp_behind(joint, node, mlps)
            others = taken - {name for name, _ in mlp.members}
            blocks.append(_Block(joint, node, mlp, others).region())
        except CannotTake as refusal:
            rejections.append(rejection_of(node, refusal))
        else:
            mlps.remove(mlp)
            taken |= {name for name, spec in blocks[-1].members if spec != WHOLE}
    return blocks, rejections


def _mlp_behind(joint: JointGraph, attention: fx.Node, mlps: Iterable[Region]) -> Region:
    """The first MLP that is computed from attention's result, before another attention is."""
    first = {joint.by_name[_forward(mlp)[0]]: mlp for mlp in mlps}
    behind = {attention}
    for node in joint.nodes[joint.index[attention] + 1 :]:
        if node not in joint.forward or behind.isdisjoint(node.all_input_nodes):
            continue
        behind.add(node)
        if is_attention(node):
            break
        for start, mlp in first.items():
            if node is start or node.name in _forward(mlp):
                return mlp
    raise CannotTake(attention, NO_MLP)


def _forward(region: Region) -> list[str]:
    return [n for n, spec in region.members if n not in region.backward and spec != WHOLE]


class _Block:
    """One block while it is put together."""

    def __init__(self, joint: JointGraph, attention: fx.Node, mlp: Region, taken: Set[str]):
        self.joint, self.attention, self.mlp, self.taken = joint, attention, mlp, taken
        self.specs: Specs = {}  # of members
        self.read: dict[fx.Node, set[Spec]] = {}  # what members read from outside, and how
        self.bases: set[fx.Node] = set()  # of these
        mask = mask_of(attention)
        self.of_mask = set() if mask is None else ancestors([mask])

    def region(self) -> Region:
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
        outputs = self._outputs(y)
        members = self.joint.sorted(self.specs)
        return Region(
            kind=KIND,
            source=self.mlp.source,
            num_tokens=self.mlp.num_tokens,
            width=self.mlp.width,
            symbolic=self.mlp.symbolic,
            unbounded=self.mlp.unbounded,
            fused=False,
            members=tuple((node.name, self.specs[node]) for node in members),
            outputs=tuple(node.name for node in outputs),
            backward=frozenset(node.name for node in members if node in self.joint.backward),
            unit=None,
            axis=QUERIES,
        )

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
        joint, behind = self.joint, set(starts)
        for node in joint.nodes[min(map(joint.index.__getitem__, starts)) :]:
            if node not in joint.forward or behind.isdisjoint(node.all_input_nodes):
                continue
            if is_attention(node):
                break
            behind.add(node)
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
                raise CannotTake(node, "another attention lies inside of the block")
            if not self._try_add(node):
                raise CannotTake(node, NOT_BY_TOKEN)

    def _spec_of_input(self, x: fx.Node, cone: Set[fx.Node]) -> Spec:
        """The token dims of the block's input, from those of attention's queries."""
        specs: dict[fx.Node, Spec] = {self.attention: row_dims(self.attention)}
        for node in reversed(self.joint.sorted(cone)):
            if not specs.get(node):
                continue
            needs = QUERY_AXIS.operand_specs(node, specs[node])
            if isinstance(needs, Refusal):
                raise CannotTake(node, needs.reason)
            for operand, spec in needs.items():
                if spec:
                    specs.setdefault(operand, spec)
        if not specs.get(x):
            raise CannotTake(x, NOT_BY_TOKEN)
        return specs[x]

    def _add_backward(self) -> None:
        joint = self.joint
        of_mlp = {joint.by_name[n]: spec for n, spec in self.mlp.members if spec != WHOLE}
        own = {node for node in of_mlp if not ops.is_constant(node)} - joint.forward
        out = {user for user in self.attention.users if is_attention_item(user)}
        own |= {u for item in out for u in item.users if is_attention(u) and is_backward(u)}
        own |= {item for node in own if is_attention(node) for item in node.users}
        if not any(map(is_attention, own)):
            raise CannotTake(self.attention, "the backward of a block's attention is not one op")
        own |= between_each_other(joint, own)
        for node, spec in of_mlp.items():
            if node in own and spec:
                for operand, held in self._needs(node, spec).items():
                    if operand not in own and operand not in self.specs and held:
                        self._read(operand, held)
        for node in joint.nodes:
            if node in joint.forward or node in self.specs:
                continue
            if node in own:
                if not self._try_add(node):
                    if of_mlp.get(node, WHOLE) is not None:
                        raise CannotTake(node, NOT_BY_TOKEN)
                    self.specs[node] = None  # it adds sums up
            elif node.name not in self.taken and self._reads_only_known(node):
                self._try_add(node)
        self._drop_unused()

    def _reads_only_known(self, node: fx.Node) -> bool:
        """Whether the node reads what the block has or reads, and nothing besides."""
        if node.op != "call_function" or is_attention(node):
            return False
        operands = [n for n in node.all_input_nodes if not is_size(n)]
        if not any(n in self.specs for n in operands):  # as x ** 2
            if not ops.is_pointwise(node) or not any(map(self._held, operands)):
                return False
        return all(n in self.specs or n in self.read or self._is_own_constant(n) for n in operands)

    def _is_own_constant(self, node: fx.Node) -> bool:
        """Whether the node is a constant, or shows what members read views of, as a weight.

        It may be cast to a wider dtype, as a norm's weight is by the norm's gradient in torch 2.15.
        """
        while node.op == "call_function" and ops.widens(node):
            node = node.all_input_nodes[0]
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
            is_small = self.specs[node] and (ops.is_cheap_view(node) or ops.widens(node))
            if is_small or node not in self.joint.backward:
                del self.specs[node]

    # ---- specs ---------------------------------------------------------------------------------
    def _needs(self, node: fx.Node, spec: Spec) -> Mapping[fx.Node, Spec]:
        found = QUERY_AXIS.operand_specs(node, spec)
        if isinstance(found, Refusal):
            raise CannotTake(node, found.reason)
        return found

    def _try_add(self, node: fx.Node) -> bool:
        """Add the node, if its op computes it token by token, or sums it over tokens."""
        if node in self.specs:
            return True
        if node.op != "call_function" or is_collective(node) or is_wait(node):
            return False
        for operand in node.all_input_nodes:
            held = self._held(operand)
            if not held:
                continue
            result = QUERY_AXIS.result_spec(node, operand, held)
            if isinstance(result, Refusal) or result == WHOLE:
                continue
            if isinstance(result, Reduced):
                needs: Mapping[fx.Node, Spec] = QUERY_AXIS.sum_operands(node, operand, held)
                if result.combine != "sum":
                    continue
            else:
                found = QUERY_AXIS.operand_specs(node, result)
                if isinstance(found, Refusal):
                    continue
                needs = found
            if not self._fit(needs):
                continue
            self._note(node, None if isinstance(result, Reduced) else result, needs)
            return True
        return False

    def _held(self, node: fx.Node) -> Spec | None:
        """How members may read the value chunk by chunk; None if they may not.

        The gradients of keys and values are read so once they are complete.
        """
        if node in self.specs:
            spec = self.specs[node]
            if spec is None and is_attention_item(node):
                return self.specs[node.all_input_nodes[0]]
            return spec
        found = self.read.get(node, set()) - {WHOLE}
        return next(iter(found)) if len(found) == 1 else None

    def _fit(self, needs: Mapping[fx.Node, Spec]) -> bool:
        """Whether the block has, or can read, the operands with these specs."""
        for operand, spec in needs.items():
            if operand in self.specs and spec == WHOLE and self.specs[operand] != WHOLE:
                if is_attention_item(operand) or operand in self.joint.backward:
                    return False
                continue  # keys and values, complete
            held = self._held(operand)
            if spec != WHOLE and held is not None and held != spec:
                return False
        return True

    def _note(self, node: fx.Node, spec: Spec | None, needs: Mapping[fx.Node, Spec]) -> None:
        self.specs[node] = spec
        stack = [*needs.items()]
        while stack:
            operand, held = stack.pop()
            if operand in self.specs:
                continue
            if self._is_pulled(operand, held):
                self.specs[operand] = held
                stack += self._needs(operand, held).items() if held else ()
            else:
                self._read(operand, held)

    def _read(self, operand: fx.Node, held: Spec) -> None:
        self.read.setdefault(operand, set()).add(held)
        self.bases.add(ops.base_of(operand))

    def _is_pulled(self, node: fx.Node, spec: Spec) -> bool:
        """Whether a loop makes the value itself: a constant, or what masks are computed from."""
        if not spec or node.op != "call_function":
            return ops.is_constant(node)
        if not ops.is_constant(node) and node not in self.of_mask:
            return False
        return not isinstance(QUERY_AXIS.operand_specs(node, spec), Refusal)

    # ---- what leaves ---------------------------------------------------------------------------
    def _outputs(self, y: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        for node in self.joint.sorted(self.specs):
            spec = self.specs[node]
            if spec == WHOLE or ops.is_constant(node):
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
        spec = self.specs.get(user, WHOLE)
        if spec == WHOLE:
            return False
        if spec is None:
            source = next(n for n in user.all_input_nodes if self._held(n))
            held = self._held(source)
            if self.specs.get(source, WHOLE) is None and not is_attention_item(source):
                return False
            assert held, "each value of a block is held"
            needs = QUERY_AXIS.sum_operands(user, source, held)
        else:
            needs = dict(self._needs(user, spec))
        return needs.get(node, self.specs[node]) != self.specs[node]
