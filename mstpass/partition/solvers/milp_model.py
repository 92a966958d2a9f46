"""The choice of modes and saved values as a mixed-integer program: its variables and its rows.

An op that a mode replaces by a loop has several *variants*: as traced, and one for each mode. Each
variant v has three variables: ``f[v]``, computed in forward; ``b[v]``, computed in backward;
``s[v]``, crosses from one to the other. ``y[r, m]`` says that region r runs in mode m. Over an op's
name, F, B and S are the sums over its variants; a free value counts as there in backward::

    sum of y[r, m] over m     =  1                    for each region
    f[v], b[v]  <=  whether v's mode is on            (as traced: that no mode replaces it)
    f[v]        <=  F[i]                              for each input i of v
    b[v]        <=  B[i] + S[i] + free[i]             for each input i of v
    s[v]        <=  f[v]
    F[o]        >=  1                                 for each output
    B[g] + S[g] + free[g]  >=  1                      for each gradient
    b[v]         =  0                                 where v is pinned and needs no tangent
    s[v]         =  0                                 where v may not be saved

    time = sum of us[v] (f[v] + b[v])

Only s and y are integers: given them, the least f and b are the ops that the schedule runs
(simulate.py), whose time is ``step_us``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mstpass.problem.apply_modes import loop_values
from mstpass.problem.op import INPUT
from mstpass.problem.problem import CutProblem, Plan, Value

Row = dict[int, float]  # coefficients by variable
_NO_LIMIT = float("inf")


@dataclasses.dataclass(frozen=True)
class Solution:
    """What HiGHS found: the variables, or None; and what no solution is below."""

    x: Any
    bound: float
    optimal: bool
    infeasible: bool


@dataclasses.dataclass(frozen=True)
class _Variant:
    """An op, the mode that it belongs to (none: as traced), and its variables."""

    value: Value
    mode: int | None
    f: int
    b: int
    s: int


class Program:
    """The program of one problem; rows can be added, and it can be solved again."""

    def __init__(self, problem: CutProblem):
        self.problem = problem
        self.costs: list[float] = []
        self.upper: list[float] = []
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
    def _variable(self, cost: float = 0.0, upper: bool = True, integral: bool = False) -> int:
        self.costs.append(cost)
        self.upper.append(float(upper))
        self.integral.append(integral)
        return len(self.costs) - 1

    def _make_variants(self) -> None:
        found = list(self._values())
        late = _needing_tangents([value for value, _ in found], self.problem)
        tangents = {value.name for value in self.problem.backward if not value.inputs}
        for value, mode in found:
            savable = value.savable and not value.free and value.kind != INPUT
            again = not value.free and (value.name in late or not value.pinned)
            variant = _Variant(
                value,
                mode,
                f=self._variable(value.us, upper=value.name not in tangents),
                b=self._variable(value.us, upper=again),
                s=self._variable(upper=savable, integral=savable),
            )
            self.variants.setdefault(value.name, []).append(variant)

    def _values(self) -> Iterator[tuple[Value, int | None]]:
        old = {v.name: v for v in (*self.problem.values, *self.problem.backward)}
        for value in old.values():
            yield value, None
        for region in self.problem.regions:
            for mode in region.modes:
                for loop in mode.loops:
                    after = [r.finished(old[r.node]) for r in loop.results if r.name != r.node]
                    for value in (*loop_values(loop, old), *after):
                        yield value, self.mode[region.region, mode.name]

    # ---- rows ------------------------------------------------------------------------------------
    def _make_rows(self) -> None:
        replaced = self._replaced()
        for variants in self.variants.values():
            for variant in variants:
                if variant.mode is not None:
                    self._add_limit(variant, {variant.mode: 1.0}, 0.0)
                elif variant.value.name in replaced:
                    self._add_limit(variant, replaced[variant.value.name], 1.0)
                self._add_needs(variant)
        for region in self.problem.regions:
            self.add({self.mode[region.region, m.name]: 1.0 for m in region.modes}, 1.0, 1.0)
        for name in self.problem.outputs:
            self.add(self.computed(name), 1.0)
        for name in self.problem.gradients:
            if name not in self.free:
                self.add(self.available(name), 1.0)

    def _replaced(self) -> dict[str, Row]:
        """By node, minus the modes in which a loop has its result."""
        rows: dict[str, Row] = {}
        for region in self.problem.regions:
            for mode in region.modes:
                for loop in mode.loops:
                    for result in loop.results:
                        row = rows.setdefault(result.node, {})
                        row[self.mode[region.region, mode.name]] = -1.0
        return rows

    def _add_limit(self, variant: _Variant, on: Row, constant: float) -> None:
        for variable in (variant.f, variant.b):
            self.add({variable: -1.0, **on}, -constant)

    def _add_needs(self, variant: _Variant) -> None:
        self.add({variant.f: 1.0, variant.s: -1.0}, 0.0)
        for name in dict.fromkeys(variant.value.inputs):
            self.add({**self.computed(name), variant.f: -1.0}, 0.0)
            if name not in self.free:
                self.add({**self.available(name), variant.b: -1.0}, 0.0)

    def computed(self, name: str) -> Row:
        """F: in forward."""
        return {variant.f: 1.0 for variant in self.variants[name]}

    def again(self, name: str) -> Row:
        """B: computed in backward."""
        return {variant.b: 1.0 for variant in self.variants[name]}

    def saved(self, name: str) -> Row:
        """S: crosses."""
        return {variant.s: 1.0 for variant in self.variants[name]}

    def available(self, name: str) -> Row:
        """B + S."""
        return {**self.again(name), **self.saved(name)}

    def add(self, row: Row, least: float, most: float = _NO_LIMIT) -> None:
        self.rows.append((row, least, most))

    # ---- objectives and solutions ----------------------------------------------------------------
    def time(self) -> Row:
        return {i: cost for i, cost in enumerate(self.costs) if cost}

    def saved_bytes(self) -> Row:
        return {
            variant.s: float(variant.value.bytes)
            for variants in self.variants.values()
            for variant in variants
        }

    def plan(self, x: Any) -> Plan:
        saved = {
            name
            for name, variants in self.variants.items()
            if any(x[variant.s] > 0.5 for variant in variants)
        }
        modes = {region: name for (region, name), y in self.mode.items() if x[y] > 0.5}
        return Plan(frozenset(saved), modes)

    def exclude(self, x: Any) -> None:
        """Any choice but this one."""
        ones = [i for i, integral in enumerate(self.integral) if integral and x[i] > 0.5]
        row = {i: 1.0 for i, integral in enumerate(self.integral) if integral}
        row.update(dict.fromkeys(ones, -1.0))
        self.add(row, 1.0 - len(ones))

    def solve(self, objective: Row, time_limit_s: float) -> Solution:
        """The least objective, by HiGHS (Huangfu and Hall, 2018) through scipy."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost = np.zeros(len(self.costs))
        cost[list(objective)] = list(objective.values())
        starts = np.cumsum([0, *(len(row) for row, _, _ in self.rows)])
        columns = np.array([i for row, _, _ in self.rows for i in row])
        entries = np.array([c for row, _, _ in self.rows for c in row.values()])
        shape = (len(self.rows), len(cost))
        rows = csr_array((entries, columns, starts), shape=shape)
        least, most = ([row[k] for row in self.rows] for k in (1, 2))
        found = milp(
            cost,
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(rows, least, most),
            options={"time_limit": max(0.01, time_limit_s), "mip_rel_gap": 1e-7},
        )
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
        # every variable has bounds, so "infeasible or unbounded" (4) is the former
        infeasible = found.status == 2 or "nfeasible or unbounded" in found.message
        return Solution(found.x, float(bound), found.status == 0, infeasible)


def _needing_tangents(values: list[Value], problem: CutProblem) -> set[str]:
    """What may depend on a tangent, in some mode."""
    users: dict[str, list[str]] = {}
    for value in values:
        for name in value.inputs:
            users.setdefault(name, []).append(value.name)
    stack = [value.name for value in problem.backward if not value.inputs]
    found = set(stack)
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in found:
                found.add(user)
                stack.append(user)
    return found
