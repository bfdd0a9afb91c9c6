"""What a candidate of the outer search would take, put together from the profile of its replica in closed form.

Estimates order candidates; the best of them are then solved and simulated (`solver.outer`). Every one also has a
proved lower bound on seconds, from which `Plan.gap` follows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.compute import optimizer_seconds, stream_seconds
from autopar.cost_model.memory import FRAGMENTATION
from autopar.schedule import SPLIT_BACKWARD, V_SHAPED, stage_ranks
from autopar.sharding.zero import Keeping
from autopar.solver.actions import ADDED
from autopar.solver.candidates import Candidate
from autopar.solver.cuts import Units, best_cuts, fair_cuts
from autopar.solver.held import Held, held_by_stage
from autopar.solver.profile import Replica, State
from autopar.solver.program import Floats, Ints


@dataclass(frozen=True)
class Estimate:
    """A candidate with a way to recompute: about how many ``seconds`` a step takes and ``memory`` bytes its fullest
    rank keeps, and the ``bound``: no plan of the candidate takes fewer seconds."""

    candidate: Candidate
    recompute: str
    seconds: float
    memory: float
    bound: float


def by_rank(schedule: str | None, pp: int, values: Floats) -> Floats:
    """Sums over the stages of every rank, of values by stage."""
    chunks = values.reshape(-1, pp).copy()
    if schedule in V_SHAPED:
        chunks[1::2] = chunks[1::2, ::-1]
    return np.asarray(chunks.sum(0))


def bubble(
    schedule: str | None, chunks: int, micro_batches: int, forward: Floats, inputs: Floats, weights: Floats
) -> float:
    """Seconds that ranks wait in a step, of a micro-batch's seconds by rank: the closed forms of cost_model.bubble,
    those of zero bubble with W cut off where it is longer than half of the rest. They hold from as many micro-batches
    as ranks on; a single one passes through all stages one after the other, and in between is interpolated."""
    full = 1.0 if len(forward) == 1 else min(1.0, (micro_batches - 1) / (len(forward) - 1))
    work = forward + inputs + weights
    if schedule in SPLIT_BACKWARD:
        work = np.maximum(work - full * (3.0 if schedule == "dualpipev" else 2.0) * weights, 0.0)
    return float(work.sum() - work.max()) / (1.0 + full * (chunks - 1))


def least_share(schedule: str | None, pp: int, chunks: int, micro_batches: int) -> float:
    """A step over the work of one rank if all ranks had the same, at least: 1F1B and GPipe run every micro-batch
    through a rank and the first of them through all others; interleaving a rank's stages divides that wait."""
    if schedule is None or schedule in SPLIT_BACKWARD:
        return 1.0
    return 1.0 + (pp - 1) / (chunks * micro_batches)


class _Shape(NamedTuple):
    """What the sums over a rank's units depend on."""

    lean: bool
    pp: int
    schedule: str | None
    chunks: int

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.pp * self.chunks


def _shape(c: Candidate) -> _Shape:
    return _Shape(c.lean, c.degrees.pp, c.schedule, c.chunks)


class _Reduced(NamedTuple):
    """What the least that a step does with parameters and gradients depends on."""

    pp: int
    dp: int
    cp: int
    tp: int
    zero: int | None
    group: int | None


def shards(c: Candidate, spread: int = 1) -> int:
    """Over how many ranks ZeRO splits what rests, of parameters that are ``spread`` in use over some of them."""
    return max((c.group or c.degrees.dp) * c.degrees.cp // spread, 1) if c.zero else 1


@dataclass(frozen=True)
class _Work:
    """Seconds of the ranks of a pipeline. Of one micro-batch the most that a rank has of the ``forward``, of the
    ``backward`` with what it makes again, and of both (``busiest``); of a step what it takes ``once`` for all of them,
    and what ranks ``wait`` for one another and for the first and the last transfers between stages."""

    forward: float
    backward: float
    busiest: float
    once: float
    wait: float


@dataclass(frozen=True)
class _Bytes:
    """Bytes by rank of parameters as in `profile.State`, with their ``spread``; of the rank with most those of
    parameters, gradients and state that its optimizer has ``stepped``; the most that a unit has of those that are
    ``used``, and what the ``first`` and the ``last`` unit of a stage have, the most of all stages; ``units`` is the
    number that the rank with most has, each of which has its own collectives."""

    rest: Floats
    gradients: Floats
    used: Floats
    reduced: Floats
    stepped: tuple[float, float, float]
    largest: float
    first: float
    last: float
    units: int
    spread: int


class _Saved(NamedTuple):
    """Bytes that are saved for the backward: of ``each`` micro-batch by stage, and how many ``more`` once there is
    the backward of its inputs and not yet that of its weights; ``once`` for all micro-batches, by rank; and those of
    what is made again ``meanwhile``, the most of any stage."""

    each: Floats
    more: Floats
    once: Floats
    meanwhile: float


class Estimator:
    """Estimates the candidates of one ``replica``, of a global ``batch`` on a cluster. What it has estimated is
    ``known``, by candidate and way to recompute."""

    def __init__(self, cluster: Cluster, batch: int, replica: Replica) -> None:
        self.cluster, self.batch, self.replica = cluster, batch, replica
        self.known: dict[tuple[Candidate, str], Estimate] = {}
        self._keep_answers()

    def _keep_answers(self) -> None:
        for name in ("cuts", "_work", "_bytes", "_saved", "_collective", "_stepped", "_at_least"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def __getstate__(self) -> dict[str, object]:
        """What another process needs of it."""
        return {name: getattr(self, name) for name in ("cluster", "batch", "replica", "known")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._keep_answers()

    def estimate(self, c: Candidate, modes: Sequence[str], budget: float) -> Estimate:
        """The candidate with the fastest of ``modes`` that fits into ``budget`` bytes, the first if that does, which is
        to be the one that makes least again; if none does, the last. Of all blocks only as many are made again as are
        needed, the first ones: few of them may take less than the cheap operators of all."""
        fits: list[Estimate] = []
        for mode in modes:
            found = self._with(c, mode)
            if found.memory <= budget:
                fits.append(self._fewest(found, budget) if mode == "full" and len(modes) > 1 else found)
            if fits and mode == modes[0]:
                break
        return min(fits, key=lambda e: e.seconds, default=found)

    def _with(self, c: Candidate, mode: str) -> Estimate:
        if (found := self.known.get((c, mode))) is None:
            found = Estimate(c, mode, self._seconds(c, mode), self._memory(c, mode), self.bound(c))
            self.known[c, mode] = found
        return found

    def _memory(self, c: Candidate, mode: str) -> float:
        """Bytes of the fullest rank."""
        saved, held = self._saved(_shape(c), self._samples(c), mode), self._held(c)
        moments = (held.most * saved.each + held.late * saved.more, held.end * (saved.each + saved.more))
        fullest, last = (by_rank(c.schedule, c.degrees.pp, moment) for moment in moments)
        active = np.maximum(fullest + saved.meanwhile, last) + saved.once
        return float((self.rest(c) + self._gaps * active).max()) + self.cluster.device.context_bytes

    @property
    def _gaps(self) -> float:
        """What comes and goes takes so many times its bytes, as `peaks.fullest` has it."""
        return 1 + FRAGMENTATION if self.cluster.device.context_bytes else 1.0

    def _fewest(self, full: Estimate, budget: float) -> Estimate:
        """As many blocks made again as are needed to fit, by bisection."""
        c = full.candidate
        low, high = 0, len(self._replica(c).blocks)  # none does not fit, all do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._memory(c, f"full:{middle}") <= budget else (middle, high)
        return full if high == len(self._replica(c).blocks) else self._with(c, f"full:{high}")

    def bound(self, c: Candidate) -> float:
        """Seconds that no plan of a candidate beats: those of its operators and of the exchanges within a replica, and
        what comes to them whatever is hidden behind them."""
        d = c.degrees
        share = least_share(c.schedule, d.pp, c.chunks, c.micro_batches)
        least = self.replica.bound * self.batch / (d.dp * d.pp) * share
        stepped, moved = self._at_least(_Reduced(d.pp, d.dp, d.cp, d.tp, c.zero, c.group))
        # stage s begins after s messages, and ends as many before the first one: on average pp - 1 in all
        begun = (d.pp - 1) * self._collective("p2p", self.cluster.size // d.pp, d.pp, 1.0)
        return least + stepped + begun + self._beside(moved, least)

    def _at_least(self, r: _Reduced) -> tuple[float, float]:
        """Seconds of the optimizer on a rank with the average of what there is, and of the collectives that reduce
        the gradients of a step, and gather what rests sharded, in one each."""
        replica, moved = self.replica, 0.0
        trained, gradients, state = 0.0, 0.0, 0.0
        for own in replica.states:
            ranks = max(r.dp * r.cp // own.spread, 1)
            shard = max((r.group or r.dp) * r.cp // own.spread, 1) if r.zero else 1
            trained += float(own.trained.sum()) / (r.pp * shard)
            gradients += float(own.gradients.sum()) / (r.pp * shard)
            state += float(own.optimizer.sum()) / (r.pp * shard)
            used, reduced = float(own.used.sum()) / r.pp, float(own.reduced.sum()) / r.pp
            stride = r.tp * own.spread
            if shard == 1:
                moved += self._collective("all_reduce", stride, ranks, reduced)
            else:
                moved += self._collective("all_gather", stride, shard, used)
                moved += self._collective("reduce_scatter", stride, shard, reduced)
        device = self.cluster.device
        return optimizer_seconds(replica.setting.optimizer, trained, gradients, state, device), moved

    def _replica(self, of: Candidate | _Shape) -> Replica:
        return self.replica.leaner if of.lean else self.replica

    def cuts(self, ranks: tuple[int, ...]) -> Ints:
        """The first unit of every stage; ``ranks`` are those of the stages."""
        return fair_cuts(self.replica.profile(1).seconds, ranks)

    def _first(self, shape: _Shape) -> Ints:
        return self.cuts(stage_ranks(str(shape.schedule), shape.pp, shape.stages))

    def _samples(self, c: Candidate) -> int:
        return max(1, self.batch // (c.degrees.dp * c.micro_batches))

    def _seconds(self, c: Candidate, mode: str) -> float:
        """Seconds of a step."""
        work = self._work(_shape(c), self._samples(c), c.micro_batches, mode)
        computed = c.micro_batches * work.busiest + work.once + self._added(c)
        return computed + work.wait + self._exposed(c, work) + self.optimizer(c)

    def _added(self, c: Candidate) -> float:
        """Seconds of adding up the gradients of micro-batches, `solver.actions.accumulated_bytes`."""
        once = self._keeping(c).gradient == "step"
        added = sum(
            float(own.reduced.max()) / (1 if once else shards(c, own.spread)) for own in self._bytes(_shape(c))
        )
        return (c.micro_batches - 1) * stream_seconds(ADDED * added, self.cluster.device)

    def _by_rank(self, shape: _Shape, by_unit: Floats) -> Floats:
        return by_rank(shape.schedule, shape.pp, np.add.reduceat(by_unit, self._first(shape)))

    def _work(self, shape: _Shape, samples: int, micro_batches: int, mode: str) -> _Work:
        replica, pp = self._replica(shape), shape.pp
        profile = replica.profile(samples)
        forward, inputs, weights = (self._by_rank(shape, x) for x in (profile.forward, profile.inputs, profile.weights))
        inputs = inputs + self._by_rank(shape, replica.chosen(profile.again, mode))
        wait = bubble(shape.schedule, shape.chunks, micro_batches, forward, inputs, weights)
        if pp > 1:
            sent = float(profile.sent[self._first(shape)[1:] - 1].max())
            wait += 2 * (pp - 1) * self._collective("p2p", self.cluster.size // pp, pp, sent)
        backward, early = inputs + weights, float(self._by_rank(shape, profile.early).max())
        return _Work(float(forward.max()), float(backward.max()), float((forward + backward).max()), early, wait)

    def _bytes(self, shape: _Shape) -> tuple[_Bytes, ...]:
        return tuple(self._bytes_of(shape, state) for state in self._replica(shape).states)

    def _bytes_of(self, shape: _Shape, state: State) -> _Bytes:
        rest, gradients, used, reduced = (
            self._by_rank(shape, x) for x in (state.rest, state.gradients, state.used, state.reduced)
        )
        stepped = np.stack([self._by_rank(shape, x) for x in (state.trained, state.gradients, state.optimizer)])
        most = stepped[:, int(stepped.sum(0).argmax())]
        begin = self._first(shape)
        first, last = state.used[begin].max(), state.used[[*(begin[1:] - 1), -1]].max()
        count = int(self._by_rank(shape, np.ones_like(state.used)).max())
        ends = (float(state.used.max()), float(first), float(last))
        stepped_most = (float(most[0]), float(most[1]), float(most[2]))
        return _Bytes(rest, gradients, used, reduced, stepped_most, *ends, count, state.spread)

    def _saved(self, shape: _Shape, samples: int, mode: str) -> _Saved:
        replica, first = self._replica(shape), self._first(shape)
        profile = replica.profile(samples)
        each, left = (np.add.reduceat(x, first) for x in (replica.chosen(profile.saved, mode), profile.left))
        once = self._by_rank(shape, replica.chosen(profile.constant, mode))
        return _Saved(each, np.maximum(left - each, 0.0), once, self._meanwhile(shape, profile.saved["none"], mode))

    def _meanwhile(self, shape: _Shape, whole: Floats, mode: str) -> float:
        """Bytes of what is made again and is there at once, of what units save ``whole``: a block's, and where the
        backward of weights comes later than that of inputs (zero bubble; DualPipeV's last ones alone) a stage's."""
        if mode == "none":
            return 0.0
        apart = shape.schedule in SPLIT_BACKWARD - {"dualpipev"}
        return float((np.add.reduceat(whole, self._first(shape)) if apart else whole).max())

    def _held(self, c: Candidate) -> Held:
        first = self._replica(c).setting.forwards_first
        return held_by_stage(c.schedule, c.degrees.pp, c.chunks, c.micro_batches, first)

    def _keeping(self, c: Candidate) -> Keeping:
        """How long copies of parameters live, and how often gradients are reduced."""
        replica = self._replica(c)
        return replace(replica.setting.zero, stage=c.zero).keeping(shards(c) > 1, replica.states[0].cast)

    def rest(self, c: Candidate) -> Floats:
        """Bytes by rank of parameters, gradients, optimizer state and copies."""
        every = self._bytes(_shape(c))
        gathered = self._gathered(c, sum(own.largest for own in every))
        return np.asarray(sum(self._resting(c, own) for own in every) + gathered)

    def _resting(self, c: Candidate, own: State | _Bytes) -> Floats:
        """Bytes, by unit or by rank as ``own`` has them, of parameters, gradients, optimizer state and the copies of
        whole parameters that are all there at the end of a forward."""
        keep, shard = self._keeping(c), shards(c, own.spread)
        whole = keep.gradient == "step" and (shard == 1 or c.micro_batches > 1)
        found = own.rest / shard + (own.reduced if whole else own.gradients / shard)
        return np.asarray(found if keep.copy == "use" else found + own.used)

    def _gathered(self, c: Candidate, largest: float) -> float:
        """Bytes of the block in use and the one that is gathered ahead, where copies live for one use."""
        made = shards(c) > 1 or self._replica(c).states[0].cast
        return 2 * largest if made and self._keeping(c).copy == "use" else 0.0

    def best_cuts(self, c: Candidate, mode: str, budget: float) -> Ints:
        """The first unit of every stage of a candidate, the best cut that fits."""
        replica = self._replica(c)
        profile, states = replica.profile(self._samples(c)), replica.states
        rest = sum(self._resting(c, state) for state in states) + replica.chosen(profile.constant, mode)
        seconds = profile.seconds + replica.chosen(profile.again, mode)
        saved = replica.chosen(profile.saved, mode)
        row = Units(seconds, rest, self._gaps * saved, self._gaps * np.maximum(profile.left - saved, 0.0))
        room = budget - self.cluster.device.context_bytes
        room -= self._gathered(c, sum(float(state.used.max()) for state in states))
        room -= self._gaps * self._meanwhile(_shape(c), profile.saved["none"], mode)
        stages = c.degrees.pp * c.chunks
        return best_cuts(row, stage_ranks(str(c.schedule), c.degrees.pp, stages), *self._held(c)[:2], max(room, 1.0))

    def _exposed(self, c: Candidate, work: _Work) -> float:
        """Seconds that the collectives of data parallelism add to a step: as `cost_model.step` has it, those once a
        step have no compute beside them if there is more than one micro-batch."""
        forward, backward = (work.forward, work.backward) if c.micro_batches == 1 else (0.0, 0.0)
        every = [self._moved(c, own) for own in self._bytes(_shape(c))]
        gather, scatter, across, first, last, end = (sum(seconds) for seconds in zip(*every, strict=True))
        if shards(c) == 1:
            return self._beside(across, backward)
        # across the groups of hybrid ZeRO: behind the backward too, but once a step
        late, behind = (0.0, across) if c.micro_batches == 1 else (across, 0.0)
        keep, once, each = self._keeping(c), late, 0.0
        if keep.copy == "step":
            once += self._beside(gather, forward)
        else:
            each += self._beside(gather - first, work.forward) + first
        again = gather if keep.copy == "use" else 0.0
        if keep.gradient == "step":
            once += self._beside(max(scatter, behind), backward)
        else:
            alone = end + (last if again else 0.0)
            each += self._beside(max(again + scatter - alone, behind), work.backward) + alone
        return once + c.micro_batches * each

    def _moved(self, c: Candidate, own: _Bytes) -> tuple[float, ...]:
        """Seconds of the collectives of data parallelism for parameters that are spread alike: all gathers, all
        reduce-scatters, and all all-reduces across what ZeRO splits; and the gather of the first and of the last unit
        and the reduce-scatter of the first, beside which there is nothing in a direction."""
        d, shard = c.degrees, shards(c, own.spread)
        used, reduced, ranks = float(own.used.max()), float(own.reduced.max()), d.dp * d.cp // own.spread
        stride = d.tp * own.spread
        if shard == 1:
            return 0.0, 0.0, self._collective("all_reduce", stride, ranks, reduced), 0.0, 0.0, 0.0
        gather = own.units * self._collective("all_gather", stride, shard, used / own.units)
        scatter = own.units * self._collective("reduce_scatter", stride, shard, reduced / own.units)
        across = own.units * self._collective("all_reduce", stride * shard, ranks // shard, reduced / shard / own.units)
        first, last = (self._collective("all_gather", stride, shard, n) for n in (own.first, own.last))
        return gather, scatter, across, first, last, self._collective(
            "reduce_scatter", stride, shard, own.first * reduced / used
        )

    def _beside(self, communication: float, compute: float) -> float:
        """Seconds that a collective adds to the compute beside it, which it slows down as long as it runs."""
        return max(communication * (1.0 - self.cluster.device.overlap_rate), communication - compute)

    def optimizer(self, c: Candidate) -> float:
        """Seconds of the optimizer's step on the rank that has most to step over."""
        return self._stepped(_shape(c), tuple(shards(c, own.spread) for own in self._bytes(_shape(c))))

    def _stepped(self, shape: _Shape, every: tuple[int, ...]) -> float:
        optimizer = self._replica(shape).setting.optimizer
        shares = [[n / shard for n in own.stepped] for own, shard in zip(self._bytes(shape), every, strict=True)]
        parameters, gradients, state = (sum(nbytes) for nbytes in zip(*shares, strict=True))
        return optimizer_seconds(optimizer, parameters, gradients, state, self.cluster.device)

    def _collective(self, kind: str, stride: int, size: int, nbytes: float) -> float:
        """Seconds of a collective over ``size`` ranks that are ``stride`` apart."""
        if size == 1 or nbytes == 0:
            return 0.0
        return float(collective_seconds(kind, nbytes, self.cluster.group(stride, size), self.cluster.device))
