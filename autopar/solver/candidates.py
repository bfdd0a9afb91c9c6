"""What the outer search chooses from: degrees, ZeRO, micro-batches and schedules that cluster, batch and hints allow.

Recomputation is not chosen here: it is what makes a candidate fit (`solver.estimate`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from sympy import divisors

from autopar.cluster import Cluster
from autopar.hints import Hints
from autopar.schedule import ALL_SCHEDULES, FORWARDS_FIRST, SCHEDULES, runs
from autopar.sharding.axes import NOWHERE, ExpertRanks

#: Stages a rank that are tried at most of a schedule that leaves their number open.
MOST_CHUNKS = 10

#: What is not tried unless hinted: 1F1B takes the same time as GPipe and holds fewer activations.
DOMINATED = frozenset({"gpipe"})

#: Micro-batch sizes beyond the whole of a rank's batch: larger ones save nothing but the time of small matrix products.
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Degrees:
    """How many ranks every axis has, and how ``experts`` are spread."""

    pp: int
    dp: int
    cp: int
    tp: int
    experts: ExpertRanks = NOWHERE

    def table(self) -> dict[str, int]:
        """Degrees by axis, outermost first."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}


@dataclass(frozen=True)
class Candidate:
    """One point of the outer search. ``micro_batches`` is their number, ``chunks`` the stages a rank; ``schedule`` is
    None without a pipeline. ``zero`` is None where the integer program decides by parameter whether it rests sharded,
    ``group`` the ranks of dp over which ZeRO splits if not all. A ``lean`` one is estimated with activations split
    further than is fastest (`profile.Replica.leaner`)."""

    degrees: Degrees
    zero: int | None
    group: int | None
    micro_batches: int
    schedule: str | None
    chunks: int
    lean: bool = False


@dataclass(frozen=True)
class Limits:
    """What a model can be cut into: its global ``batch`` and sequence, ``units`` in a row (`solver.pipeline`), and
    whether its batch can be run in parts; hinted ``stages``, None if they are open; and how many pieces all of its
    mixtures of ``experts`` can be cut into, as all divisors of it (1: it has none); how many of the units are
    repeated ``blocks``, None if all; and whether parts must run their ``forwards_first``."""

    batch: int
    sequence: int
    units: int
    parts: bool
    stages: int | None = None
    experts: int = 1
    blocks: int | None = None
    forwards_first: bool = False


def all_degrees(cluster: Cluster, hints: Hints, limits: Limits) -> Iterator[Degrees]:
    """Every way to lay out all ranks: pp x dp x cp x tp, tp innermost, and to spread experts. A pipeline has no
    more ranks than the model has units, dp divides the batch and cp the sequence, unless hinted."""

    def open_to(axis: str, n: int, free: bool) -> bool:
        hint = hints.degree(axis)
        return (free if hint is None else hint == n) and (n > 1 or axis not in (hints.require or ()))

    for pp in divisors(cluster.size):
        if not open_to("pp", pp, pp == 1 or (limits.parts and pp <= limits.units)):
            continue
        for tp, cp in itertools.product(divisors(cluster.size // pp), repeat=2):
            dp, rest = divmod(cluster.size // pp, tp * cp)
            if rest or not open_to("tp", tp, True):
                continue
            if not stays_in_hosts({"pp": pp, "dp": dp, "cp": cp, "tp": tp}, cluster, hints.within_host or ()):
                continue
            if open_to("cp", cp, cp == 1 or limits.sequence % cp == 0) and open_to("dp", dp, limits.batch % dp == 0):
                for experts in _experts(dp, cp, tp, cluster, hints, limits):
                    yield Degrees(pp, dp, cp, tp, experts)


def stays_in_hosts(degrees: Mapping[str, int], cluster: Cluster, axes: Collection[str]) -> bool:
    """Whether no group of ranks along one of ``axes`` spans hosts, with ``degrees`` in the mesh's order."""
    inside = 1  # ranks from one of a group to the next
    for axis, n in reversed([*degrees.items()]):
        if axis in axes and n > 1 and cluster.hosts > 1 and cluster.devices_per_host % (inside * n):
            return False
        inside *= n
    return True


def _experts(dp: int, cp: int, tp: int, cluster: Cluster, hints: Hints, limits: Limits) -> list[ExpertRanks]:
    """How experts may be spread over dp and over a part of cp: of dp over none, over those of a host, and over as many
    as there are experts for; of cp over as many as there are experts for, where these are not all; with a hint over as
    many of both as, perhaps with all of cp or tp or both, it asks for; tp may not have experts where it has a part
    of each (``etp``). About all of cp, and tp, the program decides."""
    able, parts = divisors(math.gcd(limits.experts, dp)), divisors(math.gcd(limits.experts, cp))
    if hints.ep is not None:
        if limits.experts % hints.ep:
            return []
        others = (1,) if (hints.etp or 1) > 1 else (1, tp)
        wanted = {hints.ep // n for n in others if hints.ep % n == 0}
        spread = [ExpertRanks(n, part) for n in able for part in parts if part < cp or cp == 1]
        whole = {s for s in spread if s.cp == 1 and s.dp * cp in wanted}
        return [s for s in spread if s in whole or s.dp * s.cp in wanted]
    host = max(1, cluster.devices_per_host // (cp * tp))
    found = {ExpertRanks(1), ExpertRanks(max(n for n in able if n <= host)), ExpertRanks(able[-1])}
    if parts[-1] < cp:
        found.add(ExpertRanks(1, parts[-1]))
    return sorted(found)


def able_chunks(pp: int, limits: Limits) -> list[int]:
    """Stages a rank of a schedule that leaves their number open: two, and what divides the blocks of a rank, so that
    stages are about equal."""
    if limits.stages is not None:
        return [limits.stages // pp]
    of_rank = -(-(limits.blocks or limits.units) // pp)
    return [n for n in sorted({2, *divisors(of_rank)}) if 1 < n <= min(of_rank, MOST_CHUNKS)]


def _schedules(degrees: Degrees, hints: Hints, limits: Limits) -> Iterator[tuple[str | None, int]]:
    """The schedules of a pipeline with their stages a rank."""
    if degrees.pp == 1:
        yield None, 1
        return
    for schedule in [hints.schedule] if hints.schedule else _open_schedules(limits):
        chunks = ALL_SCHEDULES[schedule]
        able = able_chunks(degrees.pp, limits) if chunks is None else [chunks]
        for count in able or [2] * bool(hints.schedule):  # a hint may ask for stages of less than a block
            stages = degrees.pp * count
            if stages <= limits.units if limits.stages is None else stages == limits.stages:
                yield schedule, count


def _open_schedules(limits: Limits) -> list[str]:
    """The schedules that are tried unless hinted."""
    if limits.forwards_first:
        return sorted(FORWARDS_FIRST)
    return [s for s in SCHEDULES if s not in DOMINATED]


def _micro_batches(degrees: Degrees, hints: Hints, limits: Limits) -> list[int]:
    """Into how many micro-batches a rank's batch may be cut, fewest first."""
    samples, rest = divmod(limits.batch, degrees.dp)
    if hints.micro_batch_size is not None:
        count, rest = divmod(limits.batch, degrees.dp * hints.micro_batch_size)
        return [count] if not rest and (count == 1 or limits.parts) else []
    if rest or not limits.parts:
        return [1]
    return sorted({1, *(samples // n for n in MICRO_BATCH_SIZES if samples % n == 0)})


def _zeros(degrees: Degrees, hints: Hints, cluster: Cluster) -> Iterator[tuple[int | None, int | None]]:
    """Kinds of ZeRO with the group that shards; groups smaller than all data ranks lie within a host."""
    ranks = degrees.dp * degrees.cp
    if ranks == 1:
        yield hints.zero, hints.zero_group_size
        return
    for zero in (0, 1, 2, 3) if hints.zero is None else (hints.zero,):
        yield zero, hints.zero_group_size
        host = cluster.devices_per_host // (degrees.tp * degrees.cp)
        grouped = zero and hints.zero_group_size is None and 1 < host < degrees.dp and degrees.dp % host == 0
        if grouped and host % degrees.experts.dp == 0:
            yield zero, host


def candidates(degrees: Degrees, cluster: Cluster, hints: Hints, limits: Limits) -> Iterator[Candidate]:
    """Every candidate with these degrees that its schedule can run."""
    for schedule, chunks in _schedules(degrees, hints, limits):
        for count in _micro_batches(degrees, hints, limits):
            if schedule is not None and not runs(schedule, degrees.pp, degrees.pp * chunks, count):
                continue
            for zero, group in _zeros(degrees, hints, cluster):
                yield Candidate(degrees, zero, group, count, schedule, chunks)
