"""`mstpass bench solvers`: every partition solver on the recorded problems of real models.

Budgets lie between the simulated peak of the free plan (share 1) and the lowest peak that
`peak_search` reaches (share 0). Times are those of the whole step, by the cost model. *Extra* time
is the time beyond the step under `save_all`; it can be negative, because loops save memory traffic.
`milp` gives a lower bound of the time of every plan within a budget, and tells whether it has
proven its plan optimal.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from mstpass.bench import output, problems, tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.solver_rows import Row
from mstpass.bench.tables import Result, Table, Target
from mstpass.errors import require
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.milp import Proof, prove
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import InvalidPlan, verify

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
TIME_LIMIT = 1.02  # relative to the proven optimum
MILP, BASE = "milp", "save_all"
_PROOF_S, _QUICK_PROOF_S = 10.0, 1.0
_QUICK_PROBLEMS, _QUICK_SHARES = 2, (1.0, 0.5)
_DESCRIPTION = """\
Run every partition solver on recorded problems of real models: saved bytes,
simulated peak, extra time, solve time, and the gap to the proven optimum."""
EXAMPLES = """  mstpass bench solvers --csv solvers.csv --plots plots
  mstpass bench solvers --problem llama-8 --problem gpt2-12
  mstpass bench solvers --quick
"""


def run(arguments: Arguments) -> Result:
    if arguments.plots is not None:
        require(("matplotlib",), "bench", "mstpass bench solvers --plots")
    names = list(arguments.problem) or problems.names()
    shares: tuple[float, ...] = SHARES
    proof_s = _PROOF_S
    if arguments.quick:
        names, shares, proof_s = names[:_QUICK_PROBLEMS], _QUICK_SHARES, _QUICK_PROOF_S
    rows: list[Row] = []
    with Progress("solvers", len(names) * len(shares) * len(SOLVERS)) as advance:
        for name in names:
            rows += rows_of(name, problems.load(name), shares, proof_s, advance)
    if arguments.plots is not None:
        from mstpass.bench.plots import draw_plans  # matplotlib is optional

        for name in names:
            own = [row for row in rows if row.problem == name]
            draw_plans(own, arguments.plots / f"{name}.png")
    result = _result(rows, names, proof_s)
    if arguments.csv is not None:
        output.write_csv(arguments.csv, result.records["rows"])
    return result


def rows_of(
    name: str,
    problem: CutProblem,
    shares: Sequence[float] = SHARES,
    proof_s: float = _PROOF_S,
    advance: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """The rows of one problem: each solver at each budget."""
    highest, lowest = (
        _evaluated(problem, SOLVERS[AUTO](problem, budget)).peak_bytes for budget in (None, 0)
    )
    base_us = _evaluated(problem, SOLVERS[BASE](problem, None)).us
    rows = []
    for share in shares:
        budget = int(lowest + share * (highest - lowest))
        start = time.perf_counter()
        proof = prove(problem, budget, proof_s)
        proof_took = time.perf_counter() - start
        for solver, solve in SOLVERS.items():
            start = time.perf_counter()
            found, error = _Evaluated(0, 0, base_us), ""
            try:
                plan = proof.plan if solver == MILP else solve(problem, budget)
                took = proof_took if solver == MILP else time.perf_counter() - start
                found = _evaluated(problem, plan)
            except Exception as exception:  # an error in a user's solver must not end the benchmark
                took, error = 0.0, f"{type(exception).__name__}: {exception}"
            rows.append(_row(name, share, budget, solver, found, base_us, took, proof, error))
            advance(f"{name}, {solver}")
    return rows


@dataclasses.dataclass(frozen=True)
class _Evaluated:
    saved_bytes: int
    peak_bytes: int
    us: float


def _evaluated(problem: CutProblem, plan: Plan) -> _Evaluated:
    """The figures of a plan, after a check that it is valid."""
    unknown = set(plan.modes) - {region.region for region in problem.regions}
    if unknown:
        raise InvalidPlan(f"modes of regions that the problem does not have: {sorted(unknown)}")
    closed = with_modes(problem, plan.modes)
    verify(closed.allowing(recompute_heavy=True), plan.saved, plan.nested)
    step = simulate_plan(problem, plan)
    saved_bytes = sum(value.bytes for value in closed.values if value.name in plan.saved)
    return _Evaluated(saved_bytes, step.peak_bytes, step.us)


def _row(
    name: str,
    share: float,
    budget: int,
    solver: str,
    found: _Evaluated,
    base_us: float,
    solve_s: float,
    proof: Proof,
    error: str,
) -> Row:
    return Row(
        problem=name,
        share=share,
        budget_bytes=budget,
        solver=solver,
        saved_bytes=found.saved_bytes,
        peak_bytes=found.peak_bytes,
        us=found.us,
        extra_us=found.us - base_us,
        solve_s=solve_s,
        bound_us=proof.bound_us,
        proven_us=proof.us if proof.proven else None,
        error=error,
    )


# ---- tables ------------------------------------------------------------------------------------
def _result(rows: list[Row], names: Sequence[str], proof_s: float) -> Result:
    result = Result(
        "solvers", f"{len(SOLVERS)} partition solvers on {len(names)} recorded problems"
    )
    result.tables += [_by_solver(rows), _by_budget(rows)]
    mine = [row for row in rows if row.solver == AUTO]
    for name in names:
        gaps = [row.gap for row in mine if row.problem == name and row.gap is not None]
        if gaps:
            what = f"{name}: {AUTO}, time / proven optimum"
            result.targets.append(Target(what, 1 + max(gaps), TIME_LIMIT))
    proven = sum(row.proven_us is not None for row in mine)
    result.notes += [
        f"milp has {proof_s:.0f} s for each budget, and proves {proven} of {len(mine)} optima. "
        "Without a proof, the true gap lies between the gap to the fastest known plan and the gap "
        "to milp's bound.",
        "Time: of the whole step, by the cost model. Peak: simulated.",
    ]
    result.notes += [f"{r.problem}, {r.solver}: {r.error}" for r in rows if r.error]
    result.records["rows"] = [{**vars(r), "within": r.within, "gap": r.gap} for r in rows]
    return result


def _by_solver(rows: list[Row]) -> Table:
    best = _fastest(rows)
    lines = []
    for solver in dict.fromkeys(row.solver for row in rows):
        own = [row for row in rows if row.solver == solver]
        above = [row.us / best[row.problem, row.share] for row in own if row.within]
        lines.append(
            (
                solver,
                f"{len(above)} of {len(own)}",
                tables.times_cell(statistics.median(above) if above else None),
                tables.times_cell(max(above, default=None)),
                tables.seconds_cell(statistics.median(row.solve_s for row in own)),
                tables.seconds_cell(max(row.solve_s for row in own)),
            )
        )
    columns = ("solver", "within budget", "time / fastest", "worst", "solve s", "longest")
    return Table("plans", columns, tuple(lines))


def _by_budget(rows: list[Row]) -> Table:
    best = _fastest(rows)
    columns = (
        "problem", "share", "budget MiB", "saved MiB", "peak MiB", "extra s", "time / fastest",
        "time / bound", "optimum",
    )  # fmt: skip
    lines = tuple(
        (
            row.problem,
            f"{row.share:.2f}",
            tables.mib_cell(row.budget_bytes),
            tables.mib_cell(row.saved_bytes),
            tables.mib_cell(row.peak_bytes),
            f"{row.extra_us / 1e6:.3f}",
            f"{row.us / best[row.problem, row.share]:.3f}x",
            f"{row.us / row.bound_us:.3f}x" if row.bound_us else "-",
            "-" if row.gap is None else f"+{100 * row.gap:.2f} %",
        )
        for row in rows
        if row.solver == AUTO
    )
    return Table(f"{AUTO}, budget by budget", columns, lines)


def _fastest(rows: list[Row]) -> dict[tuple[str, float], float]:
    """For each problem and share: the least time of a plan within the budget, of any solver."""
    best: dict[tuple[str, float], float] = {}
    for row in rows:
        if row.within:
            key = row.problem, row.share
            best[key] = min(row.us, best.get(key, row.us))
    return best


main = Command("solvers", (run,), _DESCRIPTION, EXAMPLES, extra=("problem", "csv", "plots"))
