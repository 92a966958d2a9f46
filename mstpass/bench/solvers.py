"""Run every partition solver on recorded problems of real models: saved bytes,
simulated peak, extra time, solve time, and the gap to the proven optimum.

Budgets lie between the simulated peak of the free plan (share 1) and the lowest peak that
`peak_search` reaches (share 0). Times are those of the whole step, by the cost model. *Extra* time
is the time beyond the step under `save_all`; it can be negative, because loops save memory traffic.
`milp` gives a lower bound of the time of every plan within a budget, and tells whether it has
proven its plan optimal.

examples:
  mstpass bench solvers --csv solvers.csv --plots plots
  mstpass bench solvers --problem llama-8 --problem gpt2-12
  mstpass bench solvers --quick
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from mstpass.bench import problems, results
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.results import MIB, Result, Table, Target, mib_cell, seconds_cell, times_cell
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.milp import prove
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import InvalidPlan, verify

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
TIME_LIMIT = 1.02  # relative to the proven optimum
MILP, BASE = "milp", "save_all"
_PROOF_S, _QUICK_PROOF_S = 10.0, 1.0
_QUICK_PROBLEMS, _QUICK_SHARES = 2, (1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class Row:
    """One solver's plan for one problem and budget.

    Attributes:
        share: where the budget lies between the lowest peak (0) and the free plan's peak (1).
        us: time of the step by the cost model.
        extra_us: time beyond the step under ``save_all``.
        solve_s: seconds that the solver took.
        bound_us: lower bound of the time of every plan within the budget.
        proven_us: the least time of a plan within the budget; None if it is not proven.
        error: why the solver gave no valid plan; empty if it did.
    """

    problem: str
    share: float
    budget_bytes: int
    solver: str
    saved_bytes: int
    peak_bytes: int
    us: float
    extra_us: float
    solve_s: float
    bound_us: float
    proven_us: float | None
    error: str = ""

    @property
    def within(self) -> bool:
        return not self.error and self.peak_bytes <= self.budget_bytes

    @property
    def gap(self) -> float | None:
        """Time beyond the proven optimum, a fraction. None over the budget or without a proof."""
        return self.us / self.proven_us - 1 if self.proven_us and self.within else None


def run(arguments: Arguments) -> Result:
    names = list(arguments.problem) or problems.names()
    shares: tuple[float, ...] = SHARES
    proof_s = _PROOF_S
    if arguments.quick:
        names, shares, proof_s = names[:_QUICK_PROBLEMS], _QUICK_SHARES, _QUICK_PROOF_S
    rows: list[Row] = []
    with advancing("solvers", len(names) * len(shares) * len(SOLVERS)) as advance:
        for name in names:
            rows += rows_of(name, problems.load(name), shares, proof_s, advance)
    if arguments.plots is not None:
        from mstpass.bench.plots import draw_plans  # matplotlib is optional

        for name in names:
            title = f"{name}: peak against time of a step"
            own = [row for row in rows if row.problem == name]
            draw_plans(title, _series(own), _bounds(own), arguments.plots / f"{name}.png")
    result = _result(rows, names, proof_s)
    if arguments.csv is not None:
        results.write_csv(arguments.csv, result.records["rows"])
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
            row = Row(
                problem=name,
                share=share,
                budget_bytes=budget,
                solver=solver,
                **vars(found),
                extra_us=found.us - base_us,
                solve_s=took,
                bound_us=proof.bound_us,
                proven_us=proof.us if proof.proven else None,
                error=error,
            )
            rows.append(row)
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
        took = [row.solve_s for row in own]
        times = statistics.median(above) if above else None, max(above, default=None)
        seconds = statistics.median(took), max(took)
        within = f"{len(above)} of {len(own)}"
        lines.append((solver, within, *map(times_cell, times), *map(seconds_cell, seconds)))
    columns = ("solver", "within budget", "time / fastest", "worst", "solve s", "longest")
    return Table("plans", columns, tuple(lines))


def _by_budget(rows: list[Row]) -> Table:
    best = _fastest(rows)
    columns: dict[str, Callable[[Row], str]] = {
        "problem": lambda row: row.problem,
        "share": lambda row: f"{row.share:.2f}",
        "budget MiB": lambda row: mib_cell(row.budget_bytes),
        "saved MiB": lambda row: mib_cell(row.saved_bytes),
        "peak MiB": lambda row: mib_cell(row.peak_bytes),
        "extra s": lambda row: f"{row.extra_us / 1e6:.3f}",
        "time / fastest": lambda row: f"{row.us / best[row.problem, row.share]:.3f}x",
        "time / bound": lambda row: f"{row.us / row.bound_us:.3f}x" if row.bound_us else "-",
        "optimum": lambda row: results.text_of(row.gap, lambda gap: f"+{100 * gap:.2f} %"),
    }
    own = (row for row in rows if row.solver == AUTO)
    return Table.of(f"{AUTO}, budget by budget", own, columns)


def _fastest(rows: list[Row]) -> dict[tuple[str, float], float]:
    """For each problem and share: the least time of a plan within the budget, of any solver."""
    best: dict[tuple[str, float], float] = {}
    for row in rows:
        if row.within:
            key = row.problem, row.share
            best[key] = min(row.us, best.get(key, row.us))
    return best


# ---- picture -----------------------------------------------------------------------------------
def _series(rows: list[Row]) -> dict[str, list[tuple[float, float, str]]]:
    """Each solver's plans for one problem: times relative to `save_all`'s, and peaks."""
    points: dict[str, set[tuple[float, float, str]]] = {row.solver: set() for row in rows}
    for row in rows:
        if not row.error:
            points[row.solver].add((row.us / _base_us(rows), row.peak_bytes / MIB, ""))
    return {solver: sorted(each) for solver, each in points.items()}


def _bounds(rows: list[Row]) -> list[tuple[float, float]]:
    """Each budget, and the least time of a plan within it."""
    return sorted({(row.budget_bytes / MIB, row.bound_us / _base_us(rows)) for row in rows})


def _base_us(rows: list[Row]) -> float:
    return rows[0].us - rows[0].extra_us


main = Benchmark("solvers", (run,), __doc__, options=("problem", "csv", "plots"))
