"""Files and names of unknown origin are data: nothing of them is run, and none can use up memory.

The HTML page in a real browser is ``test_html.py``'s.
"""

from __future__ import annotations

import ast
import gzip
import json
import pickle
import time
import tracemalloc
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

import mstpass
from mstpass.cli.load_function import UserFileError, load_function
from mstpass.errors import UserError
from mstpass.graph import device_costs
from mstpass.plain_data import MOST_BYTES, printable
from mstpass.planner.models import config_of
from mstpass.problem.problem import CutProblem
from mstpass.report.report import Report
from tests.source_files import FILES, name_of, parsed
from tests.synthetic_reports import llama_report

HOSTILE = "<script>hacked=1</script>\"'\\<b>&#x1b[2J\x1b[2J\u202e\ud800"


# ---- nothing is run ------------------------------------------------------------------------------
# The only places that run what a file holds, or write a format that others run.
_ALLOWED = {
    ("bench/training.py", "load"),  # its own checkpoint, with weights_only=True
    ("cli/load_function.py", "exec_module"),  # the file that the user names to run
    ("integrations/after_import.py", "exec_module"),  # an import that somebody else has begun
    ("fuzz/program.py", "exec"),  # the source of a case, which the fuzzer has written
    ("report/report.py", "dumps"),  # https://pytorch.org/memory_viz reads pickles of plain data
}
_RUN = {"eval", "exec", "exec_module", "compile", "run_path", "run_module", "literal_eval"}
_UNPICKLE = {"load", "loads", "Unpickler", "dumps", "dump"}
_UNPICKLERS = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "yaml", "torch", "np"}


def _runs_data(node: ast.AST) -> str:
    """The name of a function that runs its argument, or unpickles it; empty for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name) and node.func.id in _RUN - {"compile"}:
        return node.func.id
    if isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if node.func.attr in _RUN - {"compile"}:
            return node.func.attr
        if node.func.attr in _UNPICKLE and owner in _UNPICKLERS:
            return node.func.attr
    return ""


def test_no_file_is_run_or_unpickled() -> None:
    found = {
        (name_of(path), name)
        for path in FILES
        for node in ast.walk(parsed(path))
        if (name := _runs_data(node))
    }
    assert found == _ALLOWED


def test_what_runs_data_is_found() -> None:
    text = "eval(x)\npickle.load(f)\ntorch.load(p)\nrunpy.run_path(p)\nyaml.load(y)\njson.loads(z)"
    nodes = [node for node in ast.walk(ast.parse(text)) if _runs_data(node)]
    assert sorted(node.lineno for node in nodes) == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]


class _Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _costs(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSTPASS_COSTS", str(path))
        device_costs._stored.cache_clear()
        try:
            device_costs.costs_of(torch.device("cpu"))
        finally:
            device_costs._stored.cache_clear()


READERS: dict[str, tuple[Callable[[Path], Any], tuple[type[BaseException], ...]]] = {
    "a problem": (CutProblem.from_json, (ValueError,)),
    "a report": (Report.from_json, (ValueError,)),
    "costs": (_costs, (UserWarning,)),
    "a config.json": (lambda path: config_of(str(path)), (UserError,)),
}
BAD_FILES: dict[str, Callable[[Path], bytes]] = {
    "a pickle": lambda path: pickle.dumps(_Payload(path.with_name("hacked"))),
    "nothing": lambda _: b"",
    "a million brackets": lambda _: b"[" * 10**6,
    "a million objects": lambda _: b'{"a":' * 10**6,
    "no number": lambda _: b'{"us": NaN, "bytes": -Infinity}',
    "a number of a million digits": lambda _: b'{"values": ' + b"9" * 10**6 + b"}",
    "no text": lambda _: b"\xff\xfe\x00",
    "a bomb": lambda _: gzip.compress(bytes(MOST_BYTES + 1)),
    "half a bomb": lambda _: gzip.compress(bytes(10**6))[:500],
    "lists of lists": lambda _: json.dumps({"regions": [[[]]] * 9, "values": [[[]]]}).encode(),
}


@pytest.mark.parametrize("content", BAD_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_a_bad_file_is_refused(reader: str, content: str, tmp_path: Path) -> None:
    """Soon, with a message that names the file, in little memory, and without a trace."""
    path = tmp_path / "file.json"
    path.write_bytes(BAD_FILES[content](path))
    read, errors = READERS[reader]
    if reader == "a config.json":
        pytest.importorskip("transformers")
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(errors, match=str(path)):
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == [path]
    assert peak < 3 * MOST_BYTES and time.monotonic() - start < 30


@pytest.mark.parametrize(
    "value",
    ["NaN", "1e999", "-1", "0", '"fast"', "true", "null", "[1]", "1" * 400, "{}"],
)
@pytest.mark.parametrize("field", ["flops_per_us", "slowdown"])
def test_costs_that_are_no_costs(field: str, value: str, tmp_path: Path) -> None:
    entry = {"slowdown": "[[64, 1.5]]", "chunk_us": "2.0", "flops_per_us": "3.0"}
    entry[field] = f"[[64, {value}]]" if field == "slowdown" else value
    text = ", ".join(f'"{name}": {each}' for name, each in entry.items())
    path = tmp_path / "costs.json"
    path.write_text(f'{{"cpu": {{{text}}}}}')
    with pytest.warns(UserWarning, match=f"ignores {path}"):
        _costs(path)


@pytest.mark.parametrize("dtype", ["load", "hub", "nowhere", "float32.__class__"])
def test_a_dtype_of_stored_costs_is_one(dtype: str, tmp_path: Path) -> None:
    entry = {"slowdown": [[64, 1.5]], "chunk_us": 2.0, "flops_per_us": 3.0, "dtype": dtype}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"NVIDIA L4": entry}))
    with pytest.warns(UserWarning, match="no dtype"):
        _costs(path)


def test_only_the_file_that_is_named_is_run(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("raise SystemExit('hacked')")
    (tmp_path / "train.py").write_text("def step(): return 3")
    assert load_function(f"{tmp_path}/train.py:step")[1]() == 3
    for name in ("train.py:__import__('os').getcwd", "train.py:step()", "train.py"):
        with pytest.raises(UserFileError):
            load_function(f"{tmp_path}/{name}")


# ---- a model's config ----------------------------------------------------------------------------
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 128,
}


def test_code_that_a_config_names_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from mstpass.planner.models import build
    from mstpass.planner.training import Training

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was asked for: {args}")

    monkeypatch.setattr("socket.socket.connect", refused)
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'hacked')!r}, 'w')")
    names = {
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling.Model"),
        "attn_implementation": "someone/kernels",
        "_attn_implementation": "someone/kernels",
        "name_or_path": str(tmp_path),
        "trust_remote_code": True,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **names}))
    with torch.device("meta"):
        model = build(config_of(str(tmp_path)), Training())
    assert type(model).__module__.startswith("transformers.")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**30},
        {"text_config": {"num_attention_heads": 10**6}},
        {"num_experts": 2**31},
    ],
    ids=str,
)
def test_a_model_of_absurd_size_is_refused(sizes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
    with pytest.raises(UserError, match="is too large for a model"):
        config_of(str(tmp_path))


# ---- names of models -----------------------------------------------------------------------------
RENAMES: dict[str, Callable[[str], str]] = {
    "around": lambda text: f"<script>{text}</script>",
    "alone": lambda text: "<script>",
    "after": lambda text: text + HOSTILE,
    "backslash": lambda text: text + "\\",
}


@pytest.mark.skipif(find_spec("graphviz") is None or not which("dot"), reason="needs Graphviz")
@pytest.mark.parametrize("fold", ["module", "none"])
@pytest.mark.parametrize("rename", RENAMES)
def test_a_picture_shows_names_and_runs_nothing(rename: str, fold: str, tmp_path: Path) -> None:
    report = llama_report(2, RENAMES[rename])
    report.to_svg(tmp_path / "plan.svg", fold)
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    elements = list(root.iter())
    tags = {element.tag.rpartition("}")[2] for element in elements}
    assert tags <= {"svg", "g", "a", "title", "text", "path", "polygon", "polyline", "ellipse"}
    attributes = {name.rpartition("}")[2] for element in elements for name in element.attrib}
    assert not [name for name in attributes if name.startswith("on") or name == "href"]
    titles = [v for element in elements for n, v in element.attrib.items() if n.endswith("}title")]
    shown = [*titles, *(element.text or "" for element in elements)]
    if rename != "backslash":
        assert any("<script>" in text for text in shown), "names are shown as they are"


def test_text_does_not_command_a_terminal() -> None:
    report = llama_report(1, lambda text: text + HOSTILE)
    for text in (str(report), report.to_dot() if find_spec("graphviz") else ""):
        assert printable(text) == text and "\x1b" not in text
        text.encode()
    note = mstpass.LintReport((), 0, notes=("a \x1b[2J note",))
    assert "\x1b" not in str(note)


def test_what_is_printable_stays() -> None:
    text = "layers.0\tMLP ▤ →\n日本語 é 🙂"
    assert printable(text) == text
