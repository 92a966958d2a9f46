"""What the passes know of an op: one ``Row`` for each, the rows of the op table.

A row says where tokens go, in which operands the op is linear, what it costs, whether backward may
run it again, how its operands follow from its result, and what Inductor makes of it. Whatever a row
leaves out has a default, which is that of most ops.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from mstpass.graph import linearity
from mstpass.graph.linearity import LinearRule, never
from mstpass.graph.token_rules import Rule
from mstpass.graph.token_rules.views import ThroughView
from mstpass.graph.tokens import SUM
from mstpass.problem.op import CALL, POINTWISE, REDUCTION, VIEW

# Whether backward may run an op once more.
CHEAP = "cheap"
HEAVY = "heavy"  # it may, but that is slow
PINNED = "pinned"  # it must not: a second run may give other results, or have effects

# Names of workspaces; their formulas are in memory/workspaces.py.
PRODUCT = "product"
CPU_FLASH = "flash on a CPU"
FLASH, FLASH_BACKWARD = "flash", "flash backward"
EFFICIENT, EFFICIENT_BACKWARD = "efficient", "efficient backward"
CUDNN_BACKWARD, FLEX_BACKWARD = "cuDNN backward", "flex backward"
ROWS, ROWS_BACKWARD = "rows", "rows backward"  # graph/attention_rows.py

# By the kind of an op: how Inductor runs it (calls are left out), and whether it may run again
# (pinned kinds are left out: among equal elements, a second sort or write may choose another one).
_RUNS = {"view": VIEW, "reduce": REDUCTION, "pointwise": POINTWISE, "index": POINTWISE}
_RUNS |= {"create": POINTWISE}
_REPEATS = {**dict.fromkeys(_RUNS, CHEAP), "matmul": HEAVY, "other": HEAVY}


@dataclasses.dataclass(frozen=True)
class Factors:
    """Where a matrix product has its operands, and of which kind it is.

    Attributes:
        left: the position of the left matrix, 1 behind a bias; the right one follows.
        batched: it multiplies batches of matrices.
        grouped: rows are grouped by expert, and each group has its own weights.
        adds: a loop can add the result to a buffer in one op (graph/buffer_ops.py).
    """

    left: int = 0
    batched: bool = False
    grouped: bool = False
    adds: bool = False


@dataclasses.dataclass(frozen=True)
class FlexArguments:
    """Positions of FlexAttention's arguments.

    Attributes:
        operands: how many of the first are ``[B, heads, ...]``; one of them may be None.
        mask: the block mask.
        scores: the subgraphs that change scores.
    """

    operands: int
    mask: int
    scores: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Attention:
    """What is known of a fused attention op.

    Attributes:
        backward: it computes gradients.
        results: how many of its first results hold heads; 0: no loop over heads can run it.
        heads_dim: the dim of heads of queries, keys, values and results.
        by_row: it can run on some rows of queries and of the mask (attention.py).
        mask_to_write: the position of the mask that Inductor would write once for each head
            (schedule/finished_graphs.py).
        flex: the arguments of FlexAttention; None for all other ops.
        efficient: it is torch's memory-efficient kernel.
    """

    backward: bool
    results: int = 0
    heads_dim: int = 1
    by_row: bool = False
    mask_to_write: int | None = None
    flex: FlexArguments | None = None
    efficient: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        kind: the group that it belongs to: "pointwise", "view", "reduce", "matmul", "index",
            "sort", "write", "create", "collective"; "other" for ops without token rules.
        rule: where the dims of its operands are in its result (token_rules/); None: it has no token
            rules.
        mixes: why the op has no token rules, if that is a property of the op and no gap.
        shape_arg: the position of the argument with sizes, which a chunk replaces by its own.
        linear: whether the result is linear in given operands (linearity.py); ask ``is_linear``.
        copies: the result has the operand's elements, perhaps in another dtype.
        pads: the result is the operand among zeros, as a slice's gradient is.
        added_rows: the position of the rows that the op adds to its first operand.
        factors: of a matrix product, its operands: they decide its cost (products.py).
        attention: of fused attention, its operands, which decide its cost (attention_work.py).
        workspace: the name of what it allocates while it runs; empty: nothing, as far as is known.
        repeat: as ``repeats``; empty: as most ops of its kind.
        jumps: its result is a float that jumps as an operand changes a little.
        runs: as ``memory_kind``; empty: as most ops of its kind. Scatters are kernels that compute
            the values they write, as reductions do (Scatter in torch/_inductor/ir.py).
        reads_elsewhere: it reads its operand at other places than it writes.
        slow_on_cpu: a pointwise op that Inductor does not compute again for every reader there
            (StorageBox.should_realize_on_reuse there; in older versions only exp and sigmoid).
        work: how long a CPU computes an element of the result in a fused kernel, as the bytes that
            memory moves meanwhile.
        writes_anywhere: a call for which Inductor allocates the result (ExternKernelOut, there), so
            that it can be a part of a buffer.
    """

    kind: str
    rule: Rule | ThroughView | None = None
    linear: LinearRule = never
    shape_arg: int | None = None
    _: dataclasses.KW_ONLY
    mixes: str = ""
    copies: bool = False
    pads: bool = False
    added_rows: int | None = None
    factors: Factors | None = None
    attention: Attention | None = None
    workspace: str = ""
    repeat: str = ""
    jumps: bool = False
    runs: str = ""
    reads_elsewhere: bool = False
    slow_on_cpu: bool = False
    work: float = 0.3
    writes_anywhere: bool = False

    @property
    def repeats(self) -> str:
        """Whether backward may run the op once more: ``CHEAP``, ``HEAVY`` or ``PINNED``."""
        return self.repeat or _REPEATS.get(self.kind, PINNED)

    @property
    def memory_kind(self) -> str:
        """The kind of its nodes in a simulation (problem/op.py)."""
        return self.runs or _RUNS.get(self.kind, CALL)

    @property
    def combine(self) -> str:
        """Where it reduces over tokens, how parts are combined (tokens.Reduced)."""
        combined = self.rule.combined if isinstance(self.rule, Rule) else None
        return (combined or SUM).combine

    def is_linear(self, node: fx.Node, operands: set[fx.Node]) -> bool:
        """Whether the node's result is linear in the operands, up to rounding."""
        return linearity.has_linear_dtype(node) and self.linear(node, operands)
