"""The partition problem as a mixed-integer linear program (MILP): its variables and its rows.

An op that modes replace by loops has several *variants*: the op as traced, and one per mode that
writes it. Each variant v has three variables of value 0 or 1, and each region r and mode m one:

    f[v]     the forward computes v
    b[v]     the backward computes v
    s[v]     v crosses from forward to backward
    y[r, m]  region r runs in mode m

F, B and S of a name are the sums over its variants. free[i] is 1 for a value that is available in
backward at no cost. The rows::

    sum of y[r, m] over m     =  1                  for each region
    f[v], b[v]  <=  y of the mode of v              for a variant of a mode
    f[v], b[v]  <=  1 - sum of y that replace v     for an op as traced
    f[v]        <=  F[i]                            for each input i of v
    b[v]        <=  B[i] + S[i] + free[i]           for each input i of v: recomputed, saved or free
    s[v]        <=  f[v]
    F[o]        >=  1                               for each output o
    B[g] + S[g] + free[g]  >=  1                    for each gradient g
    b[v]         =  0                               where v is pinned and needs no tangent
    s[v]         =  0                               where v may not be saved

The time of the step is the sum of us[v] (f[v] + b[v]).

Only s and y are declared integers. For given s and y, the smallest f and b are the ops that the
step runs (memory/simulate_plan.py), and their time is ``step_us``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mstpass.problem.apply_modes import loop_values, prelude_values
from mstpass.problem.op import INPUT
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.walk import walk_once

Row = dict[int, float]  # the coefficient of each variable, by the variable's number
_NO_LIMIT = float("inf")
_RELATIVE_GAP = 1e-7  # at which HiGHS calls a solution optimal


@dataclasses.dataclass(frozen=True)
class Solution:
    """What HiGHS found.

    Attributes:
        x: the value of each variable; None if no solution was found.
        bound: no solution has a lower objective.
        optimal: x is proven to be optimal.
        infeasible: no solution exists.
    """

    x: Any
    bound: float
    optimal: bool
    infeasible: bool


@dataclasses.dataclass(frozen=True)
class _Variant:
    """One way to compute a value, with the numbers of its variables.

    Attributes:
        mode: the number of the variable of its mode; None for an op as traced.
    """

    value: Value
    mode: int | None
    f: int
    b: int
    s: int


class Model:
    """The program of one problem. Rows can be added, and it can be solved again."""

    def __init__(self, problem: CutProblem):
        self.problem = problem
        self.us: list[float] = []  # by variable: its part of the step's time
        self.upper: list[float] = []  # by variable: its upper bound, 0 or 1
        self.integral: list[bool] = []
        self.rows: list[tuple[Row, float, float]] = []  # least <= row <= most
        self.mode = {
            (region.region, mode.name): self._variable(integral=True)
            for region in problem.regions
            for mode in region.modes
        }
        self.free = {value.name for value in problem.values if value.free}
        self.variants: dict[str, list[_Variant]] = {}
        self._make_variants()
        self._make_rows()

    # ---- variables -------------------------------------------------------------------------------
    def _variable(self, us: float = 0.0, upper: bool = True, integral: bool = False) -> int:
        self.us.append(us)
        self.upper.append(float(upper))
        self.integral.append(integral)
        return len(self.us) - 1

    def _make_variants(self) -> None:
        found = list(self._values_with_modes())
        after_tangent = _depending_on_tangents([value for value, _ in found], self.problem)
        tangents = {value.name for value in self.problem.backward if not value.inputs}
        for value, mode in found:
            savable = value.savable and not value.free and value.kind != INPUT
            in_backward = not value.free and (value.name in after_tangent or not value.pinned)
            variant = _Variant(
                value,
                mode,
                f=self._variable(value.us, upper=value.name not in tangents),
                b=self._variable(value.us, upper=in_backward),
                s=self._variable(upper=savable, integral=savable),
            )
            self.variants.setdefault(value.name, []).append(variant)

    def _values_with_modes(self) -> Iterator[tuple[Value, int | None]]:
        """The ops as traced, and the loops and results of each mode with the mode's variable."""
        traced = {v.name: v for v in (*self.problem.values, *self.problem.backward)}
        for value in traced.values():
            yield value, None
        for region in self.problem.regions:
            for mode in region.modes:
                for loop in mode.loops:
                    finished = [
                        r.finished(traced[r.node]) for r in loop.results if r.name != r.node
                    ]
                    before = prelude_values(loop, traced)
                    for value in (*before, *loop_values(loop, traced), *finished):
                        yield value, self.mode[region.region, mode.name]

    # ---- rows ------------------------------------------------------------------------------------
    def _make_rows(self) -> None:
        replaced = self._replacing_modes()
        for variants in self.variants.values():
            for variant in variants:
                if variant.mode is not None:
                    self._add_limit(variant, {variant.mode: 1.0}, 0.0)
                elif variant.value.name in replaced:
                    self._add_limit(variant, replaced[variant.value.name], 1.0)
                self._add_inputs(variant)
        for region in self.problem.regions:
            self.add({self.mode[region.region, m.name]: 1.0 for m in region.modes}, 1.0, 1.0)
        for name in self.problem.outputs:
            self.add(self.computed_in_forward(name), 1.0)
        for name in self.problem.gradients:
            if name not in self.free:
                self.add(self._in_backward(name), 1.0)

    def _replacing_modes(self) -> dict[str, Row]:
        """For each node that a loop returns, minus the sum of the modes with such a loop."""
        rows: dict[str, Row] = {}
        for region in self.problem.regions:
            for mode in region.modes:
                for loop in mode.loops:
                    for result in loop.results:
                        row = rows.setdefault(result.node, {})
                        row[self.mode[region.region, mode.name]] = -1.0
        return rows

    def _add_limit(self, variant: _Variant, row: Row, constant: float) -> None:
        """f[v], b[v] <= row + constant."""
        for variable in (variant.f, variant.b):
            self.add({variable: -1.0, **row}, -constant)

    def _add_inputs(self, variant: _Variant) -> None:
        """The rows that tie a variant to its own s, and to its inputs."""
        self.add({variant.f: 1.0, variant.s: -1.0}, 0.0)
        for name in dict.fromkeys(variant.value.inputs):
            self.add({**self.computed_in_forward(name), variant.f: -1.0}, 0.0)
            if name not in self.free:
                self.add({**self._in_backward(name), variant.b: -1.0}, 0.0)

    def computed_in_forward(self, name: str) -> Row:
        """F of a name."""
        return {variant.f: 1.0 for variant in self.variants[name]}

    def computed_in_backward(self, name: str) -> Row:
        """B of a name."""
        return {variant.b: 1.0 for variant in self.variants[name]}

    def saved(self, name: str) -> Row:
        """S of a name."""
        return {variant.s: 1.0 for variant in self.variants[name]}

    def _in_backward(self, name: str) -> Row:
        """B + S of a name."""
        return {**self.computed_in_backward(name), **self.saved(name)}

    def add(self, row: Row, least: float, most: float = _NO_LIMIT) -> None:
        """Add the constraint ``least <= row <= most``."""
        self.rows.append((row, least, most))

    # ---- objectives and solutions ----------------------------------------------------------------
    def time(self) -> Row:
        """The time of the step, in microseconds."""
        return {i: us for i, us in enumerate(self.us) if us}

    def saved_bytes(self) -> Row:
        """The bytes that cross."""
        return {
            variant.s: float(variant.value.bytes)
            for variants in self.variants.values()
            for variant in variants
        }

    def plan(self, x: Any) -> Plan:
        """The plan that a solution stands for."""
        saved = {
            name
            for name, variants in self.variants.items()
            if any(x[variant.s] > 0.5 for variant in variants)
        }
        modes = {region: name for (region, name), y in self.mode.items() if x[y] > 0.5}
        return Plan(frozenset(saved), modes)

    def exclude(self, x: Any) -> None:
        """Add a row that excludes exactly this choice of the integer variables."""
        ones = [i for i, integral in enumerate(self.integral) if integral and x[i] > 0.5]
        row = {i: 1.0 for i, integral in enumerate(self.integral) if integral}
        row.update(dict.fromkeys(ones, -1.0))
        self.add(row, 1.0 - len(ones))

    def solve(self, objective: Row, time_limit_s: float) -> Solution:
        """Minimize an objective by HiGHS (Huangfu and Hall, 2018), through scipy."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost = np.zeros(len(self.us))
        cost[list(objective)] = list(objective.values())
        starts = np.cumsum([0, *(len(row) for row, _, _ in self.rows)])
        columns = np.array([i for row, _, _ in self.rows for i in row])
        entries = np.array([c for row, _, _ in self.rows for c in row.values()])
        matrix = csr_array((entries, columns, starts), shape=(len(self.rows), len(cost)))
        least, most = ([row[k] for row in self.rows] for k in (1, 2))
        found = milp(
            cost,
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, least, most),
            options={"time_limit": max(0.01, time_limit_s), "mip_rel_gap": _RELATIVE_GAP},
        )
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
        # Every variable has bounds, so "infeasible or unbounded" (status 4) means infeasible.
        infeasible = found.status == 2 or "nfeasible or unbounded" in found.message
        return Solution(found.x, float(bound), found.status == 0, infeasible)


def _depending_on_tangents(values: list[Value], problem: CutProblem) -> set[str]:
    """Names of the values that depend on a tangent, in one of their variants."""
    users: dict[str, list[str]] = {}
    for value in values:
        for name in value.inputs:
            users.setdefault(name, []).append(value.name)
    tangents = (value.name for value in problem.backward if not value.inputs)
    return set(walk_once(tangents, lambda name: users.get(name, ())))
