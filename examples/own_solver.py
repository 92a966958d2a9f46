"""Your own partition solver in ten lines, on a recorded problem and through torch.compile.

The solver saves the largest values that the backward reads, until half of their bytes are saved. It
leaves the other values to be recomputed. `mstpass bench solvers` compares it with all others.

    python examples/own_solver.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass.bench import problems, solvers
from mstpass.bench.solvers import Row
from mstpass.partition.solvers.choose_modes import first_modes
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import saved_where


def largest_half(problem: CutProblem, budget_bytes: int | None) -> Plan:
    modes = first_modes(problem)  # which loops there are
    closed = with_modes(problem, modes)  # the step with them
    size = {value.name: value.bytes for value in closed.values}
    everything = saved_where(closed, lambda value: value.forward)
    kept, left = set[str](), sum(size[name] for name in everything) / 2
    for name in sorted(everything, key=lambda name: -size[name]):
        if left > 0:
            kept, left = kept | {name}, left - size[name]
    return Plan(saved_where(closed, lambda value: value.name in kept), modes)


mstpass.register_solver("largest_half", largest_half)


def bench() -> list[Row]:
    """Compare the solver with all others on one recorded problem, at two budgets."""
    rows = solvers.rows_of("mlps-2", problems.load("mlps-2"), shares=(1.0, 0.5), proof_s=1.0)
    print(f"{'budget MiB':>10} {'solver':14} {'saved MiB':>9} {'peak MiB':>9} {'extra s':>8}")
    for row in rows:
        sizes = [size / 2**20 for size in (row.budget_bytes, row.saved_bytes, row.peak_bytes)]
        print(
            f"{sizes[0]:10.0f} {row.solver:14} {sizes[1]:9.1f} {sizes[2]:9.1f} "
            f"{row.extra_us / 1e6:8.3f}"
        )
    return rows


def step(x_TD: Tensor, up_LD: Tensor, down_DL: Tensor) -> Tensor:
    h_TD = F.silu(x_TD @ up_LD.t()) @ down_DL.t()
    return (F.silu(h_TD @ up_LD.t()) @ down_DL.t()).square().mean()


def train_step() -> tuple[float, mstpass.Report]:
    """The largest difference of a gradient to that of eager, and the report."""
    torch.manual_seed(0)
    leaves = [torch.randn(512, 64), torch.randn(256, 64) / 8, torch.randn(64, 256) / 16]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    right = torch.autograd.grad(step(*leaves), leaves)
    found = torch.autograd.grad(
        torch.compile(step, backend="mst", options={"solver": "largest_half", "strict": True})(
            *leaves
        ),
        leaves,
    )
    report = mstpass.reports()[-1]
    print(report)
    return max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True)), report


def main() -> tuple[list[Row], float, mstpass.Report]:
    return bench(), *train_step()


if __name__ == "__main__":
    main()
