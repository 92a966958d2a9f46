"""`mstpass plan`: the caching allocator, replayed training loops, and the events of a step."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="mstpass[hf]")


from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.planner.allocator import (
    CachingAllocator,
    Event,
    OptimizerStep,
    OutOfMemory,
    Resident,
    needed_bytes,
)
from mstpass.planner.compiled_step import CompiledStep
from mstpass.planner.eager_rows import checkpointed, minisequence, plain
from mstpass.planner.eager_step import eager_step
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.plan import plan
from mstpass.planner.request import CACHING, CHECKPOINT, EAGER, MST, Request
from mstpass.planner.traced_step import trace
from mstpass.planner.training import Training, fixed
from mstpass.torch_internals.fake_tensors import FakeTensorMode

MIB = 1 << 20
NOTHING = Resident((), (), ())


# ---- the allocator -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_segments_have_the_allocators_sizes(size, reserved):
    """c10/cuda/CUDACachingAllocator.cpp, get_allocation_size."""
    allocator = CachingAllocator(64 * MIB)
    allocator.allocate("a", size)
    assert allocator.reserved_bytes == reserved * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator(200 * MIB)
    for name, mib in (("large", 60), ("middle", 40), ("small", 30)):
        allocator.allocate(name, mib * MIB)
    allocator.free("large")
    allocator.free("middle")
    allocator.allocate("new", 36 * MIB)  # in the middle one, which leaves 4 MiB
    allocator.allocate("newer", 4 * MIB)
    allocator.allocate("newest", 60 * MIB)
    assert allocator.reserved_bytes == 130 * MIB


def test_neighbours_that_are_free_become_one():
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate("whole", 90 * MIB)
    allocator.free("whole")
    for name in "abc":
        allocator.allocate(name, 30 * MIB)
    for name in "acb":
        allocator.free(name)
    allocator.allocate("whole", 90 * MIB)
    assert allocator.peak_reserved_bytes == 90 * MIB


def test_a_small_tensor_holds_a_segment_that_is_of_no_use():
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate("wide", 60 * MIB)
    allocator.free("wide")
    allocator.allocate("narrow", 10 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate("wider", 61 * MIB)  # 90 MiB are free
    allocator.free("narrow")
    allocator.allocate("wider", 61 * MIB)  # now the segment goes back


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40 * MIB)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(steps):
    allocator, alive = CachingAllocator(160 * MIB), {}
    for name, size in steps:
        if name in alive:
            allocator.free(name)
            del alive[name]
            continue
        try:
            allocator.allocate(name, size)
        except OutOfMemory:
            continue
        alive[name] = size
        parts = sorted(
            [(b.segment, b.offset, b.size) for b in allocator._blocks.values()]
            + [(b.segment, b.offset, b.size) for free in allocator._free.values() for b in free]
        )
        assert sum(size for _, _, size in parts) == allocator.reserved_bytes <= allocator.capacity
        for (one, start, length), (other, behind, _) in itertools.pairwise(parts):
            assert one != other or start + length == behind
        assert all(allocator._blocks[n].size >= size for n, size in alive.items())
    for name in alive:
        allocator.free(name)
    allocator.allocate("all", 160 * MIB)  # every other segment goes back


# ---- loops -------------------------------------------------------------------------------------
def test_a_loop_needs_what_is_there_at_once():
    events = [Event("x", 30 * MIB), Event("y", 20 * MIB), Event("x", None)]
    resident = Resident((10 * MIB,), (0,), (10 * MIB,), gathered=10 * MIB)
    assert needed_bytes(events, NOTHING, 1 << 40) == 50 * MIB
    assert needed_bytes(events, resident, 1 << 40) == 70 * MIB


def test_states_settle_where_activations_were():
    """They are made in the first step: from the second on its blocks are too small."""
    events = [Event("x", 40 * MIB), Event("x", None)]
    assert needed_bytes(events, Resident((), (12 * MIB,), (0,)), 1 << 40) == 80 * MIB
    assert needed_bytes(events, Resident((12 * MIB,), (), ()), 1 << 40) == 52 * MIB


def test_a_step_in_backward_makes_way_for_the_next():
    gradients = [(Event(i, 20 * MIB), OptimizerStep(i), Event(i, None)) for i in range(3)]
    resident = Resident((20 * MIB,) * 3, (0,) * 3, (20 * MIB,) * 3)
    in_backward = [event for events in gradients for event in events]
    at_the_end = [event for event in in_backward if isinstance(event, Event) and event.bytes]
    assert needed_bytes(in_backward, resident, 1 << 40) == 100 * MIB
    assert needed_bytes(at_the_end, resident, 1 << 40) == 180 * MIB


# ---- the order of a step -----------------------------------------------------------------------
def most_alive(events):
    alive, most = {}, 0
    for event in events:
        if isinstance(event, Event):
            if event.bytes is None:
                del alive[event.key]
            else:
                assert event.key not in alive
                alive[event.key] = event.bytes
        most = max(most, sum(alive.values()))
    return most


@pytest.mark.parametrize("recipe", [plain, checkpointed, minisequence])
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_eager_steps_order_has_its_peak(tiny, recipe, in_backward):
    training = Training(optimizer_in_backward=in_backward)
    step = eager_step(config_of(tiny), training, recipe, 2048)
    assert most_alive(step.events) == step.parts.total
    steps = [event for event in step.events if isinstance(event, OptimizerStep)]
    assert len(steps) == (len(parameters(tiny)) if in_backward else 0)


@pytest.mark.parametrize("budget", [pytest.param("free", marks=pytest.mark.full), 0.0])
def test_a_compiled_steps_order_has_its_peak(tiny, budget):
    traced = trace(config_of(tiny), Training(), 4096, (budget,))
    problem = traced.problem_at(traced.length, budget)
    found = SOLVERS[AUTO](problem, 0 if budget == 0.0 else None)
    step = CompiledStep(traced, problem, found)
    assert most_alive(step.events) == step.parts.total == step._simulation.peak_bytes
    assert len([e for e in step.events if e.bytes is None]) > 20


# ---- plans -------------------------------------------------------------------------------------
def test_the_peak_that_was_published_for_mini_sequences():
    """74.807 GiB allocated at 8192 tokens, by the notebook in its authors' repository."""
    config = config_of("llama3-8b")
    training = Training(optimizer="adamw-bf16", optimizer_step="foreach")
    with FakeTensorMode():
        sizes = sizes_of(build(config, training))
    step = eager_step(config, training, minisequence, 8192)
    at_end = (2 + training.temporary_bytes) * sizes.parameters
    assert step.parts.total < at_end
    total = fixed(sizes, training).total + at_end
    assert total / 2**30 == pytest.approx(74.807, rel=0.001)


@pytest.mark.usefixtures("one_cublas_workspace")
@pytest.mark.full
def test_gaps_make_sequences_shorter(tiny):
    ask = functools.partial(asked, tiny, 32)
    without, caching = plan(ask()), plan(ask(allocator=CACHING))
    for one, other in zip(without.rows, caching.rows, strict=True):
        assert 0.3 * one.length < other.length < one.length, other.name
        assert other.fits and other.parts.gaps > 0 == one.parts.gaps
        assert other.total_bytes <= 32 * MIB
    longer = plan(ask(allocator=CACHING, length=without.rows[0].length)).rows[0]
    assert longer.name == EAGER and not longer.fits and longer.total_bytes > 32 * MIB


@pytest.mark.usefixtures("one_cublas_workspace")
def test_an_optimizers_step_can_be_the_peak(tiny):
    training = {"optimizer": "adamw", "optimizer_step": "foreach"}
    rows = {row.name: row for row in plan(asked(tiny, 64, training, length=16)).rows}
    numel = sum(parameters(tiny))
    for name in (EAGER, CHECKPOINT, MST):
        assert rows[name].parts.temporaries == 4 * numel
        assert rows[name].parts.gradients == 2 * numel and rows[name].parts.saved == 0


@pytest.mark.usefixtures("one_cublas_workspace")
@pytest.mark.full
def test_padding_is_skipped_by_attention(tiny):
    def padded(document):
        return {"document": document, "attention": "flash"}

    saved = [
        eager_step(
            config_of(tiny), Training(document=n, attention="flash"), plain, 2048
        ).parts.saved
        for n in (None, 2048, 64)
    ]
    assert saved[0] == saved[1] > 1.05 * saved[2]
    own = [plan(asked(tiny, 64, padded(n), alone=True)).own for n in (None, 64)]
    assert own[1].fits and own[1].length >= own[0].length


def parameters(path):
    with FakeTensorMode():
        return [p.numel() for p in build(config_of(path), Training()).parameters()]


def asked(model, mib, training=None, **rest):
    return Request(model, Training(**(training or {})), mib * MIB, 0, **rest)
