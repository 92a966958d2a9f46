"""A case of the fuzzer as plain data: a program, its precision and sizes, and mstpass's options.

Every field lists the values that it may have, the plainest first. From these lists cases are drawn
and shrunk (reduce.py), and no combination of them is invalid: what has no meaning
together, such as a mask without attention, is left out of the source.

Draw the case of a seed and a number: the same one on every machine, in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from mstpass.fuzz import templates
from mstpass.fuzz.layers import GROUPED, KINDS, RESIDUALS
from mstpass.fuzz.templates import TOKENWISE

CHECKPOINTS = ("none", "plain", *templates.POLICIES)
HEADS = ("plain", "bias", "tied", "frozen", "low_rank", "two", "by_hand", "norm_after", "transform")
SHIFTS = ("none", "labels", "logits", "hidden", "first", "every_other", "last", "flat", "views")

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "least memory": {"memory_budget": 0.0},
    "half": {"memory_budget": 0.5},
    "a fifth, tolerant": {"memory_budget": 0.2, "reconstruct": "tolerant"},
    "chunks of 3": {"chunk_tokens": 3},
    "chunks of 5, least memory": {"chunk_tokens": 5, "memory_budget": 0.0},
    "chunks of 16, a fifth": {"chunk_tokens": 16, "memory_budget": 0.2},
    "checkpoints": {"solver": "checkpoints", "memory_budget": 0.3, "chunk_tokens": 7},
    "greedy": {"solver": "greedy", "memory_budget": 0.3},
    "recompute all": {"solver": "recompute_all", "chunk_tokens": 4},
    "save all": {"solver": "save_all", "chunk_tokens": 4},
    "over heads": {
        "solver": "recompute_all",
        "chunk": "heads",
        "chunk_tokens": 4,
        "memory_budget": 0.0,
    },
    "blocks": {"chunk": "blocks", "chunk_tokens": 4, "memory_budget": 0.0},
}


def choice(*values: Any, plain: float = 0.0, rare: Sequence[Any] = ()) -> Any:
    """A field that has one of some values, the plainest first.

    Args:
        plain: the share of cases in which it has the plainest; else all values alike.
        rare: values that end most of a case's interest: four of five are drawn again.
    """
    given = {"values": values, "plain": plain, "rare": rare}
    return dataclasses.field(default=values[0], metadata=given)


def several(*values: str, most: int = 2, plain: float = 0.0) -> Any:
    """A field that has a few of some values, in any order; ``plain`` as for `choice`."""
    return dataclasses.field(default=(), metadata={"items": values, "most": most, "plain": plain})


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: ``x`` and a function of ``x``, such as an MLP, joined by a residual layout.

    Attributes:
        variant: which MLP, attention, ... it is: the position in ``KINDS[kind]``, around its end.
        ops: what is done to the widest value of the layer.
        same: the layer has the parameters of the nearest layer before it that could be its equal.
    """

    kind: str = choice(*KINDS, plain=0.45)
    variant: int = choice(*range(max(map(len, KINDS.values()))))
    norm: str = choice(*templates.NORMS, rare=("batch", "group"))
    residual: str = choice(*RESIDUALS)
    act: str = choice(*templates.ACTS)
    width: int = choice(64, 24, 48, 96, 37, 97, 601, rare=(24, 601))
    bias: bool = choice(False, True)
    ops: tuple[str, ...] = several(*templates.OPS, plain=0.6)
    dropout: float = choice(0.0, 0.1, 0.5, plain=0.75)
    frozen: bool = choice(False, True, plain=0.75)
    same: bool = choice(False, True, plain=0.8)
    checkpoint: str = choice(*CHECKPOINTS, plain=0.7)

    @property
    def form(self) -> str:
        forms = tuple(KINDS[self.kind])
        return forms[self.variant % len(forms)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, how it is called, and the options that it is compiled with.

    Attributes:
        shift: where labels come from; ``"views"``: from an input that is a view of the same memory
            as the ids.
        again: the batch and the length of later calls with other sizes, in several ranges of
            lengths (``mstpass/length_ranges.py``); used if symbolic.
        forced: loops that ``chunk_tokens`` asks for stay, even where they raise the peak.
        budgets: plan at other budgets too, and compare the plans.
        lowered: (fast kind) run the loops as Inductor's ``while_loop``.
        variants: (fast kind) other options, under which the graphs run in float64.
    """

    layers: tuple[Layer, ...] = dataclasses.field(
        default=(), metadata={"records": Layer, "most": 3}
    )
    source: str = choice(*templates.SOURCES, rare=("plain_hidden",))
    final_norm: str = choice(*templates.NORMS, rare=("batch", "group"))
    head: str = choice(*HEADS, plain=0.3)
    logit_ops: tuple[str, ...] = several(*templates.LOGIT_OPS, plain=0.5)
    shift: str = choice(*SHIFTS, plain=0.3)
    loss: str = choice(*templates.LOSSES, plain=0.15, rare=("none", "ignore_all"))
    extras: tuple[str, ...] = several(*templates.EXTRAS, most=3, plain=0.5)
    mutations: tuple[str, ...] = several(*templates.MUTATIONS, plain=0.9)
    frozen: str = choice(
        "none", "head", "all_but_head", "norms", "biases", plain=0.75, rare=("head", "all_but_head")
    )
    checkpoint: str = choice("none", "body", "head", "all", "nested", plain=0.7)
    batch: int = choice(2, 1, 3, 4, 7, 0, rare=(0,))
    length: int = choice(8, 1, 2, 5, 13, 16, 17, 31, 64, 300, 0, rare=(0, 1, 2, 300))
    features: int = choice(16, 8, 12, 24)
    vocabulary: int = choice(64, 50, 97, 128, 600, 2, 601, rare=(2, 600, 601))
    dtype: str = choice("float32", "bfloat16", "float64", plain=0.7)
    autocast: bool = choice(False, True, plain=0.85)
    dynamic: str = choice("no", "length", "batch", "both", "all", plain=0.75)
    again: tuple[tuple[int, int], ...] = choice(
        ((3, 11),),
        ((1, 7),),
        ((5, 64),),
        ((2, 2),),
        ((2, 300),),
        ((3, 11), (4, 70), (2, 5)),
        ((2, 300), (6, 20), (7, 9)),
    )
    memory_budget: str | float = choice("auto", 0.0, 0.5, 0.2, 0.8, 1.0, "free", plain=0.3)
    chunk_tokens: int | None = choice(
        None, 4, 1, 3, 7, 16, 64, 1000, plain=0.1, rare=(None, 64, 1000)
    )
    forced: bool = choice(True, False, plain=0.8)
    solver: str = choice(
        "auto",
        "peak_search",
        "min_cut",
        "checkpoints",
        "knapsack",
        "greedy",
        "save_all",
        "recompute_all",
        plain=0.7,
    )
    reconstruct: str = choice("exact", "tolerant", "off", plain=0.6)
    accumulate: str = choice("auto", "float32", "input", plain=0.75)
    logits: str = choice("keep", "drop", plain=0.85)
    chunk: str = choice("auto", "off", "tokens", "heads", "blocks", plain=0.97)
    budgets: bool = choice(False, True, plain=0.7)
    lowered: bool = choice(False, True, plain=0.6)
    variants: tuple[str, ...] = several(*VARIANTS, most=5, plain=0.1)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``torch.compile`` that differ from the defaults."""
        return self.other_than_plain(_OPTIONS)

    def other_than_plain(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of these fields that are not at their plainest."""
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value != getattr(_PLAINEST, name)}

    @property
    def is_symbolic(self) -> bool:
        first = (self.batch, self.length)
        return any(self._varies) and all(
            size > 1 for size, varies in zip(first, self._varies, strict=True) if varies
        )

    @property
    def _varies(self) -> tuple[bool, bool]:
        """Whether the batch and the length are to be symbolic."""
        both = self.dynamic in ("both", "all")
        return both or self.dynamic == "batch", both or self.dynamic == "length"

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Batch and length of each call. Sizes of 0 and 1 are never symbolic."""
        first = (self.batch, self.length)
        if not self.is_symbolic:
            return (first, first)

        def with_varying(again: tuple[int, int]) -> tuple[int, int]:
            batch, length = (
                max(2, later) if varies else size
                for later, size, varies in zip(again, first, self._varies, strict=True)
            )
            return batch, length

        return (first, *map(with_varying, self.again))


_PLAINEST = Case()
_OPTIONS = (
    *("memory_budget", "chunk_tokens", "solver", "reconstruct", "accumulate"),
    *("logits", "chunk"),
)
CALL = (  # fields that say how a program is called and compiled
    *("batch", "length", "dtype", "autocast", "dynamic", "again", "forced", "budgets", "lowered"),
    *("variants", *_OPTIONS),
)


# ---- draw ----------------------------------------------------------------------------------------
_AGAIN = 0.8
_LARGE = 0.3  # the share of cases that are so large that loops lower the peak without being forced
_COUNTS = (1, 1, 1, 2, 2, 3, 0)  # layers
_BLOCKS = 0.1  # the share of cases whose layers are blocks of grouped queries and an MLP


def draw(seed: int, number: int) -> Case:
    """The case of this number."""
    random = Random(f"mstpass {seed} {number}")
    case: Case = _record(random, Case)
    case = _large(random, case) if random.random() < _LARGE else _smaller(case)
    return _of_blocks(random, case) if random.random() < _BLOCKS else case


def _record(random: Random, kind: type[Any]) -> Any:
    return kind(**{f.name: _value(random, f) for f in dataclasses.fields(kind)})


def _value(random: Random, field: dataclasses.Field[Any]) -> Any:
    given = field.metadata
    if "records" in given:
        return tuple(_record(random, given["records"]) for _ in range(random.choice(_COUNTS)))
    if random.random() < given.get("plain", 0.0):
        return field.default
    if "items" in given:
        return tuple(random.sample(given["items"], random.randint(1, given["most"])))
    value = random.choice(given["values"])
    if value in given["rare"] and random.random() < _AGAIN:
        return random.choice(given["values"])
    return value


def _large(random: Random, case: Case) -> Case:
    """The case with more tokens and words, and the loops that the plan chooses."""
    return dataclasses.replace(
        case,
        batch=random.choice((1, 2, 3)),
        length=random.choice((96, 131, 200, 256)),
        vocabulary=random.choice((499, 600, 601)),
        chunk_tokens=random.choice((None, None, 32, 64, 100)),
        forced=False,
    )


def _of_blocks(random: Random, case: Case) -> Case:
    """The case with attention and MLPs in turn that loops through attention can run."""

    def layer(kind: str, variants: Sequence[int]) -> Layer:
        drawn: Layer = _record(random, Layer)
        ops = random.choice(((), (), (), (random.choice(tuple(TOKENWISE)),)))
        return dataclasses.replace(
            drawn,
            kind=kind,
            variant=random.choice(variants),
            norm=random.choice(("rms", "layer", "rms_by_hand", "layer_plain", "none")),
            residual="add",
            width=random.choice((64, 48, 96, 97)),
            ops=ops,
        )

    blocks = range(random.choice((1, 1, 2, 3)))
    kinds = {"attention": GROUPED, "mlp": range(len(KINDS["mlp"]))}
    return dataclasses.replace(
        case,
        layers=tuple(layer(*kind) for _ in blocks for kind in kinds.items()),
        batch=random.choice((1, 2, case.batch)),
        length=random.choice((17, 31, 64, 96)),
        chunk=random.choice(("blocks", "blocks", "auto")),
        chunk_tokens=random.choice((3, 4, 7, 16, case.chunk_tokens)),
        memory_budget=random.choice((0.0, 0.0, 0.2, "auto")),
        solver=random.choice(("auto", "auto", "recompute_all")),
    )


def _smaller(case: Case) -> Case:
    """The case with fewer tokens where it would be slow, for it is run op by op in float64 too."""
    if case.batch * case.length * case.vocabulary > 400_000:
        case = dataclasses.replace(case, vocabulary=128)
    if case.chunk_tokens is not None and case.batch * case.length > 150 * case.chunk_tokens:
        case = dataclasses.replace(case, chunk_tokens=16 * case.chunk_tokens)
    return case
