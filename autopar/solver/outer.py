"""The outer search: which degrees, ZeRO, micro-batches, schedule and recomputation, over all that a cluster allows.

Every replica (cp x tp ranks) that may be worth it is solved once and profiled, all candidates are estimated from the
profiles (`solver.estimates`), and the best few, of different degrees and then of the best degrees, are solved, laid out
in stages and simulated (`solver.attempt`). The fastest that fits wins. Where there are cores, others solve what comes
next meanwhile (`solver.ahead`).
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from autopar.report.progress import Progress
from autopar.sharding.axes import NOWHERE
from autopar.solver.ahead import Ahead
from autopar.solver.attempt import Attempt, Found, attempt, keep, least, recall
from autopar.solver.candidates import Candidate, Degrees
from autopar.solver.estimate import Estimate
from autopar.solver.estimates import Estimates
from autopar.solver.frame import Frame

#: How many degrees are solved and simulated, and how many candidates of the best of them.
DEGREES_SOLVED, VARIANTS_SOLVED = 8, 8

#: How many candidates of one degree are solved until one fits, and how many to find the one that needs least.
TRIES, SMALLEST_SOLVED = 4, 16

#: What is estimated to need this many times the memory that there is does not fit, however its operators are split:
#: estimates are of the fastest way, and the leanest needs somewhat less.
HOPELESS = 2.0

#: Of what estimates of small plans have been too high by, what the others are taken to be too high by at most.
SURE = 0.85

#: Candidates that are estimated to take this much longer than the best plan so far are not solved.
WORTH = 1.1

#: A plan that an ordinary training loop runs (no pipeline) is taken unless a pipeline saves more than this.
ORDINARY = 0.02


class Solver:
    """Solves candidates in the order in which they are worth it, for at most ``seconds`` once there is a plan."""

    def __init__(self, frame: Frame, estimates: Estimates, seconds: float | None, line: Progress) -> None:
        self.frame, self.estimates, self.line = frame, estimates, line
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.found: list[Found] = []
        self.tried: set[tuple[Candidate, str]] = set()
        #: By kind of candidate, what the last one took over its estimate.
        self.errors: dict[tuple[object, ...], float] = {}

    def run(self, every: Sequence[Estimate]) -> None:
        """Solve the best candidates of the best degrees, then more of the degrees that turned out best, and there at
        last ZeRO parameter by parameter. Only what is estimated to fit counts: the fastest of all often do not."""
        fitting: dict[Degrees, list[Estimate]] = {}
        for e in every:
            if e.memory <= self.frame.budget:
                fitting.setdefault(e.candidate.degrees, []).append(e)
        # of one kind the first in a group is the best, however wrong estimates are
        first = [e for group in fitting.values() for e in {_kind(e): e for e in reversed(group)}.values()]
        start = copy.copy(self)
        start.found, start.tried, start.errors = [*self.found], {*self.tried}, {**self.errors}

        def following(known: Mapping[Estimate, Attempt]) -> list[Estimate]:
            return _Forecast(start, known).wanted(fitting, first)

        with Ahead(functools.partial(attempt, self.estimates), self.frame.crew, self.frame.shared) as ahead:
            self._attempt = functools.partial(ahead.ask, following=following)
            self._run(fitting, first)

    def _run(self, fitting: Mapping[Degrees, Sequence[Estimate]], first: Sequence[Estimate]) -> None:
        """`run` of what is estimated to fit, by degrees, and the ``first`` of every kind of each."""
        for _ in range(DEGREES_SOLVED):
            e = min(first, key=self._corrected, default=None)
            if e is None or self._late() or not self._worth(e):
                break
            degrees = e.candidate.degrees
            first = [e for e in first if e.candidate.degrees != degrees]
            self._first_that_fits(sorted(fitting[degrees], key=self._corrected))
        if not self.found:
            return
        group = sorted(fitting[self.best().candidate.degrees], key=self._corrected)
        untried = [e for e in group if (e.candidate, e.recompute) not in self.tried]
        for e in untried[:VARIANTS_SOLVED]:
            if not self._late() and self._worth(e):
                self.solve(e)
        best = self.best()
        if best.candidate.zero and self.frame.hints.zero is None and best.pipeline is None and not self._late():
            self.solve(replace(best.estimate, candidate=replace(best.candidate, zero=None)))

    def _worth(self, e: Estimate) -> bool:
        """Whether a candidate may still be the best, for all that estimates are wrong by."""
        return not self.found or self._corrected(e)[0] <= WORTH * self.best().step_time

    def _corrected(self, e: Estimate) -> tuple[float, float]:
        """The seconds that were estimated, times what the last one of its kind was wrong by, and its bytes."""
        return e.seconds * self.errors.get(_kind(e), 1.0), e.memory

    def best(self) -> Found:
        """The fastest, an ordinary one if no pipeline is clearly faster; of equally fast ones the one with less in it,
        and then the one that needs less."""

        def key(f: Found) -> tuple[float, int, int, int]:
            seconds = f.step_time * (1.0 if f.pipeline is None else 1.0 + ORDINARY)
            return float(f"{seconds:.6g}"), f.candidate.micro_batches, f.zero, f.needed

        return min(self.found, key=key)

    def _first_that_fits(self, group: Sequence[Estimate]) -> None:
        """Solve the fastest of some candidates; where an estimate of memory was too low, the next that keeps less by
        what was missing, which may be the same with more recomputation."""
        limit, rest, tries = self.frame.budget, list(group), 0
        while rest and tries < TRIES and not self._late():
            e = rest.pop(0)
            if e.memory > limit or not self._worth(e):
                continue
            tries += 1
            short = self.solve(e)
            if short <= 0:
                return
            limit = min(limit, e.memory - short)
            if (again := self.estimates.again(e, limit)) is not None:
                bisect.insort(rest, again, key=self._corrected)

    def _late(self) -> bool:
        return bool(self.found) and time.monotonic() > self.deadline

    def solve(self, e: Estimate) -> float:
        """Solve a candidate and keep it if it fits. The bytes that it lacks, 0 if it fits, inf if it is impossible."""
        if (answer := recall(self.estimates, e)) is None:
            c = e.candidate
            axes = ", ".join(f"{axis}={n}" for axis, n in c.degrees.table().items() if n > 1)
            self.line.say(f"solving {axes or 'one rank'}, zero={c.zero}, {c.micro_batches} micro-batches")
            answer = keep(self.estimates, e, self._attempt(e))
        return self._take(e, answer)

    def _take(self, e: Estimate, answer: Attempt) -> float:
        """Note what came of a candidate; the bytes that it lacks."""
        self.tried.add((e.candidate, e.recompute))
        if answer.step_time is not None:
            self.errors[_kind(e)] = answer.step_time / e.seconds
        if answer.found is not None:
            self.found.append(answer.found)
        return answer.short


@dataclass(frozen=True)
class _Guess:
    """What an estimate would be if it was found to be true."""

    estimate: Estimate
    step_time: float

    @property
    def candidate(self) -> Candidate:
        return self.estimate.candidate

    @property
    def zero(self) -> int:
        return self.candidate.zero or 0

    @property
    def needed(self) -> float:
        return self.estimate.memory

    @property
    def pipeline(self) -> str | None:
        return self.candidate.schedule


class _Forecast(Solver):
    """What a solver asks for if what nobody has solved yet is as it is estimated: the way from where it was at the
    ``start``, with what is ``known`` by now."""

    def __init__(self, start: Solver, known: Mapping[Estimate, Attempt]) -> None:
        super().__init__(start.frame, start.estimates, None, start.line)
        self.found, self.tried, self.errors = [*start.found], {*start.tried}, {**start.errors}
        self._known = known
        self._wanted: list[Estimate] = []

    def wanted(
        self, fitting: Mapping[Degrees, Sequence[Estimate]], first: Sequence[Estimate]
    ) -> list[Estimate]:
        """What is to be solved, in order; see `_run`."""
        self._run(fitting, first)
        return self._wanted

    def solve(self, e: Estimate) -> float:
        """Take the estimate for the truth, where that is not known."""
        answer = self._known.get(e) or recall(self.estimates, e)
        if answer is None:
            self._wanted.append(e)
            seconds = self._corrected(e)[0]
            answer = Attempt(cast(Found, _Guess(e, seconds)), 0.0, seconds, False)
        return self._take(e, answer)


def _kind(e: Estimate) -> tuple[object, ...]:
    """What estimates are wrong about in the same way: schedules, gathers of every micro-batch, context and tensor
    parallelism (a replica is solved for large micro-batches, and small ones may be better exchanged otherwise), and
    whether every rank has all experts, whose gradients then take longer than anything else that is sent."""
    c = e.candidate
    return c.schedule, c.zero == 3, c.degrees.cp > 1, c.degrees.tp > 1, c.degrees.experts != NOWHERE


def least_memory(estimates: Estimates, enough: float = 0.0) -> Found | None:
    """The plan that needs the fewest bytes, of the candidates that are estimated to, or the first that needs no more
    than ``enough``; None if none is possible."""
    least: Found | None = None
    for found in small_plans(estimates):
        least = found if least is None or found.needed < least.needed else least
        if least.needed <= enough:
            break
    return least


def small_plans(estimates: Estimates, budget: float = math.inf) -> Iterator[Found]:
    """Plans of few bytes, of the candidates that are estimated to need the fewest, as long as one may need fewer than
    the others before, or with a ``budget`` no more than that. Which those are does not depend on the memory that there
    is, so that a limit that an error asks for is enough."""
    estimates = estimates.within(0.0)
    frame = estimates.frame
    every = [e for preferred in (True, False) for e in estimates.all(preferred=preferred, hopeless=True)]
    # estimates do not tell apart what is small: gradients of micro-batches are added up beside one another, and kinds
    # of ZeRO differ in what lives shortly
    smallest: dict[tuple[Degrees, bool, bool], Estimate] = {}
    for e in sorted(every, key=lambda e: e.memory):
        c = e.candidate
        smallest.setdefault((c.degrees, c.micro_batches == 1, c.zero == 3), e)
    rest, best, off = [*itertools.islice(smallest.values(), SMALLEST_SOLVED)], math.inf, 1.0

    def may_do(e: Estimate) -> bool:
        limit = best if math.isinf(budget) else budget
        return e.memory <= HOPELESS * budget and SURE * off * e.memory <= limit

    def following(known: Mapping[Estimate, Attempt]) -> Iterable[Estimate]:
        return [e for e in itertools.takewhile(may_do, rest) if recall(estimates, e) is None]

    with Ahead(functools.partial(least, estimates), frame.crew, frame.shared) as ahead:
        while rest and may_do(rest[0]):
            e = rest.pop(0)
            if (answer := recall(estimates, e)) is None:
                answer = keep(estimates, e, ahead.ask(e, following))
            if (found := answer.found) is not None:
                best, off = min(best, float(found.needed)), min(off, found.needed / e.memory)
                yield found
