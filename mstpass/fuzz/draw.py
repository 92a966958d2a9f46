"""Draw the case of a seed and a number: the same one on every machine, in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.layers import GROUPED, KINDS
from mstpass.fuzz.templates import TOKENWISE

_PLAIN = {  # the share of cases in which a field has its plainest value; else all values alike
    "dropout": 0.75,
    "frozen": 0.75,
    "same": 0.8,
    "checkpoint": 0.7,
    "dtype": 0.7,
    "autocast": 0.85,
    "dynamic": 0.75,
    "solver": 0.7,
    "reconstruct": 0.6,
    "accumulate": 0.75,
    "logits": 0.85,
    "chunk": 0.97,
    "memory_budget": 0.3,
    "budgets": 0.7,
    "lowered": 0.6,
    "variants": 0.1,
    "chunk_tokens": 0.1,
    "forced": 0.8,
    "loss": 0.15,
    "shift": 0.3,
    "kind": 0.45,
    "head": 0.3,
    "ops": 0.6,
    "logit_ops": 0.5,
    "extras": 0.5,
    "mutations": 0.9,
}
_RARE = {  # values that end most of a case's interest: four of five are drawn again
    "batch": (0,),
    "length": (0, 1, 2, 300),
    "vocabulary": (2, 600, 601),
    "loss": ("none", "ignore_all"),
    "norm": ("batch", "group"),
    "final_norm": ("batch", "group"),
    "frozen": ("head", "all_but_head"),
    "source": ("plain_hidden",),
    "chunk_tokens": (None, 64, 1000),
    "width": (24, 601),
}
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
    if random.random() < _PLAIN.get(field.name, 0.0):
        return field.default
    if "items" in given:
        return tuple(random.sample(given["items"], random.randint(1, given["most"])))
    value = random.choice(given["values"])
    if value in _RARE.get(field.name, ()) and random.random() < _AGAIN:
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
