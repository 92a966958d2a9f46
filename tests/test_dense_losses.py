"""Losses of other models than language models: dense heads, transducers, CTC, patches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass import pipeline
from mstpass.graph.joint import JointGraph
from mstpass.graph.node_cost import flops
from mstpass.measure import peak_bytes
from mstpass.options import Options
from tests.checks import (
    STRICT,
    check_against_float64,
    check_batches,
    compiled,
    gradients,
    joint_graph,
    kinds,
    step_of,
)
from tests.dense_losses import (
    CLASSES,
    DENSE,
    PATCHES,
    REFUSED_DENSE,
    REFUSED_PATCHES,
    SPEECH,
    WIDTH,
    ConvolutionalMLP,
    Patches,
    Segmentation,
    Transducer,
    attended,
    ctc,
    ctc_of_picked,
    images,
    mean,
    monotonic,
    patch_nce,
    patches,
    smooth,
    speech,
)

pytestmark = [pytest.mark.sampled(5), pytest.mark.op_by_op]

MIB = 2**20
DENSE_CHUNK = {"chunk_tokens": 128}
PATCH_CHUNK = {"chunk_tokens": 64}
CONVOLUTION = torch.ops.aten.convolution.default


def _half(inputs: Iterable[Tensor]) -> list[Tensor]:
    return [x.bfloat16() if x.is_floating_point() else x for x in inputs]


# ---- one class for each pixel --------------------------------------------------------------------
LIKE_OTHERS = ("linear", "of each class", "two heads", "dice and mean")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full) if n in LIKE_OTHERS else n for n in DENSE],
)
def test_dense_head(name: str, device: str) -> None:
    loss, mode = DENSE[name]
    model = Segmentation().to(device)
    report = check_against_float64(model, step_of(loss), images(device=device), **DENSE_CHUNK)
    assert set(kinds(report)) == {("lm_head", mode)}, str(report)
    assert all(region.num_chunks == 6 for region in report.regions)


@pytest.mark.parametrize("name", ["mean", "channels last", "dice"])
def test_dense_head_in_bfloat16(name: str, device: str) -> None:
    loss, mode = DENSE[name]
    model, inputs = Segmentation().to(device, torch.bfloat16), _half(images(device=device))
    report = check_against_float64(model, step_of(loss), inputs, **DENSE_CHUNK)
    assert set(kinds(report)) == {("lm_head", mode)}, str(report)


@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_images(dynamic: bool | None) -> None:
    batches = [images(3), images(2), images(5, 11)]
    reports = check_batches(Segmentation(), step_of(mean), batches, dynamic=dynamic, **DENSE_CHUNK)
    assert kinds(reports[-1]) == [("lm_head", "fused")], str(reports[-1])


@pytest.mark.parametrize("name", REFUSED_DENSE)
def test_logits_of_neighbouring_pixels_are_refused(name: str) -> None:
    loss, reason = REFUSED_DENSE[name]
    report = check_against_float64(Segmentation(), step_of(loss), images(), **DENSE_CHUNK)
    assert not report.regions
    assert any(reason in rejection.reason for rejection in report.rejections), str(report)


def _convolutions(fn: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the weights of the convolutions that are left in the forward."""
    module, outputs = joint_graph(fn, *inputs)
    result = pipeline.run(module, Options(chunk_tokens=128), num_fwd_outputs=outputs)
    assert result.modules is not None
    forward = result.modules[0].graph
    weights = (n.args[1] for n in forward.find_nodes(op="call_function", target=CONVOLUTION))
    return [tuple(weight.meta["val"].shape) for weight in weights]


STEM, HEAD = (WIDTH, 4, 3, 3), (CLASSES, WIDTH, 1, 1)


def test_only_convolutions_of_loops_become_products() -> None:
    model = Segmentation()
    assert _convolutions(lambda x, y: mean(model, x, y), *images()) == [STEM]

    def flipped(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flip(3), labels, ignore_index=255)

    assert _convolutions(flipped, *images()) == [STEM, HEAD]

    def both(x: Tensor, labels: Tensor) -> Tensor:
        features = model.features(x)
        loss = F.cross_entropy(model.head(features), labels, ignore_index=255)
        return loss + model.second(features).flip(3).square().mean()

    assert _convolutions(both, *images()) == [STEM, HEAD]


def test_convolutions_of_an_mlp_run_in_chunks() -> None:
    options = {"memory_budget": 0.0, **DENSE_CHUNK}
    report = check_against_float64(ConvolutionalMLP(), lambda model: model, images(), **options)
    assert kinds(report) == [("mlp", "mixed")], str(report)


@pytest.mark.parametrize("change", [{"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_other_convolutions_stay(change: dict[str, int]) -> None:
    model = Segmentation()
    weight = model.second.weight[:, : WIDTH // change.get("groups", 1)].detach().requires_grad_()

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        logits = F.conv2d(model.features(x), weight, **change)
        return F.cross_entropy(logits.flatten(2), torch.zeros_like(logits[:, 0].flatten(1)).long())

    assert _convolutions(loss, *images()) == [STEM, tuple(weight.shape)]
    assert _convolutions(lambda x, y: smooth(model, x, y), *images())[1] == (CLASSES, WIDTH, 3, 3)


def test_a_convolution_has_the_operations_of_its_product() -> None:
    model = Segmentation()
    joint = JointGraph(*joint_graph(lambda x, y: mean(model, x, y), *images()))
    counts = [flops(node) for node in joint.nodes if "convolution" in str(node.target)]
    stem, head = 2 * 663 * 4 * 9 * WIDTH, 2 * 663 * WIDTH * CLASSES
    assert counts == [stem, head, 2 * head, stem]  # the images need no gradient


@pytest.mark.kernels
@pytest.mark.full
def test_the_peak_of_a_dense_head() -> None:
    """150 classes of 2 x 128 x 128 pixels: 18.8 MiB of logits."""
    model = Segmentation(150)
    x, labels = torch.randn(2, 4, 128, 128), torch.randint(0, 150, (2, 128, 128))

    def step(fn: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            fn(x, labels).backward()

        run()
        return run

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return mean(model, x, labels)

    ours = peak_bytes(step(compiled(loss, memory_budget=0.0)))
    report = mstpass.reports()[-1]
    whole = peak_bytes(step(torch.compile(loss)))
    assert kinds(report) == [("lm_head", "fused")], str(report)
    assert ours < 0.5 * whole, (ours / MIB, whole / MIB)
    assert report.peak_bytes is not None and ours < 1.1 * report.peak_bytes


# ---- transducers and CTC -------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in SPEECH if n != "lattice"])
def test_transducer(name: str) -> None:
    loss, mode = SPEECH[name]
    report = check_against_float64(Transducer(), step_of(loss), speech(), **DENSE_CHUNK)
    assert kinds(report) == [("lm_head", mode)], str(report)
    assert report.regions[0].num_tokens == 3 * 23 * 9


@pytest.mark.full
def test_transducer_with_its_lattice() -> None:
    loss, mode = SPEECH["lattice"]
    report = check_against_float64(Transducer(), step_of(loss), speech(2, 12, 5), chunk_tokens=40)
    assert kinds(report) == [("lm_head", mode)], str(report)


def test_transducer_in_bfloat16() -> None:
    model, inputs = Transducer().bfloat16(), _half(speech())
    report = check_against_float64(model, step_of(monotonic), inputs, **DENSE_CHUNK)
    assert kinds(report) == [("lm_head", "fused")], str(report)


def test_batches_of_speech() -> None:
    batches = [speech(3, 23, 8), speech(2, 31, 7), speech(4, 9, 11)]
    reports = check_batches(Transducer(), step_of(monotonic), batches, dynamic=True, **DENSE_CHUNK)
    assert kinds(reports[-1]) == [("lm_head", "fused")], str(reports[-1])


def test_ctc_of_picked_log_probabilities() -> None:
    model, inputs = Transducer(), speech(3, 50, 4)
    torch.testing.assert_close(ctc_of_picked(model, *inputs), ctc(model, *inputs))
    report = check_against_float64(model, step_of(ctc_of_picked), inputs, chunk_tokens=32)
    assert kinds(report) == [("lm_head", "recompute")], str(report)


def test_ctc_loss_needs_all_log_probabilities() -> None:
    """Dynamo leaves the loss out of the graph, so that they are returned, and exist in full."""
    model, inputs = Transducer(), speech(3, 200, 4)
    step = torch.compile(lambda x, y: ctc(model, x, y), backend="mst", options=STRICT)
    ours = gradients(model, step, inputs)
    for value, right in zip(
        ours, gradients(model, lambda x, y: ctc(model, x, y), inputs), strict=True
    ):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-3)
    report = mstpass.reports()[-1]
    assert not report.regions
    assert any("logits are an output of the graph" in r.reason for r in report.rejections)


# ---- patches of an image -------------------------------------------------------------------------
MARKS = {"sigmoid": pytest.mark.kernels}  # torch.eye has a dtype that only kernels know


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS[n]) if n in MARKS else n for n in PATCHES]
)
def test_contrast_of_patches(name: str) -> None:
    loss, regions = PATCHES[name]
    report = check_against_float64(Patches(), step_of(loss), patches(), **PATCH_CHUNK)
    assert kinds(report) == [("lm_head", "fused")] * regions, str(report)


@pytest.mark.parametrize("name", ["positive first", "hard negatives"])
def test_contrast_of_patches_in_bfloat16(name: str) -> None:
    loss, regions = PATCHES[name]
    model, inputs = Patches().bfloat16(), _half(patches())
    report = check_against_float64(model, step_of(loss), inputs, **PATCH_CHUNK)
    assert kinds(report) == [("lm_head", "fused")] * regions, str(report)


def test_two_batches_of_patches() -> None:
    batches = [patches(3, 150), patches(2, 131)]
    reports = check_batches(Patches(), step_of(patch_nce), batches, dynamic=False, **PATCH_CHUNK)
    assert kinds(reports[-1]) == [("lm_head", "fused")], str(reports[-1])


@pytest.mark.parametrize("name", REFUSED_PATCHES)
def test_patches_that_are_mixed_are_refused(name: str) -> None:
    loss, reason = REFUSED_PATCHES[name]
    report = check_against_float64(Patches(), step_of(loss), patches(), **PATCH_CHUNK)
    assert not report.regions
    assert any(reason in rejection.reason for rejection in report.rejections), str(report)


def test_attention_is_no_contrast() -> None:
    report = check_against_float64(Patches(), step_of(attended), patches(), **PATCH_CHUNK)
    assert not report.regions and not report.rejections, str(report)
