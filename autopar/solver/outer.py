"""The outer search: which degrees, ZeRO, micro-batches, schedule and recomputation, over all that a cluster allows.

Every replica (cp x tp ranks) that may be worth it is solved once and profiled, all candidates are estimated from the
profiles (`solver.estimate`), and the best few, of different degrees and then of the best degrees, are solved, laid out
in stages and simulated. The fastest that fits wins.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopar.cluster import Cluster
from autopar.hint_checks import DEGREES
from autopar.hints import Hints
from autopar.plan import Prefill
from autopar.report.progress import Progress
from autopar.sharding.axes import STATE_AXES, ExpertRanks, make_mesh
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operators
from autopar.sharding.recompute import forward_blocks
from autopar.solver.candidates import MICRO_BATCH_SIZES, Candidate, Degrees, Limits, all_degrees, candidates
from autopar.solver.carry import hint_pins
from autopar.solver.costs import state_bytes
from autopar.solver.estimate import Estimate, Estimator, shards
from autopar.solver.peaks import peaks_of
from autopar.solver.pins import Pins
from autopar.solver.pipeline import Pipeline, hinted
from autopar.solver.profile import Replica
from autopar.solver.setting import Setting, keepings
from autopar.solver.spmd import Solved
from autopar.solver.task import Task

#: Ways to recompute, by the seconds that they take.
RECOMPUTE = ("none", "selective", "full")

#: Tokens of a sequence that a rank of cp has at least, unless nothing else fits: Megatron's guidance is context
#: parallelism from sequences of 8K on.
CONTEXT_TOKENS = 4096

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


@dataclass(eq=False)
class Known:
    """What is asked about one model on one cluster under different hints shares: its ``operators``, and the
    ``replicas`` that have been solved, by all that they depend on."""

    operators: Operators | None = None
    replicas: dict[tuple[object, ...], Replica] = field(default_factory=dict)


class Prompts(Protocol):
    """What the forward of a generation's prompts takes under what was solved for the tokens after them."""

    def under(self, setting: Setting, solved: Solved, dispatch: str | None) -> Prefill: ...


@dataclass(frozen=True)
class Frame:
    """What a search is for: ``pins`` are the hints', ``budget`` bytes a device. Of a generation, whose step is one
    token, ``prompts`` are what it starts from, which have to fit too."""

    setting: Setting
    hints: Hints
    pins: Pins
    limits: Limits
    budget: float
    known: Known = field(default_factory=Known)
    prompts: Prompts | None = None

    @functools.cached_property
    def state(self) -> float:
        """Bytes of all parameters, gradients and optimizer state, each once."""
        found = 0.0
        for p in self.setting.captured.parameters:
            kinds = state_bytes(p.spec.numel, p.storage_dtype, self.setting.optimizer, p.gradient is not None)
            found += sum(kinds.values())
        return found

    @functools.cached_property
    def replica_pins(self) -> Pins:
        """The pins of a replica, where nothing is split over the ranks of the data."""
        shard = {pattern: {a: d for a, d in dims.items() if a not in STATE_AXES}
                 for pattern, dims in (self.hints.shard or {}).items()}  # fmt: skip
        pins = hint_pins(self.setting.captured, Hints(shard={pattern: dims for pattern, dims in shard.items() if dims}))
        return replace(
            pins, attention=self.hints.attention, experts=self.hints.ep, inside_experts=self.hints.etp,
            dispatch=self.hints.dispatch,
        )  # fmt: skip

    @property
    def of_replicas(self) -> tuple[object, ...]:
        """What replicas depend on of all that hints say: not on kinds of ZeRO, nor on the memory that there is."""
        kept = {k: v for k, v in self.hints.to_dict().items() if k not in _NOT_OF_REPLICAS}
        return self.setting.recompute, self.setting.zero.reshard_after_forward, repr(kept)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the setting."""
        return self.setting.cluster

    @functools.cached_property
    def modes(self) -> tuple[str, ...]:
        """Ways to recompute that the hints allow."""
        if self.hints.recompute is not None:
            return (self.hints.recompute,)
        if all(p.gradient is None for p in self.setting.captured.parameters):
            return RECOMPUTE[:1]
        return RECOMPUTE if forward_blocks(self.setting.operators) else RECOMPUTE[:2]


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
    def needed(self) -> int:
        """Bytes of the fullest device."""
        step = max(sum(kinds.values()) for kinds in self.peaks)
        return step if self.prefill is None else max(step, self.prefill.memory)


#: Hints that say nothing of how the operators of a replica are split.
_NOT_OF_REPLICAS = frozenset({
    *DEGREES, "zero", "zero_group_size", "reshard_after_forward", "recompute", "micro_batch_size", "schedule", "stages",
    "memory_limit", "within_host", "require", "forbid",
})  # fmt: skip


class Estimates:
    """The estimates of all candidates."""

    def __init__(self, frame: Frame, line: Progress) -> None:
        self.frame, self.line = frame, line
        self.replica = functools.cache(self._replica)
        self._asked: list[tuple[int, int, ExpertRanks]] = []
        self.estimator = Estimator(frame.cluster, frame.limits.batch, self.replica)

    def within(self, budget: float) -> Estimates:
        """The estimates for another budget; what has been solved is shared."""
        found = copy.copy(self)
        found.frame = replace(self.frame, budget=budget)
        return found

    @functools.cached_property
    def degrees(self) -> dict[tuple[int, int, ExpertRanks], list[Degrees]]:
        """All degrees by those of a replica, (cp, tp, how experts are spread), the fewest ranks first."""
        frame = self.frame
        found = [d for d in all_degrees(frame.cluster, frame.hints, frame.limits) if keeps_shards(d, frame.hints)]
        if frame.hints.zero:  # where a single data rank is all that is left there is nothing to shard
            found = [d for d in found if d.dp * d.cp > 1] or found
        every = sorted(found, key=lambda d: (d.tp * d.cp * d.experts.dp, d.cp, d.experts, d.pp))
        return {key: list(group) for key, group in itertools.groupby(every, key=lambda d: (d.cp, d.tp, d.experts))}

    def _replica(self, cp: int, tp: int, experts: ExpertRanks, lean: bool) -> Replica:
        if lean:
            return self.replica(cp, tp, experts, False).leaner
        self._asked.append((cp, tp, experts))
        over = "".join(f", experts over {n} of {axis}" for axis, n in experts._asdict().items() if n > 1)
        self.line.say(f"solving a replica of cp={cp}, tp={tp}{over}")
        frame, batch = self.frame, self.frame.limits.batch
        most = batch // min(d.dp for d in self.degrees[cp, tp, experts])
        able = [n for n in (*MICRO_BATCH_SIZES, most) if n and batch % (n * experts.dp) == 0]
        samples, known = max(able, default=1), frame.known.replicas
        key = (cp, tp, experts, samples, *frame.of_replicas)
        if key not in known:
            known[key] = Replica(frame.setting, cp, tp, frame.replica_pins, batch, samples, experts)
        return known[key]

    def preferred(self, cp: int, tp: int) -> bool:
        """Whether a replica is one of those tried first: tp over the fast links of a host, cp for long sequences. No
        proof says that others are slower; they are tried where nothing else fits, and where hints name them."""
        hints, device = self.frame.hints, self.frame.cluster.device
        near = tp <= max(device.scale_up_devices, self.frame.cluster.devices_per_host) or hints.asks_for("tp")
        return near and (cp == 1 or self.frame.limits.sequence >= cp * CONTEXT_TOKENS or hints.asks_for("cp"))

    def all(self, *, preferred: bool, hopeless: bool = False) -> list[Estimate]:
        """Estimates of all candidates of replicas that are (not) `preferred`, fastest first, each with as little
        recomputation as fits. Replicas whose bound is above what another's candidate is estimated to take are left
        out, and unless wanted candidates whose state alone does not fit."""
        found: list[Estimate] = []
        best = math.inf
        for (cp, tp, experts), group in self.degrees.items():
            if self.preferred(cp, tp) != preferred or self._least(cp, tp, experts) >= best:
                continue
            if self.replica(cp, tp, experts, False).possible:
                found += self._of(group, hopeless)
                best = min((e.seconds for e in found if e.memory <= self.frame.budget), default=math.inf)
        return sorted(found, key=lambda e: (e.seconds, e.memory))

    def _of(self, group: Sequence[Degrees], hopeless: bool) -> Iterator[Estimate]:
        frame = self.frame
        for degrees in group:
            for c in candidates(degrees, frame.cluster, frame.hints, frame.limits):
                if hopeless or self._can_fit(c):
                    yield self._better(c)

    def _better(self, c: Candidate) -> Estimate:
        """The estimate of a candidate, or if that makes much again or does not fit the lean one where it is better;
        with no budget at all the one of fewer bytes."""
        frame, d = self.frame, c.degrees
        modes = frame.modes if frame.budget else frame.modes[-1:]
        found = self.estimator.estimate(c, modes, frame.budget)
        easy = found.memory <= frame.budget and found.recompute == modes[0]
        replica = functools.partial(self.replica, d.cp, d.tp, d.experts)
        if easy or replica(True) is replica(False):
            return found
        lean = self.estimator.estimate(replace(c, lean=True), modes, frame.budget)
        if not frame.budget:
            return min(found, lean, key=lambda e: e.memory)
        return min(found, lean, key=lambda e: (e.memory > frame.budget, e.seconds))

    def again(self, e: Estimate, budget: float) -> Estimate | None:
        """The same candidate with more recomputation, the fastest that needs at most ``budget``: a few blocks made
        again whole, or the cheap operators of all; None if there is none."""
        modes = self.frame.modes
        ways = [modes[:1] + modes[i:] for i in range(1, len(modes))]
        found = [self.estimator.estimate(e.candidate, way, budget) for way in ways]
        fits = [other for other in found if other.memory <= budget and other.recompute != e.recompute]
        return min(fits, key=lambda other: other.seconds, default=None)

    def _can_fit(self, c: Candidate) -> bool:
        """Whether the state of the parameters alone leaves a chance: the fullest rank has at least the average."""
        d = c.degrees
        return self.frame.state / (d.pp * d.tp * max(shards(c), d.experts.dp * d.cp)) <= self.frame.budget

    def _least(self, cp: int, tp: int, experts: ExpertRanks) -> float:
        """Seconds that no candidate of a replica beats, known from those that have been solved: an operator that is
        split n ways takes at least an n-th of its time, and collectives do not take less."""
        replicas = [(key, self.replica(*key, False)) for key in self._asked]
        known = (
            one.bound * other[0] * other[1]
            for other, one in replicas
            if one.possible and cp % other[0] == 0 and tp % other[1] == 0 and experts.refines(other[2])
        )
        return max(known, default=0.0) * self.frame.limits.batch / self.frame.cluster.size


def keeps_shards(degrees: Degrees, hints: Hints) -> bool:
    """Whether the axes that hints split parameters over have more than one rank, and groups of ZeRO divide dp."""
    table = degrees.table()
    split = {axis for dims in (hints.shard or {}).values() for axis in dims}
    group = hints.zero_group_size
    grouped = degrees.dp % (group or 1) == 0 and (group or degrees.dp) % degrees.experts.dp == 0
    return grouped and all(table[axis] > 1 for axis in split)


def pins_of(frame: Frame, c: Candidate) -> Pins:
    """The pins of the hints with those of a candidate; what rests sharded rests alike for all kinds of ZeRO."""
    zero = 3 if c.zero else c.zero
    return replace(frame.pins, zero=zero, micro_batches=c.micro_batches)


def mesh_of(c: Candidate) -> Mesh:
    """The mesh of a stage."""
    d = c.degrees
    return make_mesh(d.dp, d.cp, d.tp, c.group, d.experts)


class Solver:
    """Solves candidates in the order in which they are worth it, for at most ``seconds`` once there is a plan."""

    def __init__(self, frame: Frame, estimates: Estimates, seconds: float | None, line: Progress) -> None:
        self.frame, self.estimates, self.line = frame, estimates, line
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.found: list[Found] = []
        self.tried: set[tuple[Candidate, str]] = set()
        #: By kind of candidate, what the last one took over its estimate.
        self.errors: dict[tuple[str | None, bool, bool, bool], float] = {}

    def run(self, every: Sequence[Estimate]) -> None:
        """Solve the best candidates of the best degrees, then more of the degrees that turned out best, and there at
        last ZeRO parameter by parameter. Only what is estimated to fit counts: the fastest of all often do not."""
        fitting, done = [e for e in every if e.memory <= self.frame.budget], set[Degrees]()
        for _ in range(DEGREES_SOLVED):
            rest = sorted((e for e in fitting if e.candidate.degrees not in done), key=self._corrected)
            if not rest or self._late() or not self._worth(rest[0]):
                break
            degrees = rest[0].candidate.degrees
            done.add(degrees)
            self._first_that_fits([e for e in rest if e.candidate.degrees == degrees])
        if not self.found:
            return
        degrees = self.best().candidate.degrees
        group = sorted((e for e in fitting if e.candidate.degrees == degrees), key=self._corrected)
        untried = [e for e in group if (e.candidate, e.recompute) not in self.tried]
        for e in untried[:VARIANTS_SOLVED]:
            if not self._late() and self._worth(e):
                self.solve(e)
        best = self.best()
        if best.candidate.zero and self.frame.hints.zero is None and best.pipeline is None and not self._late():
            self.solve(replace(best.estimate, candidate=replace(best.candidate, zero=None)))

    def _worth(self, e: Estimate) -> bool:
        """Whether a candidate may still be the best, for all that estimates are wrong by."""
        return not self.found or self._corrected(e)[0] <= WORTH * self.best().solved.step_time

    def _corrected(self, e: Estimate) -> tuple[float, float]:
        """The seconds that were estimated, times what the last one of its kind was wrong by, and its bytes."""
        return e.seconds * self.errors.get(_kind(e), 1.0), e.memory

    def best(self) -> Found:
        """The fastest, an ordinary one if no pipeline is clearly faster; of equally fast ones the one with less in it,
        and then the one that needs less."""

        def key(f: Found) -> tuple[float, int, int, int]:
            seconds = f.solved.step_time * (1.0 if f.pipeline is None else 1.0 + ORDINARY)
            return float(f"{seconds:.6g}"), f.candidate.micro_batches, f.solved.zero, f.needed

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
        self.tried.add((e.candidate, e.recompute))
        frame, c = self.frame, e.candidate
        axes = ", ".join(f"{axis}={n}" for axis, n in c.degrees.table().items() if n > 1)
        self.line.say(f"solving {axes or 'one rank'}, zero={c.zero}, {c.micro_batches} micro-batches")
        task = task_of(frame, self.estimates, e)
        limit, short = frame.budget, 0.0
        while (solved := task.solve(limit)) is not None:
            found = found_of(frame, e, task, solved)
            self.errors[_kind(e)] = solved.step_time / e.seconds
            if found.needed <= frame.budget:
                self.found.append(found)
                return 0.0
            short = found.needed - frame.budget
            limit = min(limit, solved.peak_memory) - short
        return short or max(task.least_memory()[0] - frame.budget, 1.0)


def _kind(e: Estimate) -> tuple[str | None, bool, bool, bool]:
    """What estimates are wrong about in the same way: schedules, gathers of every micro-batch, context and tensor
    parallelism (a replica is solved for large micro-batches, and small ones may be better exchanged otherwise)."""
    return e.candidate.schedule, e.candidate.zero == 3, e.candidate.degrees.cp > 1, e.candidate.degrees.tp > 1


def task_of(frame: Frame, estimates: Estimates, e: Estimate) -> Task:
    """What a candidate is solved for."""
    zero = replace(frame.setting.zero, stage=e.candidate.zero)
    setting = replace(frame.setting, recompute=e.recompute, zero=zero)
    return Task(setting, mesh_of(e.candidate), pins_of(frame, e.candidate), _pipeline(frame, estimates, e))


def found_of(frame: Frame, e: Estimate, task: Task, solved: Solved) -> Found:
    """What was solved for a candidate, with what it needs at its fullest moment."""
    prefill = None if frame.prompts is None else frame.prompts.under(task.setting, solved, frame.pins.dispatch)
    return Found(e, task.pipeline, task.setting, solved, peaks(task, solved, e.candidate.micro_batches), prefill)


def peaks(task: Task, solved: Solved, micro_batches: int) -> tuple[dict[str, int], ...]:
    """Bytes by kind at the fullest moment of every rank of the pipeline, of one rank without."""
    setting, assignment = task.setting, solved.assignment
    keep = keepings(setting, assignment)
    return peaks_of(setting, assignment, solved.held, keep, micro_batches, task.pipeline)


def _pipeline(frame: Frame, estimates: Estimates, e: Estimate) -> Pipeline | None:
    c, d = e.candidate, e.candidate.degrees
    if c.schedule is None:
        return None
    row = estimates.replica(d.cp, d.tp, d.experts, False).row
    if frame.hints.stages is not None:
        return Pipeline(d.pp, c.schedule, hinted(row, frame.hints.stages))
    first = estimates.estimator.best_cuts(c, e.recompute, frame.budget)
    return Pipeline(d.pp, c.schedule, tuple(tuple(row[a:b]) for a, b in itertools.pairwise([*first, len(row)])))


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
    every = [e for preferred in (True, False) for e in estimates.all(preferred=preferred, hopeless=True)]
    # estimates do not tell apart what is small: gradients of micro-batches are added up beside one another, and kinds
    # of ZeRO differ in what lives shortly
    smallest: dict[tuple[Degrees, bool, bool], Estimate] = {}
    for e in sorted(every, key=lambda e: e.memory):
        c = e.candidate
        smallest.setdefault((c.degrees, c.micro_batches == 1, c.zero == 3), e)
    least, off = math.inf, 1.0
    for e in itertools.islice(smallest.values(), SMALLEST_SOLVED):
        limit = least if math.isinf(budget) else budget
        if e.memory > HOPELESS * budget or SURE * off * e.memory > limit:
            return
        task = task_of(estimates.frame, estimates, e)
        _, solved = task.least_memory()
        if solved is not None:
            found = found_of(estimates.frame, e, task, solved)
            least, off = min(least, float(found.needed)), min(off, found.needed / e.memory)
            yield found
