from __future__ import annotations

import pytest
import torch

from mstpass.byte_sizes import parse_bytes
from mstpass.options import OptionError, Options


def test_defaults() -> None:
    options = Options.parse(None, environ={})
    assert options == Options()
    assert options.memory_budget == options.accumulate == "auto"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"memory_buget": 0.0}, ["memory_buget", "memory_budget"]),
        ({"chunk": "of"}, ["chunk", "off"]),
        ({"chunk_tokens": 0}, ["chunk_tokens", "at least 1"]),
        ({"chunk_tokens": True}, ["chunk_tokens"]),
        ({"chunk_tokens": 2.5}, ["chunk_tokens"]),
        ({"memory_budget": 1.5}, ["memory_budget", "0.0 to 1.0"]),
        ({"memory_budget": "24 GB"}, ["memory_budget", "24GiB"]),
        ({"memory_budget": None}, ["memory_budget"]),
        ({"solver": "mincut"}, ["solver", "min_cut"]),
        ({"strict": "yes"}, ["strict"]),
        ({"accumulate": "fp32"}, ["accumulate", "float32"]),
        ({"inductor": {"max_autotun": True}}, ["max_autotun", "max_autotune"]),
        ({"inductor": 3}, ["inductor"]),
        ({"report": 3}, ["report"]),
        ({"free_overhead": -1}, ["free_overhead"]),
        ({"reserve": "many"}, ["reserve", "4GiB"]),
        ({"logits": "drp"}, ["logits", "drop", "keep"]),
    ],
)
def test_bad_options_name_what_is_wrong(given: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"option|must") as error:
        Options.parse(given, environ={})
    for name in names:
        assert name in str(error.value)


def test_precedence() -> None:
    environ = {"MSTPASS_CHUNK": "off", "MSTPASS_CHUNK_TOKENS": "128", "MSTPASS_STRICT": "true"}
    assert Options.parse({}, environ) == Options(chunk="off", chunk_tokens=128, strict=True)
    assert Options.parse({"chunk": "auto"}, environ).chunk == "auto"
    with pytest.raises(OptionError, match="MSTPASS_CHUNK_TOKENS"):
        Options.parse({}, {"MSTPASS_CHUNK_TOKENS": "many"})


def test_fingerprint_tells_options_apart() -> None:
    prints = {
        Options.parse(given, environ={}).fingerprint()
        for given in ({}, {"chunk": "off"}, {"memory_budget": 0.0}, {"memory_budget": 1.0})
    }
    assert len(prints) == 4


def test_sizes() -> None:
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("1.5 MiB") == 3 * 2**19
    assert parse_bytes("24") is None


def test_torch_compile_passes_the_error_on() -> None:
    with pytest.raises(Exception, match="memory_budget"):
        torch.compile(lambda x: x + 1, backend="mst", options={"memory_budge": 0.0})(torch.ones(2))
