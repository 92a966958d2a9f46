"""``mstpass.explain``: what a compilation would do, and nothing of it done."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass import pipeline
from mstpass.explainer import ExplainError, explain_parts
from mstpass.graph import advice, op_table, ops
from mstpass.graph.collectives import Collectives
from mstpass.graph.token_rules import Rule
from mstpass.graph.tokens import Refusal
from mstpass.options import Options
from mstpass.plans import ChunkPlan, Outcome, PeakAt, Rejection, SavedValue, SavePlan, Transfer
from mstpass.report.report import Report
from mstpass.torch_internals.aot_autograd import merge_equal_nodes

from . import refused
from .checks import joint_graph
from .models import TinyLM, next_token_loss
from .source_files import parsed

ROOT = Path(mstpass.__file__).parent
aten = torch.ops.aten


def test_it_says_what_a_compilation_does() -> None:
    model = TinyLM(2048, 64)
    ids = torch.randint(0, 2048, (2, 512))
    step = lambda ids: next_token_loss(model, ids)
    explained = mstpass.explain(step, ids, options={"chunk_tokens": 256})
    graph, outputs = joint_graph(step, ids)
    merge_equal_nodes(graph)
    options = Options.parse({"chunk_tokens": 256})
    done = pipeline.run(graph, options, num_fwd_outputs=outputs).outcome
    assert explained.regions and explained.peak_bytes == done.peak_bytes
    # paths of modules differ: a compilation sees the function itself
    same = lambda r: (r.kind, r.mode, r.num_chunks, r.bytes_after, r.members)
    assert list(map(same, explained.regions)) == list(map(same, done.regions))
    assert done.save_plan
    assert [v.node for v in explained.saved] == [v.node for v in done.save_plan.saved]


def test_it_disturbs_nothing() -> None:
    linear = nn.Linear(16, 64)
    x = torch.randn(32, 16)
    compiles = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiles.append(gm)
        return gm

    def loss(x: Tensor) -> Tensor:
        return linear(x).square().mean() + torch.rand(())

    compiled = torch.compile(loss, backend=backend)
    compiled(x)
    state, count = torch.get_rng_state(), len(mstpass.reports())
    mstpass.explain(compiled, x)
    mstpass.explain(loss, torch.randn(48, 16, device="meta"))
    assert torch.equal(state, torch.get_rng_state())
    assert linear.weight.grad is None and linear.weight.device.type == "cpu"
    compiled(x)
    assert len(compiles) == 1 and len(mstpass.reports()) == count
    compiled(torch.randn(40, 16))  # the first other size makes it dynamic: explain's was none
    assert len(compiles) == 2


@pytest.mark.parametrize(
    "form",
    ["module", "closure", "method", "kwargs", "partial", "named", "bound", "held", "in a closure"],
)
def test_meta_models_at_sizes_that_fit_nowhere(form: str) -> None:
    with torch.device("meta"):
        model = TinyLM(100_000, 64)
        ids = torch.zeros(1, 2**20, dtype=torch.long)

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def loss(self, ids: Tensor) -> Tensor:
            return next_token_loss(self.model, ids)

    bound = functools.partial(next_token_loss, model)
    report = {
        "module": lambda: mstpass.explain(next_token_loss, model, ids),
        "closure": lambda: mstpass.explain(lambda ids: next_token_loss(model, ids), ids),
        "method": lambda: mstpass.explain(Trainer().loss, ids),
        "kwargs": lambda: mstpass.explain(next_token_loss, model=model, ids=ids),
        "partial": lambda: mstpass.explain(functools.partial(next_token_loss, model), ids),
        "named": lambda: mstpass.explain(functools.partial(next_token_loss, model=model), ids=ids),
        "bound": lambda: mstpass.explain(functools.partial(Trainer().loss, ids)),
        "held": lambda: mstpass.explain(functools.partial(_loss_of_parts, {"lm": model}), ids),
        "in a closure": lambda: mstpass.explain(lambda ids: bound(ids), ids),
    }[form]()
    assert [region.kind for region in report.regions][:1] == ["lm_head"]
    assert report.baseline_peak_bytes is not None and report.baseline_peak_bytes > 300 * 2**30
    assert all(p.device.type == "meta" for p in model.parameters())


def _loss_of_parts(parts: dict[str, TinyLM], ids: Tensor) -> Tensor:
    return next_token_loss(parts["lm"], ids)


REFUSED = {
    "logits_returned": ("logits are an output", "only the loss", "refused.py"),
    "loss_outside": ("logits are an output", "only the loss", "refused.py"),
    "batch_statistics": ("reduces over all tokens", "token by token", "median in refused.py"),
    "places_of_the_largest": ("reduces over all tokens", "token by token", "argmax in refused.py"),
    "product_over_tokens": ("reduces over all tokens", "token by token", "prod in refused.py"),
    "unknown_op": ("no token rule for tests_refused.scale", "ATen ops", "scale in refused.py"),
    "last_token": ("picks single tokens", "head(h[:, -1])", "select in refused.py"),
    "few_tokens": ("fewer than two chunks", "chunk_tokens", "refused.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why_where_and_what_to_change(name: str) -> None:
    args = (refused.hidden, refused.labels)
    fn = getattr(refused, name)
    report = mstpass.explain(fn, *args[: fn.__code__.co_argcount])
    assert not report.regions
    (rejection,) = report.rejections
    reason, fix, where = REFUSED[name]
    assert reason in rejection.reason and fix in rejection.fix
    text = str(report)
    line = next(row for row in text.splitlines() if where in row and "at " in row)
    number = int(re.search(r"refused\.py:(\d+)", line)[1])  # type: ignore[index]
    source = Path(refused.__file__).read_text().splitlines()[number - 1]
    assert "return" in source or "logits" in source
    assert "proj" in line and text.count("why: ") == text.count("fix: ") == 1


def test_the_same_head_under_its_loss_is_taken() -> None:
    report = mstpass.explain(refused.fine, refused.hidden, refused.labels)
    assert [region.mode for region in report.regions] == ["fused"] and not report.rejections


# Of these, the reasons are notes, or leave a value as it is; or they are not given here.
_NO_REASONS = {"close_fused.py", "row_sums.py", "advice.py"}


def _without_advice() -> set[str]:
    """Every reason in the sources that no advice makes, with X for what is filled in.

    A rewrite of ``normalize`` that does not apply leaves the graph as it is, and reports nothing.
    """
    found = {row.mixes for row in op_table.TABLE.values() if not advice.fix_of(row.mixes)}
    files = {path for room in ("graph", "regions", "loops") for path in (ROOT / room).rglob("*.py")}
    files = {path for path in files if path.name not in _NO_REASONS}
    for path in (*files, ROOT / "pipeline_stages.py"):
        for call in ast.walk(parsed(path)):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if name in ("Refusal", "NoRule", "CannotTake", "Reason", "Rejection"):
                argument = call.args[-1 if name != "Reason" else 0]
                if isinstance(argument, ast.Constant):
                    found.add(str(argument.value))
                elif isinstance(argument, ast.JoinedStr):
                    parts = (getattr(part, "value", "X") for part in argument.values)
                    found.add("".join(p if isinstance(p, str) else "X" for p in parts))
    return found - {""}


# Reasons that stand for another one or that no user sees.
_INTERNAL = {
    "",  # a value that does not hold the axis
    "X: X",
    "X is a X, not an op",
    "no operand of the sum is cut",
    # why a region has no sections of its features: it has its other modes
    "a section needs it, and it needs all features",
    "all of its loops run over features",
    "each chunk needs the weights of all experts",
    "every section needs all of it",
    "holds its features in no dim of their own",
    "holds the features in two dims",
    "is a sum over all features that every section needs",
    "is read along several dims",
    "its forward is several loops over tokens",
    "its backward is several loops over tokens",
    "no gradient of a weight holds features",
    "the step returns a wide value, so it exists in full",
    "its values are compared with a maximum of theirs, computed in other chunks",
    "X chunks are too many for sums in 16 bits",
    "X features are too few for several sections",
}


def test_every_reason_has_advice() -> None:
    assert _without_advice() <= _INTERNAL


def test_advice_against_work_that_is_done_by_hand() -> None:
    rules = [op_table.row_of(op).rule for op in (aten.stack.default, aten.topk.default)]
    fixes = [advice.fix_of(rule.refused) for rule in rules if isinstance(rule, Rule)]
    assert ["do not stack" in fix for fix in fixes] == [True, False]
    assert "by hand, do not" in advice.MORE_ROWS


def test_advice_does_not_send_those_to_aten_who_use_it() -> None:
    fixes = [
        advice.fix_of(found.reason)
        for target in ("mine.scale.default", torch.ops.aten.renorm.default)
        if isinstance(found := ops.with_token_rules(target), Refusal)
    ]
    assert "ATen" in fixes[0] and "report it" in fixes[1]


def test_a_report_fits_a_screen() -> None:
    """However many unlike regions, rejections, modules and notes there are."""
    base = mstpass.explain(refused.fine, refused.hidden, refused.labels).outcome
    (region,) = base.regions
    regions = tuple(
        dataclasses.replace(region, source=f"part{'x' * i}.mlp", note="a note " * 40)
        for i in range(30)
    )
    outcome = Outcome(
        regions=regions,
        rejections=tuple(
            Rejection("detect", f"mm_{i}", f"reason {'y' * i} " * 30, "m", 1, "do this " * 30)
            for i in range(30)
        ),
        save_plan=SavePlan(tuple(SavedValue(f"v{i}", 9, "m" * i) for i in range(50)), "min_cut"),
        peak_bytes=1,
        notes=("a long note " * 30,) * 9,
    )
    text = str(Report(outcome))
    assert len(text.splitlines()) <= 40 and "... and " in text
    layers = tuple(
        dataclasses.replace(region, source=f"model.layers.{i}.mlp") for i in range(32) if i != 7
    )
    text = str(Report(dataclasses.replace(outcome, regions=layers)))
    assert "lm_head x 31" in text and "model.layers.{0-6,8-31}.mlp" in text


def test_json_comes_back_whole(tmp_path: Path) -> None:
    (report,) = explain_parts(
        refused.fine, (refused.hidden, refused.labels), pareto=True, fullgraph=True
    )
    assert report.details is not None
    peaks = [point.peak_bytes for point in report.details.pareto]
    assert len(peaks) == 6 and peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    assert [p.label for p in report.details.pareto if p.chosen] == ["memory_budget=1.0"]
    report.to_json(tmp_path / "report.json")
    back = Report.from_json(tmp_path / "report.json")
    assert back.outcome == report.outcome and back.details == report.details
    assert str(back) == str(report)


def test_older_json_is_read(tmp_path: Path) -> None:
    data = mstpass.explain(refused.few_tokens, refused.hidden, refused.labels).to_dict()
    del data["schema"], data["details"]
    for rejection in data["rejections"]:
        del rejection["fix"]
    for value in data["save_plan"]["saved"]:
        del value["value"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    back = Report.from_json(tmp_path / "old.json")
    assert back.details is None and back.rejections[0].fix == "" and "fewer than" in str(back)


def test_the_documented_schema_is_the_real_one() -> None:
    """Each field of docs/report-json.md's table is there, and nothing else is."""
    (report,) = explain_parts(
        refused.fine, (refused.hidden, refused.labels), pareto=True, fullgraph=True
    )
    other = mstpass.explain(refused.few_tokens, refused.hidden, refused.labels)
    reconstructed = {"node", "sources", "rule", "grade", "bytes", "bounds", "source"}
    found = {
        "notes",
        "scheduled_peak_bytes",
        "limit_bytes",
        "regions[].saved",
        "save_plan.nested",
        "save_plan.inner",
        "save_plan.levels",
        *(f"save_plan.reconstructed[].{name}" for name in reconstructed),
        *(f"peaks[].{field.name}" for field in dataclasses.fields(PeakAt)),
        "budget_holds_for",
        *(f"collectives.{field.name}" for field in dataclasses.fields(Collectives)),
        *(f"save_plan.transfers[].{field.name}" for field in dataclasses.fields(Transfer)),
    }
    for one in (report, other):
        _paths(json.loads(json.dumps(one.to_dict(), default=sorted)), "", found)
    docs = (ROOT.parent / "docs" / "report-json.md").read_text()
    table = docs.partition("<!-- schema -->")[2].partition("<!-- /schema -->")[0]
    assert found == set(re.findall(r"^\| `([^`]+)` \|", table, re.M))
    assert f'"schema": "{report.to_dict()["schema"]}"' in docs


def _paths(value: Any, path: str, found: set[str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _paths(item, f"{path}.{key}".strip("."), found)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            _paths(item, f"{path}[]", found)
    elif value is not None and value != []:
        found.add(path)


def test_a_meta_module_alone() -> None:
    with torch.device("meta"):
        linear, x = nn.Linear(64, 4096), torch.randn(1024, 64)
    report = mstpass.explain(linear, x)
    assert report.details is not None and not report.regions
    assert "logits are an output" in report.rejections[0].reason


@pytest.mark.parametrize("held", ["global", "closure", "batch"])
def test_meta_tensors_that_a_function_refers_to(held: str) -> None:
    """As a file for `mstpass explain` has them; they are what they were afterwards."""
    with torch.device("meta"):
        head, x, y = nn.Linear(64, 4096), torch.zeros(512, 64), torch.zeros(512, dtype=torch.long)
    names: dict[str, Any] = {"head": head, "F": F}
    if held == "global":
        names |= {"x": x, "y": y}
        exec("def loss():\n    return F.cross_entropy(head(x), y)", names)
    elif held == "batch":
        names["batch"] = {"x": x, "y": y}
        exec("def loss():\n    return F.cross_entropy(head(batch['x']), batch['y'])", names)
    else:
        names["loss"] = lambda: F.cross_entropy(head(x), y)
    assert [r.kind for r in mstpass.explain(names["loss"]).regions] == ["lm_head"]
    there = {**names, **names.get("batch", {})}
    assert held == "closure" or (there["x"] is x and there["y"] is y)
    assert {t.device.type for t in (x, y, *head.parameters())} == {"meta"}


def test_functions_of_no_importable_module() -> None:
    namespace: dict[str, Any] = {"__name__": "nowhere", "refused": refused}
    exec("model = refused.model\ndef loss(h, y): return refused.fine(h, y)", namespace)
    report = mstpass.explain(namespace["loss"], refused.hidden, refused.labels)
    assert [region.mode for region in report.regions] == ["fused"]


def test_a_wrapper_may_give_the_arguments() -> None:
    weight, x = torch.randn(8, 4, requires_grad=True), torch.randn(16, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).square().mean()

    @functools.wraps(loss)
    def step() -> torch.Tensor:
        return loss(x)

    assert mstpass.explain(step).peak_bytes


def test_a_model_without_a_step() -> None:
    with pytest.raises(ExplainError, match=r"no backward.*returns the loss"):
        mstpass.explain(lambda x: x.sum(), torch.randn(8))
    with pytest.raises(ExplainError, match=r"too many positional arguments$"):
        mstpass.explain(lambda: None, refused.hidden)
    with pytest.raises(ExplainError, match=r"options=\{'memory_budget': 0.0\}"):
        mstpass.explain(refused.fine, refused.hidden, refused.labels, memory_budget=0.0)
    with pytest.raises(ExplainError, match="not a function"):
        mstpass.explain(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(mstpass.OptionError, match="chunk_tokens"):
        mstpass.explain(refused.fine, options={"chunk_tokenz": 3})


def test_an_error_that_is_raised_while_tracing() -> None:
    """Eager mode may run where Dynamo finds an error; torch.compile breaks the graph there."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * len({}["missing"])

    with pytest.raises(ExplainError, match=r"KeyError.*without torch.compile.*explain_all"):
        mstpass.explain(loss, torch.randn(8, requires_grad=True))


def test_the_regions_of_a_budget_reach_it() -> None:
    report = mstpass.explain(
        refused.fine, refused.hidden, refused.labels, options={"memory_budget": "9MiB"}
    )
    (region,) = report.regions
    assert isinstance(region, ChunkPlan) and report.peak_bytes is not None
    assert report.peak_bytes <= 9 * 2**20
