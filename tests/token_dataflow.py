"""The token dims of every value of a joint graph, and the ops at which they end.

Terms:
    *cut*: the spec along which a value can be cut into chunks of tokens (tokens.py).
    *barrier*: an op whose result is not computed token by token, such as attention, a sort over
        tokens, or an op without a rule. A value after a barrier may have a cut again if the ops
        there need it so.
    *mixed*: a value that depends on tokens but has no cut.

The tokens are the rows of linear layers (products with a weight). If layers have different numbers
of rows, the number with the most bytes of results counts. The names of nodes play no part::

    give the results of linear layers with N rows the cut along their rows
    repeat until no value gets a new cut:
        in order:     a value gets the cut that all its operands with a cut give it
        in reverse:   a value gets the cut that all its users with a cut need of it
    a node whose operands do not have the cuts that its rule needs is a barrier

The last step looks at every op again, so no order of the steps can lead to a wrong cut: apart from
barriers, each cut is confirmed by one row of the op table.

The detection of regions does not use this analysis. It finds gaps of the op table (``missing_ops``)
and checks the token rules on whole graphs.

Limits: one number of tokens (of an encoder and a decoder with different lengths, the values of the
shorter one are mixed); static sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.sizes import is_static
from mstpass.graph.tokens import WHOLE, Reduced, Refusal, Spec, token_count


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Marks a value that depends on tokens but has no cut: the barrier before it and its reason."""

    op: str
    reason: str


Cut = Spec | Reduced | Mixed


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """The result: the cut of each value (``WHOLE``: it has no tokens), and why each barrier is one.

    Both mappings are by node name.
    """

    num_tokens: int
    cuts: Mapping[str, Cut]
    barriers: Mapping[str, str]

    def carries(self, node: fx.Node) -> bool:
        """Whether the value depends on single tokens: cut along them, or mixed."""
        cut = self.cuts.get(node.name, WHOLE)
        return cut != WHOLE and not isinstance(cut, Reduced)


def token_dims(joint: JointGraph) -> Dataflow:
    """Find the token dims of every value of the graph. Changes nothing.

    Raises:
        ValueError: a size is symbolic.
    """
    for node in joint.nodes:
        if not all(map(is_static, tensors_of(node.meta.get("val")))):
            raise ValueError(f"{node.name} has symbolic sizes")
    return _Analysis(joint).result()


def missing_ops(joint: JointGraph) -> Counter[str]:
    """How often ops without a row in the op table read values that depend on tokens, by op."""
    flow = token_dims(joint)
    missing: Counter[str] = Counter()
    for node in joint.nodes:
        if node.op == "call_function" and isinstance(ops.lookup(node), ops.NoRule):
            if any(map(flow.carries, node.all_input_nodes)):
                missing[str(node.target)] += 1
    return missing


class _Analysis:
    def __init__(self, joint: JointGraph):
        self.joint = joint
        self.nodes = [n for n in joint.nodes if any(True for _ in tensors_of(n.meta.get("val")))]
        seeds = list(_linear_layers(self.nodes))
        sizes: Counter[int] = Counter()
        for node, spec in seeds:
            sizes[_tokens(node, spec)] += nbytes(node)
        self.num_tokens = max(sizes, key=lambda n: sizes[n]) if sizes else 0
        self.cuts: dict[fx.Node, Spec | Reduced] = {}
        for node, spec in seeds:
            if _tokens(node, spec) == self.num_tokens > 1:
                self.cuts[node] = spec

    def result(self) -> Dataflow:
        while self._propagate_forward() + self._propagate_backward():
            pass
        cuts: dict[str, Cut] = {}
        barriers: dict[str, str] = {}
        for node in self.nodes:
            reason = self._why_barrier(node)
            if reason:
                barriers[node.name] = reason
            cuts[node.name] = self.cuts.get(node) or self._uncut(node, reason, cuts)
        return Dataflow(self.num_tokens, cuts, barriers)

    # ---- finding cuts --------------------------------------------------------------------------
    def _propagate_forward(self) -> int:
        return sum(
            self._accept(n, self._cuts_from_operands(n)) for n in self.nodes if n not in self.cuts
        )

    def _propagate_backward(self) -> int:
        unknown = [n for n in reversed(self.nodes) if n not in self.cuts]
        return sum(self._accept(n, self._cuts_from_users(n)) for n in unknown)

    def _accept(self, node: fx.Node, cuts: set[Spec | Reduced]) -> bool:
        """Give the node its cut if there is exactly one candidate. Returns whether it has one."""
        if len(cuts) != 1:
            return False
        (cut,) = cuts
        if not isinstance(cut, Reduced) and _tokens(node, cut) != self.num_tokens:
            return False
        self.cuts[node] = cut
        return True

    def _cuts_from_operands(self, node: fx.Node) -> set[Spec | Reduced]:
        """The cuts of the result that follow from the operands with a cut."""
        found: set[Spec | Reduced] = set()
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if isinstance(cut, tuple):
                result = ops.result_spec(node, operand, cut)
                if not isinstance(result, Refusal):
                    found.add(result)
        return found

    def _cuts_from_users(self, node: fx.Node) -> set[Spec | Reduced]:
        """The cuts of the value that the users with a cut need."""
        if value_of(node) is None and isinstance(ops.lookup(node), Refusal):
            return set()  # a barrier with several results, each of which has a cut of its own
        needs = (self._needs(user) for user in node.users if user in self.cuts)
        wanted = (n.get(node, WHOLE) for n in needs if not isinstance(n, Refusal))
        return {spec for spec in wanted if spec != WHOLE}

    def _needs(self, node: fx.Node) -> Mapping[fx.Node, Spec] | Refusal:
        cut = self.cuts[node]
        if isinstance(cut, tuple):
            return ops.operand_specs(node, cut)
        for operand in node.all_input_nodes:
            spec = self.cuts.get(operand)
            if not isinstance(spec, tuple):
                continue
            if isinstance(ops.result_spec(node, operand, spec), Reduced):
                return ops.sum_operands(node, operand, spec)
        return Refusal("no operand of the sum is cut")

    # ---- checking them -------------------------------------------------------------------------
    def _why_barrier(self, node: fx.Node) -> str:
        """Why the node is a barrier; empty if its operands have the cuts that its rule needs."""
        if node.op != "call_function" or self._is_item_of_barrier(node):
            return ""
        if node not in self.cuts:
            return self._why_uncut(node)
        needs = self._needs(node)
        if isinstance(needs, Refusal):
            return needs.reason
        for operand, need in needs.items():
            cut = self.cuts.get(operand, WHOLE)
            if cut != need and not (need == WHOLE and isinstance(cut, Reduced)):
                if need == WHOLE:
                    return f"every token needs all of {operand.name}"
                return f"needs {operand.name} cut along {need}, not {cut}"
        return ""

    def _is_item_of_barrier(self, node: fx.Node) -> bool:
        """Whether the node is one of several results of a barrier; only the op itself counts."""
        return node.target is operator.getitem and isinstance(
            ops.lookup(node.all_input_nodes[0]), Refusal
        )

    def _why_uncut(self, node: fx.Node) -> str:
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if isinstance(cut, tuple):
                result = ops.result_spec(node, operand, cut)
                if isinstance(result, Refusal):
                    return result.reason
        cuts = self._cuts_from_operands(node)
        return f"its operands give it different token dims: {cuts}" if len(cuts) > 1 else ""

    def _uncut(self, node: fx.Node, reason: str, known: Mapping[str, Cut]) -> Cut:
        """What to note for a value without a cut: mixed if it depends on tokens, else whole."""
        if reason:
            return Mixed(node.name, reason)
        causes = (known[i.name] for i in node.all_input_nodes if i.name in known)
        return next((c for c in causes if isinstance(c, Mixed)), WHOLE)


def _tokens(node: fx.Node, spec: Spec) -> int:
    return token_count(next(tensors_of(node.meta["val"])).shape, spec)


def _linear_layers(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, Spec]]:
    """The products of one matrix of tokens with a weight, each with its token dim."""
    for node in nodes:
        out = value_of(node)
        if not ops.is_matmul(node) or out is None or (out.dim() == 3 and out.shape[0] != 1):
            continue
        left, right = ops.matmul_factors(node)
        if ops.is_weight(right):
            yield node, (out.dim() - 2,)
        elif ops.is_weight(left):
            yield node, (out.dim() - 1,)
