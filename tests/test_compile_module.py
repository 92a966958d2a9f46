"""``mstpass.compile``: in place, with dropped logits in training, and everything else as before."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.measure import peak_bytes
from tests.models import TinyLM

pytestmark = pytest.mark.op_by_op

FULL = pytest.mark.full
VOCAB = 600


class WithLoss(TinyLM):
    """Returns its loss beside its logits if it is given labels, as a library's models do."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 32)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(ids)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def _model() -> WithLoss:
    torch.manual_seed(0)
    return WithLoss()


IDS = torch.randint(0, VOCAB, (2, 64))


def test_it_is_in_place() -> None:
    model = _model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert mstpass.compile(model, strict=True, chunk_tokens=64) is model
    out = model(IDS, IDS)
    out["loss"].backward()
    assert isinstance(out["logits"], mstpass.DroppedLogits)
    assert [(r.kind, r.mode) for r in mstpass.reports()[-1].regions] == [("lm_head", "fused")]
    assert model.state_dict().keys() == state.keys() and model.head.weight.grad is not None
    model.load_state_dict(state)
    eager = _model()
    with torch.no_grad():  # evaluation has logits, beside its loss as well
        torch.testing.assert_close(model(IDS, IDS), eager(IDS, IDS), rtol=1e-4, atol=1e-5)
    without_labels = model(IDS)["logits"]
    torch.testing.assert_close(without_labels, eager(IDS)["logits"], rtol=1e-4, atol=1e-5)
    assert without_labels.requires_grad


def test_copies_are_not_compiled_and_uncompile_undoes_it() -> None:
    model = mstpass.compile(_model(), strict=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(other(IDS, IDS)["logits"], mstpass.DroppedLogits)
    before = len(mstpass.reports())
    assert mstpass.uncompile(model) is model
    out = model(IDS, IDS)
    assert not isinstance(out["logits"], mstpass.DroppedLogits)
    assert len(mstpass.reports()) == before
    mstpass.uncompile(model)  # nothing to undo


def test_logits_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = _model()(IDS, IDS)["logits"]
    monkeypatch.setenv("MSTPASS_LOGITS", "keep")
    kept = mstpass.compile(_model())(IDS, IDS)["logits"]
    torch.testing.assert_close(kept, eager, rtol=1e-4, atol=1e-5)


def test_a_function_returns_what_its_author_wrote() -> None:
    model = _model()
    step = mstpass.compile(lambda ids: model(ids, ids), fullgraph=True)
    torch.testing.assert_close(step(IDS), model(IDS, IDS), rtol=1e-4, atol=1e-5)


@FULL
def test_a_function_may_drop_its_logits() -> None:
    model = _model()
    step = mstpass.compile(lambda ids: model(ids, ids), logits="drop", dynamic=True)
    assert isinstance(step(IDS)["logits"], mstpass.DroppedLogits)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory_buget": 0.0}, "memory_budget"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"logits": "none"}, "drop"),
        ({"options": {"strict": True}}, "each option"),
        ({"backend": "inductor"}, "each option"),
        ({"mode": "fastest"}, "fastest"),
    ],
)
def test_bad_options_are_told_at_once(given: dict[str, Any], words: str) -> None:
    model = _model()
    with pytest.raises(mstpass.OptionError, match=words):
        mstpass.compile(model, **given)
    assert model._compiled_call_impl is None


def test_a_mode_goes_with_options() -> None:
    model = mstpass.compile(_model(), mode="max-autotune-no-cudagraphs", memory_budget=0.0)
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize("given", [3, torch.compile(nn.Linear(2, 2)), torch.compile(len)])
def test_only_what_is_not_compiled(given: Any) -> None:
    with pytest.raises(TypeError, match=r"mstpass\.compile takes"):
        mstpass.compile(given)
    with pytest.raises(TypeError, match=r"mstpass\.uncompile takes"):
        mstpass.uncompile(3)  # type: ignore[type-var]


# ---- Hugging Face --------------------------------------------------------------------------------
def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.full
def test_a_hugging_face_model_has_the_peak_of_its_loss(tmp_path: Path) -> None:
    """As simulated, and as measured."""
    ids = torch.randint(2, 2048, (2, 256))
    model, eager = _llama(), _llama()
    eager(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    of_loss = _llama()
    fn = torch.compile(
        lambda ids: of_loss(input_ids=ids, labels=ids, use_cache=False).loss, backend="mst"
    )
    mstpass.compile(model, strict=True)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    fn(ids).backward()
    assert isinstance(out.logits, mstpass.DroppedLogits)
    for got, right in zip(model.parameters(), eager.parameters(), strict=True):
        assert (got.grad - right.grad).norm() <= 1e-5 * right.grad.norm()
        got.grad = None
    of_loss.zero_grad()
    ours, alone = (report.peak_bytes for report in mstpass.reports()[-2:])
    assert ours is not None and alone is not None and ours <= 1.02 * alone
    peak = peak_bytes(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())
    assert peak <= 1.02 * peak_bytes(lambda: fn(ids).backward())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict())


@FULL
def test_generation_is_as_before() -> None:
    ids = torch.randint(2, 2048, (1, 8))
    model, eager = mstpass.compile(_llama()).eval(), _llama().eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), eager.generate(ids, **settings))
