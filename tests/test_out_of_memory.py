"""A step that runs out of memory takes a leaner plan; gradients are right, and memory is freed."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass import backend
from mstpass.memory.device_budget import is_out_of_memory
from mstpass.out_of_memory import LeanerPlans
from mstpass.torch_internals import aot_autograd
from tests.checks import STRICT
from tests.models import TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

TOKENS, WIDTH, WORDS = 1024, 16, 2048
LABELS_N = torch.arange(TOKENS) % WORDS
CPU_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 100000 bytes."


def loss(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(x.tanh(), 0.25) @ head.t(), LABELS_N)


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, WIDTH), (WORDS, WIDTH))
    return [torch.randn(*size, generator=generator).requires_grad_() for size in sizes]


def gradients(step: Callable[..., torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    inputs = leaves()
    torch.manual_seed(seed)
    return list(torch.autograd.grad(step(*inputs), inputs))


def compiled(fn: Callable[..., Any] = loss, **options: Any) -> Any:
    return torch.compile(fn, backend=backend.mst, options={**STRICT, **options})


class Allocator:
    """Fails when it is told to: it stands for the code of compiled graphs.

    Attributes:
        forwards, backwards: how many of the next ones fail.
        held: buffers that a failed run had allocated.
    """

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.kind: type[Exception] = RuntimeError

    def failing(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any) -> Any:
            if getattr(self, name):
                setattr(self, name, getattr(self, name) - 1)
                buffer = torch.rand(1000)  # the random state has moved
                self.held.append(weakref.ref(buffer))
                raise self.kind(CPU_TEXT)
            return run(*args)

        return maybe


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    take, extended = LeanerPlans._take, aot_autograd._extended

    def taken(self: LeanerPlans, plan: Any) -> None:
        object.__setattr__(plan, "run", made.failing("forwards", plan.run))
        take(self, plan)

    def failing(run: Any, *args: Any) -> Any:
        return extended(made.failing("backwards", run), *args)

    monkeypatch.setattr(LeanerPlans, "_take", taken)
    monkeypatch.setattr(aot_autograd, "_extended", failing)
    return made


@pytest.fixture(autouse=True)
def _nothing_is_held(allocator: Allocator) -> Iterator[None]:
    yield
    assert not any(buffer() is not None for buffer in allocator.held)


def peaks(before: int) -> list[int]:
    return [report.peak_bytes or 0 for report in mstpass.reports()[before:]]


# ---- forward -------------------------------------------------------------------------------------
def test_a_forward_runs_again_under_a_leaner_plan(allocator: Allocator) -> None:
    step, before = compiled(), len(mstpass.reports())
    expected = gradients(step)
    allocator.forwards = 1
    with pytest.warns(UserWarning, match="ran again under a leaner plan") as told:
        found = gradients(step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)  # the same dropout
    assert len(told) == 1 and "memory_budget='" in str(told[0].message)
    first, second = peaks(before)
    assert second <= first - 100_000
    assert allocator.forwards == 0
    torch.testing.assert_close(gradients(step, 2), gradients(step, 2), rtol=0, atol=0)


def test_the_least_memory_comes_last_and_then_the_error(allocator: Allocator) -> None:
    step, before = compiled(), len(mstpass.reports())
    expected = gradients(step)
    allocator.forwards = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error says it all
        with pytest.raises(RuntimeError) as caught:
            gradients(step)
    made = peaks(before)
    assert made == sorted(made, reverse=True)
    assert CPU_TEXT in str(caught.value) and "no plan needs less memory" in str(caught.value)
    assert type(caught.value) is RuntimeError
    for _ in range(2):
        allocator.forwards = 1
        with pytest.raises(RuntimeError, match="Use a smaller batch"):
            gradients(step)
    assert peaks(before) == made, "it is not compiled again and again"
    torch.testing.assert_close(gradients(step), expected, rtol=1e-5, atol=1e-8)


def test_what_has_the_least_memory_already_only_explains(allocator: Allocator) -> None:
    step = compiled(memory_budget=0.0)
    gradients(step)
    allocator.forwards, allocator.kind = 1, MemoryError
    with pytest.raises(MemoryError, match="Use a smaller batch"):
        gradients(step)
    gradients(step)


def test_other_errors_are_left_alone(allocator: Allocator) -> None:
    step, before = compiled(), len(mstpass.reports())
    gradients(step)
    allocator.forwards, allocator.kind = 1, ValueError
    with pytest.raises(ValueError, match=f"^{CPU_TEXT}$"):
        gradients(step)
    gradients(step)
    assert len(peaks(before)) == 1


def test_a_forward_that_writes_to_its_inputs_does_not_run_twice(allocator: Allocator) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WORDS))
    x = torch.randn(TOKENS, WIDTH)
    step = compiled(lambda x: F.cross_entropy(model(x), LABELS_N))
    step(x).backward()
    allocator.forwards = 1
    with pytest.raises(RuntimeError, match="writes to its inputs"):
        step(x)
    mean = model[0].running_mean.clone()
    step(x).backward()  # under a leaner plan, without a warning
    assert not torch.equal(model[0].running_mean, mean)
    assert model[0].num_batches_tracked == 2


def test_a_stance_that_forbids_to_compile(allocator: Allocator) -> None:
    step, before = compiled(), len(mstpass.reports())
    gradients(step)
    allocator.forwards = 1
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(RuntimeError, match="stance"):
            gradients(step)
        gradients(step)
    assert len(peaks(before)) == 1
    gradients(step)
    assert len(peaks(before)) == 2


# ---- backward ------------------------------------------------------------------------------------
def test_a_backward_says_what_to_do_and_the_next_call_is_leaner(allocator: Allocator) -> None:
    step, before = compiled(), len(mstpass.reports())
    expected = gradients(step)
    allocator.backwards = 1
    with pytest.raises(RuntimeError) as caught:
        gradients(step)
    text = str(caught.value)
    assert text.startswith(CPU_TEXT) and "this is the backward of a compiled step" in text
    assert "lm_head, fused" in text and "The next call takes a leaner plan" in text
    assert "Set memory_budget='" in text and len(peaks(before)) == 1
    torch.testing.assert_close(gradients(step), expected, rtol=1e-5, atol=1e-8)
    first, second = peaks(before)
    assert second < first


def test_the_type_of_the_error_stays(allocator: Allocator) -> None:
    step = compiled()
    gradients(step)
    allocator.backwards, allocator.kind = 1, torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError, match="leaner plan"):
        gradients(step)


def test_a_graph_that_is_kept_may_run_its_backward_again(allocator: Allocator) -> None:
    step, inputs = compiled(), leaves()
    value = step(*inputs)
    expected = torch.autograd.grad(value, inputs, retain_graph=True)
    allocator.backwards = 1
    with pytest.raises(RuntimeError, match="leaner plan"):
        torch.autograd.grad(value, inputs, retain_graph=True)
    found = torch.autograd.grad(value, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- checkpoints ---------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_the_plan_of_its_first_run(reentrant: bool, allocator: Allocator) -> None:
    """The plan changes between the two runs of the first block."""
    step, seed = compiled(), 3

    def twice() -> list[torch.Tensor]:
        inputs = leaves()
        torch.manual_seed(seed)
        first = checkpoint(step, *inputs, use_reentrant=reentrant)
        allocator.forwards = failing
        second = checkpoint(step, *inputs, use_reentrant=reentrant)
        (first + 2 * second).backward()
        return [x.grad for x in inputs]  # type: ignore[misc]

    failing = 0
    expected = twice()
    failing = 0 if reentrant else 1  # without gradients there is no plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = twice()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_no_plan_is_changed_while_a_checkpoint_runs_again(allocator: Allocator) -> None:
    step, inputs = compiled(), leaves()
    before = len(mstpass.reports())
    value = checkpoint(step, *inputs, use_reentrant=False)
    allocator.forwards = 1
    with pytest.raises(RuntimeError, match="a checkpoint runs it"):
        value.backward()
    assert len(peaks(before)) == 1
    expected = gradients(loss)
    torch.testing.assert_close(gradients(step), gradients(step))
    assert len(peaks(before)) == 2 and len(expected) == 2


# ---- symbolic sizes ------------------------------------------------------------------------------
def test_each_range_of_lengths_becomes_leaner_for_itself(allocator: Allocator) -> None:
    model = TinyLM(2000, 16)
    step = torch.compile(
        lambda ids: next_token_loss(model, ids), backend="mst", dynamic=True, options=STRICT
    )
    before = len(mstpass.reports())

    def run(length: int) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(length)
        step(torch.randint(2000, (1, length))).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = {length: run(length) for length in (900, 2000, 700)}
    count = len(peaks(before))
    allocator.forwards = 1
    with pytest.warns(UserWarning, match="Set memory_budget="):
        found = run(900)
    torch.testing.assert_close(found, expected[900], rtol=1e-4, atol=1e-7)
    allocator.backwards = 1
    with pytest.raises(RuntimeError, match="leaner plan"):
        run(2000)
    for length, values in expected.items():
        torch.testing.assert_close(run(length), values, rtol=1e-4, atol=1e-7)
    assert len(peaks(before)) == count + 2
    assert peaks(before)[-1] < peaks(before)[1]


def result_or_message(step: Callable[..., torch.Tensor], seed: int) -> tuple[Any, str]:
    """The gradients; where memory was short, the message of the error."""
    try:
        return gradients(step, seed), ""
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


# ---- many ----------------------------------------------------------------------------------------
def test_a_hundred_failures(allocator: Allocator) -> None:
    """Forwards and backwards fail by chance: gradients are right, or there is an error."""
    chance, failures, skipped = random.Random(0), 0, 0
    step = compiled()
    expected = {seed: gradients(step, seed) for seed in range(4)}
    while failures < 100:
        if failures % 25 == 24:
            torch.compiler.reset()
            step = compiled()
        allocator.forwards, allocator.backwards = chance.choice(((1, 0), (0, 1), (1, 1), (0, 0)))
        asked, seed = allocator.forwards + allocator.backwards, chance.randrange(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, told = result_or_message(step, seed)
        skipped += "mstpass: this is the" in told
        if not told:
            torch.testing.assert_close(found, expected[seed], rtol=1e-4, atol=1e-7)
        failures += asked - allocator.forwards - allocator.backwards
    assert skipped
    assert not any(buffer() is not None for buffer in allocator.held)


# ---- what is kept --------------------------------------------------------------------------------
@pytest.mark.kernels
def test_no_batch_is_kept_alive(allocator: Allocator) -> None:
    step, inputs = compiled(), leaves()
    held = weakref.ref(inputs[0])
    step(*inputs).backward()
    del inputs
    gc.collect()
    assert held() is None


# ---- CUDA ----------------------------------------------------------------------------------------
@pytest.fixture
def on_cuda() -> Iterator[Callable[[float], None]]:
    """Limits what the process may allocate beyond what it holds, in bytes."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(more_bytes: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved() + more_bytes) / total)
        )

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("part", [0.9, 0.6, 0.3])
def test_a_device_that_is_full(part: float, on_cuda: Callable[[float], None]) -> None:
    """Each step has right gradients, or an error of the allocator; in the end, one has them."""
    labels = torch.arange(8192, device="cuda")
    inputs = [torch.randn(n, 128, device="cuda").requires_grad_() for n in (8192, 65536)]

    def wide(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.tanh() @ head.t(), labels)

    step = compiled(wide, memory_budget="free")
    expected = torch.autograd.grad(step(*inputs), inputs)
    peak = mstpass.reports()[-1].peak_bytes or 0
    held = torch.cuda.memory_allocated()
    on_cuda(part * peak)
    right = 0
    for _ in range(4):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                found = torch.autograd.grad(step(*inputs), inputs)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
                del found
                right += 1
            except torch.OutOfMemoryError as error:
                said = str(error)
                assert "mstpass: this is the" in said and "fragmentation" in said
        ours = [text for text in map(str, (w.message for w in told)) if "mstpass" in text]
        assert len(ours) <= 1
        assert torch.cuda.memory_allocated() == held
    assert right >= 1 and len(mstpass.reports()) >= 2
