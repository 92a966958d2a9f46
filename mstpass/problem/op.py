"""``Op``: one node of a step as plain data, and the kinds of nodes there are.

memory/simulate_ops.py simulates the memory of a sequence of ops; memory/simulate_graph.py makes
ops from the nodes of a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

INPUT, VIEW, ITEM, CONSTANT = "input", "view", "item", "constant"
CALL, REDUCTION, SCATTER, POINTWISE = "call", "reduction", "scatter", "pointwise"
REALIZED = "realized"  # a pointwise value that is written to a buffer (graph/own_ops.py)
SIZE = "size"  # a symbolic size, which is no tensor

# What an op of a program does: it runs a node, copies the node's value to the host or back, or
# stands for the value on the host, of which loops copy rows.
RUN, OFFLOAD, AWAIT_OFFLOAD, RELOAD, AWAIT_RELOAD, ROWS_ON_HOST = (
    "run",
    "offload",
    "await offload",
    "reload",
    "await reload",
    "rows on host",
)


@dataclasses.dataclass(frozen=True)
class Op:
    """One node.

    Attributes:
        bytes: size of the storage that stays in memory as long as the result does.
        inputs: names of the nodes that it reads.
        kind: one of the constants above.
        inner_bytes: memory that it needs while it runs, besides operands and results.
        slow: a pointwise op too slow to be computed once more in each kernel that reads it, so
            that its result gets a buffer.
        own_loops: its kernel is not fused with those that write its operands: it reads a part of
            them, as slices do, at other places, as flips and gathers do, or reduces over outer
            dims.
        shift: of a slice, the dim, counted from the last, and where it starts there: what starts at
            the same place reads the same elements. A slice that is written shifts back.
        transposed: of a copy in another order of dims, their sizes as they lie in the operand, the
            outer first, and which of them is which in the copy. A copy back reads the same
            elements.
        loops_end: where another loop begins, as the number of elements that the loops outside run
            through: an operand of fewer elements is repeated along a dim and not along the next
            one, or it is a part of another value, so that its rows lie apart.
        outer_sizes: of each dim that it runs over but the first, how many elements the loops
            outside of it run through. Loops over its dims are one where ``loops_end`` has none.
            Both are asked for on the CPU alone.
        on_cpu: it runs on the CPU, where kernels without a call in between are one function.
        may_wait: it is a scatter into zeros that may wait for its rows, which are the last of its
            inputs; where that frees memory it does (memory/kernel_rules.py).
        concatenates: its result is its operands, one beside the other, each of which may be
            computed in its place there (memory/kernel_rules.py).
        writes_anywhere: it is a call that can write its result into a part of another buffer, as
            matrix products can.
        node: the name of the node that it stands for, if that is not its own: a node may run
            several times in a step, each time under another name.
        action: one of ``RUN``, ``OFFLOAD``, ``AWAIT_OFFLOAD``, ``RELOAD``, ``AWAIT_RELOAD``,
            ``ROWS_ON_HOST``.
        numel: the number of elements of its result. In a loop's body, only kernels of as many
            elements run as one (memory/kernel_rules.py).
        in_rows: of the operands of a loop that it can copy from the host row by row, the names and
            the bytes of a chunk's rows (memory/host_copies.py).
    """

    name: str
    bytes: int
    inputs: tuple[str, ...] = ()
    kind: str = POINTWISE
    inner_bytes: int = 0
    slow: bool = False
    own_loops: bool = False
    shift: tuple[int, int] | None = None
    transposed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    loops_end: tuple[int, ...] = ()
    outer_sizes: tuple[int, ...] = ()
    on_cpu: bool = False
    may_wait: bool = False
    concatenates: bool = False
    writes_anywhere: bool = False
    numel: int = 0
    node: str = ""
    action: str = RUN
    in_rows: tuple[tuple[str, int], ...] = ()

    @property
    def node_name(self) -> str:
        """The name of the node that it stands for."""
        return self.node or self.name

    def reading(self, by: Mapping[str, str], name: str) -> Self:
        """The op under a name, with operands replaced."""
        node = "" if name == self.node_name else self.node_name
        return self.renamed(lambda operand: by.get(operand, operand), name=name, node=node)

    def renamed(self, name_of: Callable[[str], str], **changed: str) -> Self:
        """The op with other names of its operands, and with what else is changed."""
        inputs = tuple([name_of(operand) for operand in self.inputs])
        in_rows = tuple([(name_of(operand), size) for operand, size in self.in_rows])
        return self.changed(inputs=inputs, in_rows=in_rows, **changed)

    def changed(self, **fields: Any) -> Self:
        """``dataclasses.replace``, but for the checks of the values: for walks over whole steps."""
        if all(getattr(self, name) == value for name, value in fields.items()):
            return self
        new = object.__new__(type(self))
        vars(new).update(vars(self), **fields)
        return new
