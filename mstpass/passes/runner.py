"""Run passes: each is named and timed, verified if that is asked for, and printed.

``TORCH_LOGS="+mstpass"`` prints what each pass has changed, as the difference of two graphs' texts;
``TORCH_TRACE`` gets it as the artifact ``mstpass_pass_NAME``, which tlparse shows.

A pass whose result does not hold what the pass promises, or that fails, is *refused*: its result is
dropped, the graph before it is used, and the report says why. So is another part of a stage that
fails (``left_out``). In tests that is an error; under ``strict`` a failure is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from mstpass.errors import please_report, told
from mstpass.graph.advice import REPORT
from mstpass.graph.graph_text import graph_text
from mstpass.graph.joint import JointGraph
from mstpass.graph.renew_values import CannotRenew
from mstpass.options import OptionError, Options
from mstpass.passes.facts import ALWAYS, FINISHED, Fact, Fault
from mstpass.plans import Rejection
from mstpass.torch_internals.caches import is_tracing, trace_structured_artifact
from mstpass.torch_internals.versions import TorchChangedError

log = logging.getLogger(__name__)
OFF, REFUSE, RAISE = "off", "refuse", "raise"
LEAST = OFF  # tests set it to RAISE: they verify every pass
_LEVELS = (OFF, REFUSE, RAISE)


class PassError(Exception):
    """A pass has not kept what it promises; the message names pass, node and difference."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass over a joint graph.

    Attributes:
        run: gets the graph and further arguments. Returns the new graph, or the given one if there
            is nothing to do, and what else is known of it.
        after: what holds of the new graph.
        answers: errors that are no failures, and that the caller waits for.
        required: whether a graph is wrong without the pass, so that it cannot be refused.
    """

    name: str
    run: Callable[..., tuple[JointGraph, Any]]
    after: tuple[Fact, ...] = ALWAYS
    answers: tuple[type[Exception], ...] = ()
    required: Callable[[JointGraph], object] = lambda joint: False


@dataclasses.dataclass(frozen=True)
class InPlacePass:
    """A pass that changes a finished graph itself.

    Attributes:
        required: no compiler can take the graph without it, so that it cannot be refused.
    """

    name: str
    run: Callable[..., Any]
    after: tuple[Fact, ...] = FINISHED
    required: bool = False


class PassRunner:
    """Runs the passes of one compilation.

    Attributes:
        strict: a pass that fails is an error.
        seconds: the time of each pass, by name; all its runs count.
        refused: the passes whose results were dropped, and what else failed, for the report.
    """

    def __init__(self, verify: bool = False, strict: bool = False):
        self.strict = strict
        self.verify = max(LEAST, REFUSE if verify else OFF, key=_LEVELS.index)
        self.seconds: dict[str, float] = {}
        self.refused: list[Rejection] = []

    @staticmethod
    def of(options: Options) -> PassRunner:
        return PassRunner(options.verify, options.strict)

    def run(
        self, step: Pass, joint: JointGraph, *args: Any, **kwargs: Any
    ) -> tuple[JointGraph, Any]:
        """The graph after the pass, and what else the pass returned: None if it was refused.

        Raises:
            PassError: a required pass was refused.
        """
        new, more = self.run_alone(step, joint, *args, **kwargs)
        if more is None and step.required(joint):
            raise PassError(f"{self.refused[-1].reason}, and cannot be left out")
        return new, more

    def run_alone(
        self, step: Pass, joint: JointGraph, *args: Any, **kwargs: Any
    ) -> tuple[JointGraph, Any]:
        start = time.perf_counter()
        new, more = joint, None
        try:
            with self.left_out(f"the pass {step.name}", answers=(*step.answers, CannotRenew)):
                new, more = step.run(joint, *args, **kwargs)
        except CannotRenew as error:
            self._refuse(step.name, str(error))
        finally:
            self._count(step.name, start)
        if new is joint:
            return joint, more
        fault = self._first(step.after, joint, new)
        if fault is not None:
            self._refuse(step.name, str(fault), fault.node)
            return joint, None
        if is_listening():
            _publish(step.name, graph_text(joint.module), graph_text(new.module))
        return new, more

    def run_all(
        self, steps: Iterable[Pass], joint: JointGraph
    ) -> tuple[JointGraph, frozenset[str]]:
        """The graph after passes that each return the names of what they changed, and all these."""
        changed: frozenset[str] = frozenset()
        for step in steps:
            joint, names = self.run(step, joint)
            changed |= names or frozenset()
        return joint, changed

    def run_in_place(self, step: InPlacePass, graph: fx.Graph) -> Any:
        """What the pass returns; None if it was refused, and the graph is as it was.

        Raises:
            PassError: a required pass does not keep what it promises.
        """
        module = graph.owning_module
        looked_at = module is not None and (self.verify != OFF or is_listening())
        before = JointGraph(module, 0).copy() if looked_at else None  # type: ignore[arg-type]
        nodes = before.nodes if before else [] if step.required else _copy(graph.nodes, fx.Graph())
        start = time.perf_counter()
        found, done = None, False
        answers = (Exception,) if step.required else ()
        with self.left_out(f"the pass {step.name}", answers=answers):
            found, done = step.run(graph), True
        self._count(step.name, start)
        if not done:
            _restore(graph, nodes)
        if before is None or not done:
            return found
        after = JointGraph(module, 0)  # type: ignore[arg-type]
        fault = self._first(step.after, before, after)
        if fault is not None:
            if step.required:
                raise PassError(f"{step.name}: {fault}")
            self._refuse(step.name, str(fault), fault.node)
            _restore(graph, nodes)
            return None
        if is_listening():
            _publish(step.name, graph_text(before.module), graph_text(after.module))
        return found

    @contextlib.contextmanager
    def left_out(
        self, what: str, node: str = "graph", answers: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Do something that the plan can do without: where it fails, the report says so.

        Args:
            node: where in the graph.
            answers: errors that are no failures, and that the caller waits for.

        Raises:
            PassError: it failed, under ``strict`` or in tests.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, (*answers, OptionError, TorchChangedError)):
                raise
            reason = REPORT(f"{what} is refused: {told(error)}")
            if self.strict or self.verify == RAISE:
                raise PassError(reason) from error
            log.info("%s", reason, exc_info=True)
            self._note(Rejection("error", node, reason))

    def check(self, name: str, before: JointGraph, new: JointGraph) -> None:
        """Verify what a stage that cannot be left out has made.

        Raises:
            PassError: a fact does not hold.
        """
        fault = self._first(FINISHED, before, new)
        if fault is not None:
            raise PassError(f"{name}: {fault}")

    def _first(self, facts: tuple[Fact, ...], before: JointGraph, new: JointGraph) -> Fault | None:
        if self.verify == OFF:
            return None
        return next((fault for fact in facts for fault in fact(before, new)), None)

    def _count(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _refuse(self, name: str, reason: str, node: str = "graph") -> None:
        if self.verify == RAISE:
            raise PassError(f"{name}: {reason}")
        log.info("the pass %s is refused: %s", name, reason)
        self._note(Rejection("verify", node, REPORT(f"the pass {name} is refused: {reason}")))

    def _note(self, refusal: Rejection) -> None:
        if refusal not in self.refused:
            self.refused.append(refusal)


def failures(rejections: Iterable[Rejection]) -> str:
    """The text of a warning about what failed and was left out; "" if nothing did."""
    found = dict.fromkeys(r.reason for r in rejections if r.stage == "error")
    done = "planned the rest of it without what failed"
    return please_report("; ".join(found), done) if found else ""


def _copy(nodes: Iterable[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """Copies of nodes in a graph, with their names."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
    return [*copies.values()]


def _restore(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Give a graph the nodes that it had."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    _copy(nodes, graph)
    graph.lint()


def is_listening() -> bool:
    """Whether anybody reads what passes change."""
    return log.isEnabledFor(logging.DEBUG) or is_tracing()


def _publish(name: str, before: str, after: str) -> None:
    if before == after:
        return
    text = functools.cache(lambda: "".join(_diff(name, before, after)))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("the pass %s:\n%s", name, text())
    trace_structured_artifact(f"mstpass_pass_{name}", "string", text)


def _diff(name: str, before: str, after: str) -> list[str]:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return list(difflib.unified_diff(old, new, f"before {name}", f"after {name}", n=2))
