"""A case of the fuzzer as plain data: a program, its precision and sizes, and mstpass's options.

Every field lists the values that it may have, the plainest first. From these lists cases are drawn
(draw.py) and shrunk (reduce.py), and no combination of them is invalid: what has no meaning
together, such as a mask without attention, is left out of the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mstpass.fuzz.layers import KINDS, RESIDUALS
from mstpass.fuzz.templates import (
    ACTS,
    EXTRAS,
    LOGIT_OPS,
    LOSSES,
    MUTATIONS,
    NORMS,
    OPS,
    POLICIES,
    SOURCES,
)

CHECKPOINTS = ("none", "plain", *POLICIES)
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


def choice(*values: Any) -> Any:
    """A field that has one of some values, the plainest first."""
    return dataclasses.field(default=values[0], metadata={"values": values})


def several(*values: str, most: int = 2) -> Any:
    """A field that has a few of some values, in any order."""
    return dataclasses.field(default=(), metadata={"items": values, "most": most})


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: ``x`` and a function of ``x``, such as an MLP, joined by a residual layout.

    Attributes:
        variant: which MLP, attention, ... it is: the position in ``KINDS[kind]``, around its end.
        ops: what is done to the widest value of the layer.
        same: the layer has the parameters of the nearest layer before it that could be its equal.
    """

    kind: str = choice(*KINDS)
    variant: int = choice(*range(max(map(len, KINDS.values()))))
    norm: str = choice(*NORMS)
    residual: str = choice(*RESIDUALS)
    act: str = choice(*ACTS)
    width: int = choice(64, 24, 48, 96, 37, 97, 601)
    bias: bool = choice(False, True)
    ops: tuple[str, ...] = several(*OPS)
    dropout: float = choice(0.0, 0.1, 0.5)
    frozen: bool = choice(False, True)
    same: bool = choice(False, True)
    checkpoint: str = choice(*CHECKPOINTS)

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
    source: str = choice(*SOURCES)
    final_norm: str = choice(*NORMS)
    head: str = choice(*HEADS)
    logit_ops: tuple[str, ...] = several(*LOGIT_OPS)
    shift: str = choice(*SHIFTS)
    loss: str = choice(*LOSSES)
    extras: tuple[str, ...] = several(*EXTRAS, most=3)
    mutations: tuple[str, ...] = several(*MUTATIONS)
    frozen: str = choice("none", "head", "all_but_head", "norms", "biases")
    checkpoint: str = choice("none", "body", "head", "all", "nested")
    batch: int = choice(2, 1, 3, 4, 7, 0)
    length: int = choice(8, 1, 2, 5, 13, 16, 17, 31, 64, 300, 0)
    features: int = choice(16, 8, 12, 24)
    vocabulary: int = choice(64, 50, 97, 128, 600, 2, 601)
    dtype: str = choice("float32", "bfloat16", "float64")
    autocast: bool = choice(False, True)
    dynamic: str = choice("no", "length", "batch", "both", "all")
    again: tuple[tuple[int, int], ...] = choice(
        ((3, 11),),
        ((1, 7),),
        ((5, 64),),
        ((2, 2),),
        ((2, 300),),
        ((3, 11), (4, 70), (2, 5)),
        ((2, 300), (6, 20), (7, 9)),
    )
    memory_budget: str | float = choice("auto", 0.0, 0.5, 0.2, 0.8, 1.0, "free")
    chunk_tokens: int | None = choice(None, 4, 1, 3, 7, 16, 64, 1000)
    forced: bool = choice(True, False)
    solver: str = choice(
        "auto",
        "peak_search",
        "min_cut",
        "checkpoints",
        "knapsack",
        "greedy",
        "save_all",
        "recompute_all",
    )
    reconstruct: str = choice("exact", "tolerant", "off")
    accumulate: str = choice("auto", "float32", "input")
    logits: str = choice("keep", "drop")
    chunk: str = choice("auto", "off", "tokens", "heads", "blocks")
    budgets: bool = choice(False, True)
    lowered: bool = choice(False, True)
    variants: tuple[str, ...] = several(*VARIANTS, most=5)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``torch.compile`` that differ from the defaults."""
        names = ("memory_budget", "chunk_tokens", "solver", "reconstruct", "accumulate")
        given = {name: getattr(self, name) for name in (*names, "logits", "chunk")}
        plain = Case()
        return {name: value for name, value in given.items() if value != getattr(plain, name)}


def to_json(record: Case | Layer) -> dict[str, Any]:
    """The fields that are not at their plainest; `from_json` reads them."""
    plain = type(record)()
    result = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != getattr(plain, field.name):
            is_records = "records" in field.metadata
            result[field.name] = [to_json(item) for item in value] if is_records else value
    return result


def from_json(data: Mapping[str, Any], kind: type[Any] = Case) -> Any:
    """The case, or the layer, that `to_json` wrote."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            value = data[field.name]
            if "records" in field.metadata:
                value = [from_json(item, field.metadata["records"]) for item in value]
            values[field.name] = _with_tuples(value)
    return kind(**values)


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
