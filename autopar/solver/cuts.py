"""Cuts of a row of units into pipeline stages: about even ones in no time, and the best that fit, by OR-Tools.

What counts is the `load` of a cut: the work of the rank that has most, and where every rank has several stages in turn
(interleaved schedules) also how even these are. All ranks work on their k-th stages at about the same time, forwards of
the first ones beside backwards of the last ones, so that those with less of it wait for the one with most.
"""

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

#: What decides between cuts that are about equal counts, beside the work of a rank.
TIE = 0.05

#: A fair cut of which no rank has more than this over the average is not improved.
NEAR = 0.005


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


def load(seconds: Floats, ranks: Sequence[int]) -> float:
    """What a step takes of the stages' ``seconds``, about: the mean of the most that a rank has of all its stages, and
    of the sum of the most that any rank has of its first, second, ... stage. Simulated, a step is between the two.
    Where stages go back and forth between the ranks (V-shaped) the first counts alone. Of equal ones those are better
    whose first, second, ... stages are about equal too, since forwards of some are beside backwards of others; or
    V-shaped, whose longest stage is shorter, which the first micro-batch waits for."""
    of_rank, pp = float(np.bincount(ranks, seconds).max()), max(ranks) + 1
    if not in_rows(ranks):
        return of_rank + TIE * float(seconds.max())
    rows = seconds.reshape(-1, pp).max(1)
    return (of_rank + float(rows.sum())) / 2 + TIE * float(rows.max() - rows.min())


def in_rows(ranks: Sequence[int]) -> bool:
    """Whether the stages of every rank come in the order of the ranks, again and again."""
    pp = max(ranks) + 1
    return len(ranks) > pp and all(rank == s % pp for s, rank in enumerate(ranks))


def fair_cuts(seconds: Floats, ranks: Sequence[int]) -> Ints:
    """The first unit of every stage: `even_cuts`, of which units go one by one from the rank with most work to the one
    with least, as long as the `load` falls."""
    cut, n, own = even_cuts(seconds, len(ranks)), len(seconds), np.asarray(ranks)

    def unfair(cut: Ints) -> tuple[float, float]:
        """Of cuts with the same load, as where several ranks have most, the fairer one is nearer to a better one."""
        of_stage = np.add.reduceat(seconds, cut)
        return load(of_stage, ranks), float((np.bincount(own, of_stage) ** 2).sum())

    while own.any():
        of_rank = np.bincount(own, np.add.reduceat(seconds, cut))
        givers, takers = (np.flatnonzero(own == rank).tolist() for rank in (of_rank.argmax(), of_rank.argmin()))
        sizes = np.diff([*cut, n])
        moves = [_moved(cut, a, b) for a in givers for b in takers if sizes[a] > 1 and a != b]
        best = min(moves, key=unfair, default=cut)
        if unfair(best) >= unfair(cut):
            break
        cut = best
    return cut


def _moved(cut: Ints, giver: int, taker: int) -> Ints:
    """A cut with one unit less in a stage and one more in another; those between keep their number."""
    found = cut.copy()
    if giver < taker:
        found[giver + 1 : taker + 1] -= 1
    else:
        found[taker + 1 : giver + 1] += 1
    return found


@dataclass(frozen=True)
class Units:
    """A row of units: ``seconds`` of a micro-batch, bytes that ``rest`` on a rank, that a micro-batch ``saves``, and
    how many ``more`` it keeps while its backward of weights is put off."""

    seconds: Floats
    rest: Floats
    saves: Floats
    more: Floats


def best_cuts(units: Units, ranks: Sequence[int], held: Floats, late: Floats, budget: float) -> Ints:
    """The first unit of every stage, so that the `load` is least.

    ``ranks`` has the rank of every stage, ``held`` how many micro-batches of it are saved at once, and ``late`` for how
    many of them the backward of weights is put off (`solver.held`); no rank keeps more than ``budget`` bytes if that is
    possible at all, else bytes do not count. A fair cut that fits and leaves next to nothing to gain is taken; others
    are found by CP-SAT: cuts are whole numbers, and what lies between two of them a difference of prefix sums.
    """

    def of(cut: Ints) -> float:
        return load(np.add.reduceat(units.seconds, cut), ranks)

    def keeps(cut: Ints) -> bool:
        rest, saves, more = (np.add.reduceat(x, cut) for x in (units.rest, units.saves, units.more))
        return bool((np.bincount(ranks, rest + held * saves + late * more) <= budget).all())

    fair = fair_cuts(units.seconds, ranks)
    fits = keeps(fair)
    if fits and of(fair) <= units.seconds.sum() / (max(ranks) + 1) * (1 + NEAR):
        return fair
    found = _solved(units, ranks, held, late, budget, fair)
    if found is None and not fits:
        found = _solved(units, ranks, held, late, float("inf"), fair)
    return fair if found is None or (fits and of(fair) <= of(found)) else found


def _solved(
    units: Units, ranks: Sequence[int], held: Floats, late: Floats, budget: float, hint: Ints
) -> Ints | None:
    model, n, count = cp_model.CpModel(), len(units.seconds), len(ranks)
    cuts = [model.new_int_var(s, n - (count - s), f"cut {s}") for s in range(count + 1)]
    model.add(cuts[0] == 0)
    model.add(cuts[-1] == n)
    for s, following in enumerate(cuts[1:]):
        model.add(cuts[s] < following)
        model.add_hint(cuts[s], int(hint[s]))

    def between(values: Floats, scale: float) -> list[cp_model.LinearExpr]:
        """The sum of values in every stage."""
        whole = np.round(_sums(values) * scale).astype(np.int64).tolist()
        at = []
        for cut in cuts:
            one = model.new_int_var(0, whole[-1], "")
            model.add_element(cut, whole, one)
            at.append(one)
        return [b - a for a, b in itertools.pairwise(at)]

    loads, pp = between(units.seconds, SCALE / max(units.seconds.sum(), 1e-30)), max(ranks) + 1
    own = [[s for s, r in enumerate(ranks) if r == rank] for rank in range(pp)]
    of_ranks = [sum(loads[s] for s in stages) for stages in own]
    rows = [loads[s : s + pp] for s in range(0, count, pp)] if in_rows(ranks) else []
    least, *most = (model.new_int_var(0, 2 * SCALE, "limit") for _ in range(3 + len(rows)))
    for group, limit in zip([of_ranks, loads, *rows], most, strict=True):
        for one in group:
            model.add(one <= limit)
    for limit in most[2:]:
        model.add(least <= limit)
        model.add(limit <= most[1])
    if np.isfinite(budget):
        scale = SCALE / budget
        rest, saves = between(units.rest, scale), between(units.saves, scale)
        more = between(units.more, scale) if late.any() and units.more.any() else [0] * count
        for stages in own:
            model.add(sum(rest[s] + int(held[s]) * saves[s] + int(late[s]) * more[s] for s in stages) <= SCALE)
    worth = most[0] + sum(most[2:]) if rows else 2 * most[0]
    model.minimize(worth + 2 * TIE * (most[1] - least if rows else most[1]))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = CUT_SECONDS
    # without relaxations of all constraints bounds may creep by one of SCALE at a time, which no limit counts
    solver.parameters.linearization_level = 2
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([solver.value(cut) for cut in cuts[:-1]], dtype=np.int64)
