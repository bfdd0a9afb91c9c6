"""The integer program: one option a decision, and for every edge the cost of the pair that its ends chose.

Written with OR-Tools MathOpt and solved by HiGHS. The edge variables y[i, j] have row sums equal to the chosen source
layout and column sums equal to the chosen target layout, which makes the linear relaxation integral on most graphs
(DESIGN section 8). So the LP is solved first, and branching happens only where its answer is fractional.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

#: Seconds that a byte is worth: among assignments equally fast the one that keeps less is taken, so that a plan and the
#: program made from it agree. 10 GB count as 10 us, less than any difference in time that is known.
BYTE_SECONDS = 1e-15

#: HiGHS in this thread alone. It would keep as many threads as half the cores for the next solve, which a forked
#: process does not have and would wait for (HighsTaskExecutor.h). MathOpt's own option for threads it does not take.
_PARAMETERS = mathopt.SolveParameters(highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}))

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Edge:
    """A tensor that flows between two decisions. ``source_class[k]`` is the row of ``cost`` (seconds, inf where there
    is no way) for option k of ``source``, ``target_class`` the column."""

    source: int
    target: int
    source_class: Ints
    target_class: Ints
    cost: Floats


@dataclass
class Program:
    """``seconds[d]`` and ``memory[d]`` are the costs of decision d's options; ``budget`` bytes bound the memory."""

    seconds: list[Floats]
    memory: list[Floats]
    edges: list[Edge]
    budget: float = float("inf")


@dataclass(frozen=True)
class Solution:
    """The chosen option of every decision, its value in seconds, its memory in bytes, and a lower bound on the value
    over the program's space."""

    options: Ints
    value: float
    memory: float
    bound: float
    variables: int
    branched: bool


@dataclass
class _Rows:
    """Nonzeros of the constraint matrix, in pieces."""

    count: int = 0
    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    right: list[Floats] = field(default_factory=list)

    def add(self, rows: Ints, columns: Ints, values: Floats) -> None:
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(values)

    def new(self, right: Floats) -> int:
        first = self.count
        self.count += len(right)
        self.right.append(right)
        return first


def _fold(program: Program) -> tuple[list[Floats], list[Edge]]:
    """Edges with one class on a side, or both ends in one decision, cost as much as an option: no variables needed."""
    seconds = [s + BYTE_SECONDS * m for s, m in zip(program.seconds, program.memory, strict=True)]
    rest = []
    for edge in program.edges:
        if edge.source == edge.target:
            seconds[edge.source] += edge.cost[edge.source_class, edge.target_class]
        elif edge.cost.shape[0] == 1:
            seconds[edge.target] += edge.cost[0, edge.target_class]
        elif edge.cost.shape[1] == 1:
            seconds[edge.source] += edge.cost[edge.source_class, 0]
        elif edge.cost.any():
            rest.append(edge)
    return seconds, rest


def _assemble(program: Program) -> tuple[model_pb2.ModelProto, Ints]:
    """The MathOpt model (all continuous) and the index of each decision's first variable."""
    seconds, edges = _fold(program)
    first = np.concatenate([[0], np.cumsum([len(s) for s in seconds])]).astype(np.int64)
    flat = np.concatenate(seconds)
    cost, upper = [np.where(np.isfinite(flat), flat, 0.0)], [np.where(np.isfinite(flat), 1.0, 0.0)]
    rows = _Rows()
    one = rows.new(np.ones(len(seconds)))
    rows.add(one + np.repeat(np.arange(len(seconds)), np.diff(first)), np.arange(first[-1]), np.ones(first[-1]))
    total = int(first[-1])
    for edge in edges:
        i, j = np.nonzero(np.isfinite(edge.cost))
        y = total + np.arange(len(i))
        total += len(i)
        cost.append(edge.cost[i, j])
        upper.append(np.ones(len(i)))
        for which, classes, decision, side in (
            (i, edge.source_class, edge.source, 0),
            (j, edge.target_class, edge.target, 1),
        ):
            row = rows.new(np.zeros(edge.cost.shape[side]))
            rows.add(row + which, y, np.ones(len(y)))
            rows.add(row + classes, first[decision] + np.arange(len(classes)), -np.ones(len(classes)))
    lower_bound, upper_bound = np.concatenate(rows.right), np.concatenate(rows.right)
    if np.isfinite(program.budget):
        memory = np.concatenate(program.memory)
        scale = max(program.budget, 1.0)
        used = np.nonzero(memory)[0]
        row = rows.new(np.zeros(1))
        rows.add(np.full(len(used), row), used, memory[used] / scale)
        lower_bound = np.append(lower_bound, -np.inf)
        upper_bound = np.append(upper_bound, program.budget / scale)
    return _proto(np.concatenate(cost), np.concatenate(upper), rows, lower_bound, upper_bound), first


def _proto(cost: Floats, upper: Floats, rows: _Rows, lower_bound: Floats, upper_bound: Floats) -> model_pb2.ModelProto:
    """Fill the arrays at once: adding variables one by one takes three times as long."""
    model = model_pb2.ModelProto()
    n = len(cost)
    model.variables.ids.extend(range(n))
    model.variables.lower_bounds.extend(np.zeros(n))
    model.variables.upper_bounds.extend(upper)
    model.variables.integers.extend([False] * n)
    used = np.nonzero(cost)[0]
    # Costs are microseconds to seconds; HiGHS's tolerances are absolute, so the objective is counted in microseconds.
    model.objective.linear_coefficients.ids.extend(used)
    model.objective.linear_coefficients.values.extend(cost[used] * 1e6)
    model.linear_constraints.ids.extend(range(rows.count))
    model.linear_constraints.lower_bounds.extend(lower_bound)
    model.linear_constraints.upper_bounds.extend(upper_bound)
    r, c, v = np.concatenate(rows.rows), np.concatenate(rows.columns), np.concatenate(rows.values)
    order = np.lexsort((c, r))
    model.linear_constraint_matrix.row_ids.extend(r[order])
    model.linear_constraint_matrix.column_ids.extend(c[order])
    model.linear_constraint_matrix.coefficients.extend(v[order])
    return model


def evaluate(program: Program, options: Ints) -> tuple[float, float]:
    """Seconds and bytes of a choice of options."""
    value = sum(float(s[o]) for s, o in zip(program.seconds, options, strict=True))
    for edge in program.edges:
        value += float(edge.cost[edge.source_class[options[edge.source]], edge.target_class[options[edge.target]]])
    return value, sum(float(m[o]) for m, o in zip(program.memory, options, strict=True))


def _run(proto: model_pb2.ModelProto) -> tuple[Floats | None, float]:
    """Values of the variables and the proved bound in seconds; (None, inf) if infeasible."""
    # to read what nobody asks for takes longer than to solve
    wanted = mathopt.ModelSolveParameters(
        variable_values_filter=mathopt.VariableFilter(skip_zero_values=True),
        dual_values_filter=mathopt.LinearConstraintFilter(filtered_items=()),
        reduced_costs_filter=mathopt.VariableFilter(filtered_items=()),
    )
    model = mathopt.Model.from_model_proto(proto)
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=_PARAMETERS, model_params=wanted)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return None, float("inf")
    if reason != mathopt.TerminationReason.OPTIMAL:
        raise RuntimeError(f"HiGHS stopped with {result.termination}")
    values = np.zeros(len(proto.variables.ids))
    for variable, value in result.variable_values().items():
        values[variable.id] = value
    return values, result.termination.objective_bounds.dual_bound / 1e6


def solve(program: Program) -> Solution | None:
    """The cheapest choice of options within the memory budget, or None if there is none."""
    proto, first = _assemble(program)
    values, bound = _run(proto)
    if values is None:
        return None
    decisions = values[: first[-1]]
    branched = bool((np.abs(decisions - np.round(decisions)) > 1e-6).any())
    if branched:
        for i in range(int(first[-1])):
            proto.variables.integers[i] = True
        values, bound = _run(proto)
        if values is None:
            return None
        decisions = values[: first[-1]]
    options = np.array([int(np.argmax(decisions[a:b])) for a, b in itertools.pairwise(first)], dtype=np.int64)
    value, memory = evaluate(program, options)
    bound -= BYTE_SECONDS * sum(float(m.max()) for m in program.memory)
    return Solution(options, value, memory, bound, len(proto.variables.ids), branched)
