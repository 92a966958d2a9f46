"""What must hold of every loop in code for a GPU."""

from __future__ import annotations

from tests.cuda.dry_run import DryRun


def check_lean(run: DryRun) -> None:
    """No loop waits for the GPU, needs a C++ compiler, or makes a second accumulator."""
    assert run.loops
    assert not run.code.failures
    assert "cpp_fused" not in run.text  # Inductor's name for a kernel in C++
    for loop in run.loops:
        assert not loop.syncs, f"{loop.name} waits for the GPU"
        assert loop.device_guards <= 2
        twice = set(loop.temporaries) & run.accumulators
        assert not twice, f"{loop.name} makes a second accumulator in each iteration: {twice}"
