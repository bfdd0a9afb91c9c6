"""The estimates of all candidates of a search, replica by replica."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.report.progress import Progress
from autopar.sharding.axes import ExpertRanks
from autopar.solver.ahead import Ahead
from autopar.solver.candidates import MICRO_BATCH_SIZES, Candidate, Degrees, all_degrees, candidates
from autopar.solver.estimate import Estimate, Estimator, shards
from autopar.solver.frame import Frame, keeps_shards
from autopar.solver.profile import Replica

#: Tokens of a sequence that a rank of cp has at least, unless nothing else fits: Megatron's guidance is context
#: parallelism from sequences of 8K on.
CONTEXT_TOKENS = 4096

#: Degrees of a replica: (cp, tp, how experts are spread).
Key = tuple[int, int, ExpertRanks]


def _key(c: Candidate) -> Key:
    return c.degrees.cp, c.degrees.tp, c.degrees.experts


class Estimates:
    """The estimates of all candidates."""

    def __init__(self, frame: Frame, line: Progress) -> None:
        self.frame, self.line = frame, line
        #: The replicas that have been looked at.
        self._asked: list[Key] = []

    def within(self, budget: float) -> Estimates:
        """The estimates for another budget; what has been solved is shared."""
        found = copy.copy(self)
        found.frame = replace(self.frame, budget=budget)
        return found

    @functools.cached_property
    def degrees(self) -> dict[Key, list[Degrees]]:
        """All degrees by those of a replica, the fewest ranks first."""
        frame = self.frame
        found = [d for d in all_degrees(frame.cluster, frame.hints, frame.limits) if keeps_shards(d, frame.hints)]
        if frame.hints.zero:  # where a single data rank is all that is left there is nothing to shard
            found = [d for d in found if d.dp * d.cp > 1] or found
        every = sorted(found, key=lambda d: (d.tp * d.cp * d.experts.dp, d.cp, d.experts, d.pp))
        return {key: list(group) for key, group in itertools.groupby(every, key=lambda d: (d.cp, d.tp, d.experts))}

    def estimator(self, c: Candidate) -> Estimator:
        """What estimates a candidate: that of its replica."""
        return self._estimator(_key(c))

    def name(self, c: Candidate) -> tuple[object, ...]:
        """All that the replica of a candidate depends on."""
        return self._name(_key(c))

    def _estimator(self, key: Key) -> Estimator:
        known, name = self.frame.known.estimators, self._name(key)
        if name not in known:
            frame, (cp, tp, experts) = self.frame, key
            pins, batch = frame.replica_pins, frame.limits.batch
            replica = Replica(frame.replica_setting, cp, tp, pins, batch, self._samples(key), experts)
            known[name] = Estimator(frame.cluster, batch, replica)
        return known[name]

    def _name(self, key: Key) -> tuple[object, ...]:
        return self.frame.of_replica(*key, self._samples(key))

    def _samples(self, key: Key) -> int:
        """The samples of the largest micro-batch of a replica that a candidate may have."""
        batch, experts = self.frame.limits.batch, key[-1]
        most = batch // min(d.dp for d in self.degrees[key])
        able = [n for n in (*MICRO_BATCH_SIZES, most) if n and batch % (n * experts.dp) == 0]
        return max(able, default=1)

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
        rest = [key for key in self.degrees if self.preferred(*key[:2]) == preferred]

        def following(known: Mapping[Key, object]) -> Iterator[Key]:
            return (key for key in rest if self._least(key) < best)

        work = functools.partial(self._work, hopeless)
        with Ahead(work, self.frame.crew, self.frame.shared) as ahead:
            while rest:
                key = rest.pop(0)
                if self._least(key) >= best:
                    continue
                self._say(key)
                self.frame.known.estimators[self._name(key)], more = ahead.ask(key, following)
                self._asked.append(key)
                found += more
                best = min((e.seconds for e in found if e.memory <= self.frame.budget), default=math.inf)
        return sorted(found, key=lambda e: (e.seconds, e.memory))

    def _say(self, key: Key) -> None:
        cp, tp, experts = key
        over = "".join(f", experts over {n} of {axis}" for axis, n in experts._asdict().items() if n > 1)
        self.line.say(f"solving a replica of cp={cp}, tp={tp}{over}")

    def _work(self, hopeless: bool, key: Key) -> tuple[Estimator, list[Estimate]]:
        """The estimator of a replica, and what it estimates."""
        estimator = self._estimator(key)
        return estimator, [*self._of(estimator, self.degrees[key], hopeless)] if estimator.replica.possible else []

    def _of(self, estimator: Estimator, group: Sequence[Degrees], hopeless: bool) -> Iterator[Estimate]:
        frame = self.frame
        for degrees in group:
            for c in candidates(degrees, frame.cluster, frame.hints, frame.limits):
                if hopeless or self._can_fit(c):
                    yield self._better(estimator, c)

    def _better(self, estimator: Estimator, c: Candidate) -> Estimate:
        """The estimate of a candidate, or if that makes much again or does not fit the lean one where it is better;
        with no budget at all the one of fewer bytes."""
        frame = self.frame
        modes = frame.modes if frame.budget else frame.modes[-1:]
        found = estimator.estimate(c, modes, frame.budget)
        easy = found.memory <= frame.budget and found.recompute == modes[0]
        if easy or estimator.replica.leaner is estimator.replica:
            return found
        lean = estimator.estimate(replace(c, lean=True), modes, frame.budget)
        if not frame.budget:
            return min(found, lean, key=lambda e: e.memory)
        return min(found, lean, key=lambda e: (e.memory > frame.budget, e.seconds))

    def again(self, e: Estimate, budget: float) -> Estimate | None:
        """The same candidate with more recomputation, the fastest that needs at most ``budget``: a few blocks made
        again whole, or the cheap operators of all; None if there is none."""
        modes = self.frame.modes
        ways = [modes[:1] + modes[i:] for i in range(1, len(modes))]
        found = [self.estimator(e.candidate).estimate(e.candidate, way, budget) for way in ways]
        fits = [other for other in found if other.memory <= budget and other.recompute != e.recompute]
        return min(fits, key=lambda other: other.seconds, default=None)

    def _can_fit(self, c: Candidate) -> bool:
        """Whether the state of the parameters alone leaves a chance: the fullest rank has at least the average."""
        d = c.degrees
        return self.frame.state / (d.pp * d.tp * max(shards(c), d.experts.dp * d.cp)) <= self.frame.budget

    def _least(self, key: Key) -> float:
        """Seconds that no candidate of a replica beats, known from those that have been solved: an operator that is
        split n ways takes at least an n-th of its time, and collectives do not take less."""
        cp, tp, experts = key
        replicas = [(other, self._estimator(other).replica) for other in self._asked]
        known = (
            one.bound * other[0] * other[1]
            for other, one in replicas
            if one.possible and cp % other[0] == 0 and tp % other[1] == 0 and experts.refines(other[2])
        )
        return max(known, default=0.0) * self.frame.limits.batch / self.frame.cluster.size
