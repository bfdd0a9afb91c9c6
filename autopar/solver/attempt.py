"""What comes of solving a candidate of the outer search: the fastest way that fits, or the one of the fewest bytes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from autopar.plan import Prefill
from autopar.sharding.axes import make_mesh
from autopar.sharding.layout import Mesh
from autopar.solver.candidates import Candidate
from autopar.solver.estimate import Estimate
from autopar.solver.estimates import Estimates
from autopar.solver.frame import Frame
from autopar.solver.peaks import peaks_of
from autopar.solver.pins import Pins
from autopar.solver.pipeline import Pipeline, hinted
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import Solved
from autopar.solver.task import Task


@dataclass(frozen=True)
class Found:
    """A candidate that was solved; ``peaks`` are bytes by kind at the fullest moment of every rank of its pipeline, of
    one rank without; ``prefill`` is of the prompts that come first, if any do."""

    estimate: Estimate
    pipeline: Pipeline | None
    setting: Setting
    solved: Solved
    peaks: tuple[dict[str, int], ...]
    prefill: Prefill | None = None

    @property
    def candidate(self) -> Candidate:
        """What was solved."""
        return self.estimate.candidate

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.solved.step_time

    @property
    def zero(self) -> int:
        """The kind of ZeRO."""
        return self.solved.zero

    @property
    def needed(self) -> int:
        """Bytes of the fullest device."""
        step = max(sum(kinds.values()) for kinds in self.peaks)
        return step if self.prefill is None else max(step, self.prefill.memory)


@dataclass(frozen=True)
class Attempt:
    """What came of a candidate: what was ``found`` and fits, else how many bytes were ``short`` (inf if it is
    impossible); the seconds of a step of the last way that was looked at, None if there was none; and whether that is
    ``free``, the fastest there is, whatever memory there is."""

    found: Found | None
    short: float
    step_time: float | None
    free: bool


def pins_of(frame: Frame, c: Candidate) -> Pins:
    """The pins of the hints with those of a candidate; what rests sharded rests alike for all kinds of ZeRO."""
    zero = 3 if c.zero else c.zero
    return replace(frame.pins, zero=zero, micro_batches=c.micro_batches)


def mesh_of(c: Candidate) -> Mesh:
    """The mesh of a stage."""
    d = c.degrees
    return make_mesh(d.dp, d.cp, d.tp, c.group, d.experts)


def task_of(frame: Frame, estimates: Estimates, e: Estimate) -> Task:
    """What a candidate is solved for."""
    zero = replace(frame.setting.zero, stage=e.candidate.zero)
    setting = replace(frame.setting, recompute=e.recompute, zero=zero)
    return Task(setting, mesh_of(e.candidate), pins_of(frame, e.candidate), _pipeline(frame, estimates, e))


def peaks(task: Task, solved: Solved, micro_batches: int) -> tuple[dict[str, int], ...]:
    """Bytes by kind at the fullest moment of every rank of the pipeline, of one rank without."""
    setting, assignment = task.setting, solved.assignment
    keep = keepings(setting, assignment)
    return peaks_of(setting, assignment, solved.held, keep, micro_batches, task.pipeline)


def _pipeline(frame: Frame, estimates: Estimates, e: Estimate) -> Pipeline | None:
    c, d = e.candidate, e.candidate.degrees
    if c.schedule is None:
        return None
    estimator = estimates.estimator(c)
    row = estimator.replica.row
    if frame.hints.stages is not None:
        return Pipeline(d.pp, c.schedule, hinted(row, frame.hints.stages))
    first = estimator.best_cuts(c, e.recompute, frame.budget)
    return Pipeline(d.pp, c.schedule, tuple(tuple(row[a:b]) for a, b in itertools.pairwise([*first, len(row)])))


def _found(frame: Frame, e: Estimate, task: Task, solved: Solved) -> Found:
    """What was solved for a candidate, with what it needs at its fullest moment."""
    prefill = None if frame.prompts is None else frame.prompts.under(task.setting, solved, frame.pins.dispatch)
    return Found(e, task.pipeline, task.setting, solved, peaks(task, solved, e.candidate.micro_batches), prefill)


def attempt(estimates: Estimates, e: Estimate) -> Attempt:
    """Solve a candidate, first as if memory did not matter: what is found then holds for every budget that it fits."""
    frame = estimates.frame
    task = task_of(frame, estimates, e)
    limit, short, step_time = math.inf, 0.0, None
    while (solved := task.solve(limit)) is not None:
        found, step_time = _found(frame, e, task, solved), solved.step_time
        if found.needed <= frame.budget:
            return Attempt(found, 0.0, step_time, math.isinf(limit))
        short = found.needed - frame.budget
        binds = math.isinf(limit) and solved.peak_memory > frame.budget
        limit = frame.budget if binds else min(limit, solved.peak_memory) - short
    return Attempt(None, short or max(task.least_memory()[0] - frame.budget, 1.0), step_time, False)


def least(estimates: Estimates, e: Estimate) -> Attempt:
    """Solve a candidate for the fewest bytes; estimates are those for no budget at all."""
    task = task_of(estimates.frame, estimates, e)
    _, solved = task.least_memory()
    if solved is None:
        return Attempt(None, math.inf, None, False)
    return Attempt(_found(estimates.frame, e, task, solved), 0.0, solved.step_time, False)


def _name(estimates: Estimates, e: Estimate) -> tuple[object, ...]:
    """All that a candidate's `attempt` depends on but for the budget. Stages are cut so that they fit into that, by
    what is known of the units of the replica."""
    cut = None if e.candidate.schedule is None else (estimates.frame.budget, estimates.name(e.candidate))
    return e.candidate, e.recompute, cut, estimates.frame.of_attempts


def recall(estimates: Estimates, e: Estimate) -> Attempt | None:
    """What is known already to come of a candidate."""
    known, name, budget = estimates.frame.known.attempts, _name(estimates, e), estimates.frame.budget
    found = known.get(name)
    if found is None or found.found is None or found.found.needed > budget:
        found = known.get((name, budget))
    if found is None or found.found is None:
        return found
    return replace(found, found=replace(found.found, estimate=e))


def keep(estimates: Estimates, e: Estimate, found: Attempt) -> Attempt:
    """``found``, known from now on."""
    name = _name(estimates, e)
    estimates.frame.known.attempts[name if found.free else (name, estimates.frame.budget)] = found
    return found
