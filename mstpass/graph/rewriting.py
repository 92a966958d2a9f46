"""A copy of a joint graph that a pass rewrites; its recorded values stay exact.

Put the nodes of a graph into an order in which each one follows what it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from torch import fx

from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.joint import JointGraph, ancestors
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.renew_values import Renewal
from mstpass.graph.tokens import CannotTake
from mstpass.walk import CircleError, needed_first


def put_in_order(graph: fx.Graph) -> None:
    """Move each node to where it was, or earlier where another one needs it.

    Nodes that nothing needs are left out.

    Raises:
        CircleError: there is no such order.
    """
    nodes, output = list(graph.nodes), graph.output_node()
    ordered = list(_ordered(nodes))
    for node in ordered:
        if node is not output:
            output.prepend(node)
    unneeded = set(nodes).difference(ordered)
    for node in unneeded:
        node.args, node.kwargs = (), {}
    for node in unneeded:
        graph.erase_node(node)


def _ordered(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    roots = [n for n in nodes if n.op in ("placeholder", "output") or n.is_impure()]
    needed, done = ancestors(roots), set[fx.Node]()
    for root in filter(needed.__contains__, nodes):
        for node in needed_first(root, lambda one: one.all_input_nodes[::-1], done):
            done.add(node)
            yield node


# ---- the order of nodes --------------------------------------------------------------------------
T = TypeVar("T")
Rewritten = tuple[JointGraph, frozenset[str]]  # and the names of the nodes that changed or are new


class Rewriting:
    """The copy, and what its nodes are replaced by.

    Attributes:
        joint: the copy as it was made: its nodes in their order, by name, their phases.
        builder: adds nodes to the copy.
        renewal: notes which nodes stand in the place of others.
    """

    def __init__(self, joint: JointGraph):
        self.joint = joint.copy()
        self.graph: fx.Graph = self.joint.module.graph
        self.builder = Builder(self.graph, fake_mode_of(self.joint.nodes))
        self.renewal = Renewal(self.graph)
        self._original = joint
        self._replaced, self._readers = dict(joint.replaced), set[str]()

    @cached_property
    def sizes(self) -> SizeNodes:
        """The sizes that the inputs of the step hold."""
        return SizeNodes.of_inputs(self.builder)

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """What is built in here stands before a node, and for it: it has the same policy."""
        outer, self.builder.meta = self.builder.meta, replacement_meta(node)
        try:
            with self.graph.inserting_before(node):
                yield
        finally:
            self.builder.meta = outer

    def replace(self, old: fx.Node, new: fx.Node, readers: list[fx.Node] | None = None) -> None:
        """Let all readers of a node, or the given ones, read another."""
        for reader in list(old.users) if readers is None else readers:
            reader.replace_input_with(old, new)
            self._readers.add(reader.name)
        self.renewal.replaced(old, new)
        self._replaced[old.name] = new.name

    def replace_items(self, node: fx.Node, results: Sequence[fx.Node]) -> None:
        """Replace each result of an op that has several."""
        for item in list(node.users):
            self.replace(item, results[item.args[1]])  # type: ignore[index]

    def finished(self, reorder: bool = False) -> JointGraph:
        """The new joint graph, without nodes that nobody reads.

        What the step returns has the strides that it had: the caller's results and gradients do.

        Args:
            reorder: nodes may stand before what they read.

        Raises:
            CannotRenew: an op cannot read the strides of what it reads now.
            CircleError: there is no order in which each node follows what it reads.
        """
        if reorder:
            put_in_order(self.graph)
        for node in self.graph.nodes:
            self.renewal.renew(node)
        self._keep_layouts(self.graph.output_node(), self._original.output)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.joint.module.recompile()
        return JointGraph(self.joint.module, self.joint.num_fwd_outputs, self._replaced)

    def result(self, reorder: bool = False) -> Rewritten:
        """The new joint graph, and the names of its nodes that are new, or read others than before,
        or new ones."""
        new = self.finished(reorder)
        made = {new.by_name[name] for name in new.new_names(self._original)}
        readers = {user for node in made for user in node.users}
        names = {node.name for node in made | readers}
        return new, frozenset(names | (self._readers & new.by_name.keys()))

    def _keep_layouts(self, output: fx.Node, recorded: fx.Node) -> None:
        results: Any = output.args[0]
        traced: Any = recorded.args[0]
        kept = []
        with self.graph.inserting_before(output):
            for new, old in zip(results, traced, strict=True):
                is_value = isinstance(new, fx.Node) and isinstance(old, fx.Node)
                kept.append(self.renewal.with_layout_of(new, old) if is_value else new)
        output.args = (tuple(kept),)


def rewritten(
    joint: JointGraph,
    nodes: Iterable[fx.Node],
    rewrite: Callable[[Rewriting, fx.Node], fx.Node | None],
) -> Rewritten:
    """A copy of a graph in which some of its nodes are rewritten; the graph itself for none.

    Args:
        rewrite: gets such a node of the copy, and builds before it what it returns: the value that
            takes its place, or None where it has replaced the node itself, or leaves it. So does
            what it refuses.
    """
    names = [node.name for node in nodes]
    if not names:
        return joint, frozenset()
    rewriting, done = Rewriting(joint), False
    for name in names:
        node = rewriting.joint.by_name[name]
        with contextlib.suppress(CannotTake, UnknownSize), rewriting.before(node):
            if (new := rewrite(rewriting, node)) is not None:
                rewriting.replace(node, new)
            done = True
    return rewriting.result() if done else (joint, frozenset())


def repeated(
    joint: JointGraph,
    next_match: Callable[[JointGraph, set[str]], tuple[Iterable[str], T] | None],
    rewrite: Callable[[JointGraph, T], tuple[JointGraph, Iterable[str]]],
) -> Rewritten:
    """A graph in which match after match is rewritten, each in a copy; the graph itself for none.

    Args:
        next_match: gets the graph and the names that were tried; returns the names of the next
            match and the match.
        rewrite: the new graph and the names that count as changed. What it refuses stays as it is.
    """
    changed, tried = set[str](), set[str]()
    while (found := next_match(joint, tried)) is not None:
        names, match = found
        tried.update(names)
        with contextlib.suppress(CannotTake, UnknownSize, CircleError):
            joint, new = rewrite(joint, match)
            changed.update(new)
    return joint, frozenset(changed)
