"""Cuts of a row of units into pipeline stages: about even ones in no time, and the best that fit, by OR-Tools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopar.solver.program import Floats, Ints

#: CP-SAT counts whole numbers: seconds and bytes are scaled so that the whole model is this many.
SCALE = 1_000_000

#: Deterministic seconds of CP-SAT, the same on every machine, after which its best cut so far is taken.
CUT_SECONDS = 1.0


def even_cuts(seconds: Floats, count: int) -> Ints:
    """The first unit of each of ``count`` stages in a row, of which the costliest costs about the least: the smallest
    limit that a greedy cut keeps, by bisection. Every stage has a unit."""
    before = _sums(seconds)
    low, high = before[-1] / count, before[-1] / count + float(seconds.max())
    best = _greedy(before, count, high)
    for _ in range(12):
        middle = (low + high) / 2
        cut = _greedy(before, count, middle)
        if cut is None:
            low = middle
        else:
            best, high = cut, middle
    assert best is not None  # a limit that is the average and the largest unit more can always be kept
    return best


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _greedy(before: Floats, count: int, limit: float) -> Ints | None:
    """Stages filled up to ``limit`` seconds, as long as one unit is left for each that follows; None if the last one
    is left with more."""
    n, at, first = len(before) - 1, 0, []
    for stage in range(count):
        first.append(at)
        fitting = int(np.searchsorted(before, before[at] + limit * (1 + 1e-12), side="right")) - 1
        at = min(max(fitting, at + 1), n - (count - stage - 1))
    return np.array(first, dtype=np.int64) if before[-1] - before[first[-1]] <= limit * (1 + 1e-9) else None


@dataclass(frozen=True)
class Units:
    """A row of units: ``seconds`` of a micro-batch, bytes that ``rest`` on a rank, and that a micro-batch ``saves``."""

    seconds: Floats
    rest: Floats
    saves: Floats


def best_cuts(units: Units, ranks: Sequence[int], held: Floats, budget: float) -> Ints:
    """The first unit of every stage, so that the rank with most work has least, and then the stage with most.

    ``ranks`` has the rank of every stage, ``held`` by rank how many micro-batches of its stages it holds at once; no
    rank keeps more than ``budget`` bytes if that is possible at all, else bytes do not count. Found by CP-SAT: cuts are
    whole numbers, and what lies between two of them a difference of prefix sums.
    """
    even = even_cuts(units.seconds, len(ranks))
    found = _solved(units, ranks, held, budget, even)
    if found is None and np.isfinite(budget):
        found = _solved(units, ranks, held, float("inf"), even)
    return even if found is None else found


def _solved(units: Units, ranks: Sequence[int], held: Floats, budget: float, even: Ints) -> Ints | None:
    model, n, count = cp_model.CpModel(), len(units.seconds), len(ranks)
    cuts = [model.new_int_var(s, n - (count - s), f"cut {s}") for s in range(count + 1)]
    model.add(cuts[0] == 0)
    model.add(cuts[-1] == n)
    for s, following in enumerate(cuts[1:]):
        model.add(cuts[s] < following)
        model.add_hint(cuts[s], int(even[s]))

    def between(values: Floats, scale: float) -> list[cp_model.LinearExpr]:
        """The sum of values in every stage."""
        whole = np.round(_sums(values) * scale).astype(np.int64).tolist()
        at = []
        for cut in cuts:
            one = model.new_int_var(0, whole[-1], "")
            model.add_element(cut, whole, one)
            at.append(one)
        return [b - a for a, b in itertools.pairwise(at)]

    loads = between(units.seconds, SCALE / max(units.seconds.sum(), 1e-30))
    most_of_rank, most_of_stage = model.new_int_var(0, 2 * SCALE, "rank"), model.new_int_var(0, 2 * SCALE, "stage")
    own = [[s for s, r in enumerate(ranks) if r == rank] for rank in range(max(ranks) + 1)]
    for stages in own:
        model.add(sum(loads[s] for s in stages) <= most_of_rank)
    for load in loads:
        model.add(load <= most_of_stage)
    if np.isfinite(budget):
        scale = SCALE / budget
        rest, saves = between(units.rest, scale), between(units.saves, scale)
        for rank, stages in enumerate(own):
            # in hundredths of a micro-batch: interleaved schedules hold fractions
            times = int(np.ceil(100 * held[rank]))
            model.add(sum(100 * rest[s] + times * saves[s] for s in stages) <= 100 * SCALE)
    model.minimize(4 * SCALE * most_of_rank + most_of_stage)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = CUT_SECONDS
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([solver.value(cut) for cut in cuts[:-1]], dtype=np.int64)
