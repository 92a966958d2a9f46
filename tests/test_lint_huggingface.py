"""The linter on Hugging Face models under checkpoints and FSDP: flops equal a count by hand."""

import functools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import mstpass
from tests.lint_models import MM, NON_REENTRANT, REENTRANT, Model, by_kind, runs, tokens

HIDDEN, MLP, LAYERS, HEADS, LENGTH = 16, 32, 2, 2, 8
ATTENTION = 2 * 2 * LENGTH * LENGTH * HIDDEN  # two products over all heads
DOWN = 2 * LENGTH * HIDDEN * MLP
LAYER = 4 * 2 * LENGTH * HIDDEN * HIDDEN + ATTENTION + 3 * DOWN


def llama(reentrant=None, impl=None):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            use_cache=False,
        )
    ).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if impl is not None:
        apply_activation_checkpointing(
            model,
            functools.partial(checkpoint_wrapper, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
        )
    return model


def lint_llama(model):
    ids = torch.randint(64, (1, LENGTH))
    return mstpass.lint(model, input_ids=ids, labels=ids)  # its output has a loss


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_checkpoint_wrapper_around_hugging_face(impl):
    """The field's case: 248.88 s instead of 185.07 s an epoch of Llama-2-7B on 4 A100."""
    report = lint_llama(llama(REENTRANT, impl))
    nested = by_kind(report, "nested checkpoints")
    assert set(nested) == {"model.layers.0", "model.layers.1"}
    for finding in nested.values():
        assert (finding.forward_runs, finding.recompute_runs) == (1, 2)
        assert finding.wasted_flops == LAYER
        assert "checkpoint_wrapper around Hugging Face gradient checkpointing" in finding.cause
        assert "model.gradient_checkpointing_disable()" in finding.fix
        assert "apply_activation_checkpointing" in finding.fix
    # without early stop even the recomputation that is needed runs the last product
    dead = by_kind(report, "dead recompute")
    assert {f.wasted_flops for f in dead.values()} == {DOWN}
    assert set(dead) == {f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)}
    assert runs(report)["model.layers.0"] == (1, 2)
    assert runs(report)["model.layers.1.self_attn.q_proj"] == (1, 2)
    clean = lint_llama(llama(NON_REENTRANT))
    assert report.step_flops - report.wasted_flops == clean.step_flops


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("reentrant", "impl"),
    [(None, None), (NON_REENTRANT, None), (None, CheckpointImpl.NO_REENTRANT)],
)
def test_hugging_face_with_at_most_one(reentrant, impl):
    report = lint_llama(llama(reentrant, impl))
    assert not report.findings
    assert not report.notes
    assert runs(report)["model.layers.0"] == (1, 0 if reentrant is impl is None else 1)


@pytest.fixture
def one_process():
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_under_fsdp_the_wrapper_is_fsdps(one_process):
    from torch.distributed.fsdp import fully_shard

    model = Model(REENTRANT)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer), mesh=one_process)
    report = mstpass.lint(fully_shard(model, mesh=one_process), tokens())
    nested = by_kind(report, "nested checkpoints")
    assert set(nested) == {"layers.0", "layers.1"}
    assert "around FSDP activation checkpointing" in nested["layers.0"].cause
    assert nested["layers.0"].wasted_flops == MM
    assert runs(report)["layers.0"] == (1, 2)
