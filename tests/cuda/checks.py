"""What must hold of code for a GPU, and of every loop in it."""

from __future__ import annotations

from tests.cuda.dry_run import DryRun
from tests.cuda.generated_code import unused_buffers


def check_lean(run: DryRun) -> None:
    """No loop waits for the GPU, needs a C++ compiler, or makes a second accumulator.

    And no kernel is given memory that it does not touch.
    """
    assert run.loops
    assert not run.code.failures
    assert "cpp_fused" not in run.text  # Inductor's name for a kernel in C++
    assert not unused_buffers(run.text)
    for loop in run.loops:
        assert not loop.syncs, f"{loop.name} waits for the GPU"
        assert loop.device_guards <= 2
        twice = set(loop.temporaries) & run.accumulators
        assert not twice, f"{loop.name} makes a second accumulator in each iteration: {twice}"
