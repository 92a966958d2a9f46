"""Token dims of every value of a joint graph: where they run, and at which ops that ends.

Terms:
    *cut*: the spec along which a value can be cut into chunks of tokens (tokens.py).
    *barrier*: an op whose result is not computed token by token: attention, a sort over tokens, an
        op without a rule. What comes after it may be cut again where the ops there need it so.
    *mixed*: a value that depends on tokens but has no cut.

Tokens are the rows of linear layers (a product with a weight); of several row counts, the one with
the most bytes. Names play no part::

    seed the results of linear layers with N rows
    repeat until nothing is new:
        in order:  a value gets the cut that all its operands with a cut give it
        reversed:  a value gets the cut that all its users with a cut need of it
    a node whose operands do not have the cuts that its rule needs is a barrier

The last step looks at every op again, so the order in which cuts are found cannot make a wrong one:
``cuts`` without ``barriers`` is a set of local statements, each by one row of the op table.

Limits: one token count (an encoder and a decoder of different lengths are not told apart, the
shorter is mixed); static sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.sizes import is_static
from mstpass.graph.tokens import SUM, WHOLE, Refusal, Spec, Sum, token_count


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value without a cut: the op that ended it, and why."""

    op: str
    reason: str


Cut = Spec | Sum | Mixed


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """By node name: how each value is cut (``WHOLE``: not by tokens), and each barrier's reason."""

    num_tokens: int
    cuts: Mapping[str, Cut]
    barriers: Mapping[str, str]

    def carries(self, node: fx.Node) -> bool:
        """Whether the value depends on single tokens: cut along them, or mixed."""
        cut = self.cuts.get(node.name, WHOLE)
        return cut != WHOLE and not isinstance(cut, Sum)


def token_dims(joint: JointGraph) -> Dataflow:
    """Where tokens run in the graph. Changes nothing.

    Raises:
        ValueError: sizes are symbolic.
    """
    for node in joint.nodes:
        if not all(map(is_static, tensors_of(node.meta.get("val")))):
            raise ValueError(f"{node.name} has symbolic sizes")
    return _Analysis(joint).result()


def missing_ops(joint: JointGraph) -> Counter[str]:
    """Ops on token-carrying values that the op table has no rule for, with their counts."""
    flow = token_dims(joint)
    missing: Counter[str] = Counter()
    for node in joint.nodes:
        if node.op == "call_function" and isinstance(op_table.lookup(node), op_table.NoRule):
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
        self.cuts: dict[fx.Node, Spec | Sum] = {}
        for node, spec in seeds:
            if _tokens(node, spec) == self.num_tokens > 1:
                self.cuts[node] = spec

    def result(self) -> Dataflow:
        while self._in_order() + self._reversed():
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
    def _in_order(self) -> int:
        return sum(self._settle(n, self._given(n)) for n in self.nodes if n not in self.cuts)

    def _reversed(self) -> int:
        unknown = [n for n in reversed(self.nodes) if n not in self.cuts]
        return sum(self._settle(n, self._needed(n)) for n in unknown)

    def _settle(self, node: fx.Node, found: set[Spec | Sum]) -> bool:
        """Accept a cut that nothing contradicts."""
        if len(found) != 1:
            return False
        (cut,) = found
        if not isinstance(cut, Sum) and _tokens(node, cut) != self.num_tokens:
            return False
        self.cuts[node] = cut
        return True

    def _given(self, node: fx.Node) -> set[Spec | Sum]:
        """What the operands that have a cut make of the result."""
        found: set[Spec | Sum] = set()
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if isinstance(cut, tuple):
                result = op_table.result_spec(node, operand, cut)
                if not isinstance(result, Refusal):
                    found.add(result)
        return found

    def _needed(self, node: fx.Node) -> set[Spec | Sum]:
        """How the users that have a cut need the value to be cut."""
        if value_of(node) is None and isinstance(op_table.lookup(node), Refusal):
            return set()  # several results of an op without a rule: each is cut as it needs
        needs = (self._needs(user) for user in node.users if user in self.cuts)
        wanted = (n.get(node, WHOLE) for n in needs if not isinstance(n, Refusal))
        return {spec for spec in wanted if spec != WHOLE}

    def _needs(self, node: fx.Node) -> Mapping[fx.Node, Spec] | Refusal:
        cut = self.cuts[node]
        if isinstance(cut, tuple):
            return op_table.operand_specs(node, cut)
        for operand in node.all_input_nodes:
            spec = self.cuts.get(operand)
            if isinstance(spec, tuple) and op_table.result_spec(node, operand, spec) == SUM:
                return op_table.sum_operands(node, operand, spec)
        return Refusal("sums nothing that is cut")

    # ---- checking them -------------------------------------------------------------------------
    def _why_barrier(self, node: fx.Node) -> str:
        """Why a node is no token-parallel op of its operands' cuts; empty where it is one."""
        if node.op != "call_function" or self._is_item_of_barrier(node):
            return ""
        if node not in self.cuts:
            return self._why_uncut(node)
        needs = self._needs(node)
        if isinstance(needs, Refusal):
            return needs.reason
        for operand, need in needs.items():
            cut = self.cuts.get(operand, WHOLE)
            if cut != need and not (need == WHOLE and isinstance(cut, Sum)):
                if need == WHOLE:
                    return f"every token needs all of {operand.name}"
                return f"needs {operand.name} cut along {need}, not {cut}"
        return ""

    def _is_item_of_barrier(self, node: fx.Node) -> bool:
        """The barrier is the op with several results, not the picking of one of them."""
        return node.target is operator.getitem and isinstance(
            op_table.lookup(node.all_input_nodes[0]), Refusal
        )

    def _why_uncut(self, node: fx.Node) -> str:
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if isinstance(cut, tuple):
                result = op_table.result_spec(node, operand, cut)
                if isinstance(result, Refusal):
                    return result.reason
        found = self._given(node)
        return f"its operands give it different token dims: {found}" if len(found) > 1 else ""

    def _uncut(self, node: fx.Node, reason: str, known: Mapping[str, Cut]) -> Cut:
        """A value without a cut of its own: mixed where tokens reach it, whole elsewhere."""
        if reason:
            return Mixed(node.name, reason)
        causes = (known[i.name] for i in node.all_input_nodes if i.name in known)
        return next((c for c in causes if isinstance(c, Mixed)), WHOLE)


def _tokens(node: fx.Node, spec: Spec) -> int:
    return token_count(next(tensors_of(node.meta["val"])).shape, spec)


def _linear_layers(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, Spec]]:
    """Products of one matrix of rows with a weight, and the dim along which their rows run."""
    for node in nodes:
        out = value_of(node)
        if not op_table.is_matmul(node) or out is None or (out.dim() == 3 and out.shape[0] != 1):
            continue
        left, right = op_table.matmul_factors(node)
        if op_table.is_weight(right):
            yield node, (out.dim() - 2,)
        elif op_table.is_weight(left):
            yield node, (out.dim() - 1,)
