"""Seconds that pipeline ranks wait: a schedule's own order of actions, simulated.

A rank runs its steps in order, each as soon as what it needs has been computed and has arrived. The closed forms that
this gives for equal stages, with F, B, I and W the seconds of a rank's share of one micro-batch, B = I + W:
(p - 1)(F + B) for GPipe and 1F1B, (p - 1)(F + B) / v for interleaved 1F1B with v stages a rank, and
(p - 1)(F + B - 2 W) / v for interleaved zero bubble (Qi et al., 2023; Narayanan et al., 2021).

What one stage sends another travels while ranks compute, as torch's runtime has it (sends and receives are started
ahead and waited for by the action that needs them). What goes one way between two ranks goes one after the other: a
link that takes longer than the stages do holds up the pipeline. A forward and a backward that a schedule puts side by
side (DualPipeV) take the sum of their seconds, because the runtime runs one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.schedule import SIMULATED_SCHEDULES, Action, Step, global_order, needed, order


@dataclass(frozen=True)
class PipelineTime:
    """``makespan``: seconds from 0 to the end of the last action; ``busy``: seconds of work of every rank;
    ``in_flight``: the most micro-batches, counted by stage, of which a rank holds activations at once; ``starts`` and
    ``ends`` of every step of every rank, and when every message of the script (`Script.messages`) ``departs``."""

    makespan: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...] = ()
    ends: tuple[tuple[float, ...], ...] = ()
    departs: tuple[float, ...] = ()

    @property
    def bubble(self) -> float:
        """Seconds that the busiest rank waits."""
        return self.makespan - max(self.busy)


@dataclass(frozen=True, eq=False)
class Script:
    """The steps of every rank, read once for any number of simulations: of a thousand candidates of a search many have
    the same schedule."""

    rows: tuple[tuple[Step, ...], ...]
    stages: int
    #: Whether all ranks wait for one another at the end of a step.
    synchronised: bool = True

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        found = {action.stage: rank for rank, row in enumerate(self.rows) for step in row for action in step}
        return tuple(found[s] for s in range(self.stages))

    @cached_property
    def of_rank(self) -> tuple[list[int], ...]:
        """The stages of every rank, in order."""
        return tuple([s for s, r in enumerate(self.ranks) if r == rank] for rank in range(len(self.rows)))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """`PipelineTime.in_flight`."""
        return tuple(int(most_held(row, lambda stage: 1)) for row in self.rows)

    @cached_property
    def kinds(self) -> tuple[tuple[int, str], ...]:
        """The (stage, kind) of actions that there are."""
        return tuple(sorted({(a.stage, a.kind) for row in self.rows for step in row for a in step}))

    @cached_property
    def plan(self) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Steps in an order in which they can be simulated: the rank of each, places of its actions in ``kinds``, the
        messages that it waits for, and those that it sends."""
        place = {kind: i for i, kind in enumerate(self.kinds)}
        sent = {message: i for i, message in enumerate(self.messages)}
        found = []
        for step in global_order(self.rows, self.stages):
            # on one rank an action comes after what it needs by the order of the rank
            waits = tuple(sent[a] for action in step for a in self._needed(action) if a in sent)
            kinds = tuple(place[a.stage, a.kind] for a in step)
            sends = tuple(sent[a] for a in step if a in sent)
            found.append((self.ranks[step[0].stage], kinds, waits, sends))
        return tuple(found)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """For every message the stage that sends it and the stage that it goes to."""
        return tuple((a.stage, a.stage + (1 if a.kind == "F" else -1)) for a in self.messages)

    @cached_property
    def messages(self) -> list[Action]:
        """The actions that send something to another rank."""
        found = []
        for row in self.rows:
            for action in (action for step in row for action in step if action.kind != "W"):
                other = action.stage + (1 if action.kind == "F" else -1)
                if 0 <= other < self.stages and self.ranks[other] != self.ranks[action.stage]:
                    found.append(action)
        return found

    def _needed(self, action: Action) -> list[Action]:
        return [a for either in needed(action, self.stages) for a in either]


@functools.lru_cache(maxsize=256)
def script(
    schedule: str | None,
    pp: int,
    stages: int,
    micro_batches: int,
    trained: bool = True,
    forwards_first: bool = False,
) -> Script:
    """The script of a schedule (`autopar.schedule.order`); without one a rank runs its micro-batches one after the
    other, or all their ``forwards_first``, of a model that is not ``trained`` the forwards alone. Schedules that are
    only simulated end as those who published them let them end: ranks go on to the next step, and take it back if the
    norm of the gradients says so."""
    if schedule is None:
        every = range(micro_batches)
        if forwards_first and trained:
            row = [Action(0, kind, m) for kind in "FB" for m in every]
        else:
            row = [Action(0, kind, m) for m in every for kind in ("FB" if trained else "F")]
        return Script((tuple((action,) for action in row),), stages)
    rows = tuple(map(tuple, order(schedule, pp, stages, micro_batches)))
    return Script(rows, stages, schedule not in SIMULATED_SCHEDULES)


def simulate(
    rows: Sequence[Sequence[Step]] | Script,
    stages: int,
    seconds: Callable[[int, str], float],
    transfer: float | Callable[[int, int], float] = 0.0,
    begin: Sequence[float] = (),
) -> PipelineTime:
    """Run the ``rows`` of steps, one a rank. ``seconds(stage, kind)`` is what an action takes, ``transfer`` what the
    tensors between two stages on different ranks take, for all or by (sender, receiver); ranks start at ``begin``."""
    found = rows if isinstance(rows, Script) else Script(tuple(map(tuple, rows)), stages)
    took = [seconds(stage, kind) for stage, kind in found.kinds]
    by_link = {link: transfer(*link) if callable(transfer) else transfer for link in dict.fromkeys(found.links)}
    travels = [by_link[link] for link in found.links]
    ways = [(found.ranks[a], found.ranks[b]) for a, b in found.links]
    departs, arrived, link_free = [0.0] * len(travels), [0.0] * len(travels), dict.fromkeys(ways, 0.0)
    free, busy = [*begin] or [0.0] * len(found.rows), [0.0] * len(found.rows)
    starts: list[list[float]] = [[] for _ in found.rows]
    ends: list[list[float]] = [[] for _ in found.rows]
    for rank, kinds, waits, sends in found.plan:
        start = free[rank]
        for message in waits:
            if arrived[message] > start:
                start = arrived[message]
        work = took[kinds[0]] if len(kinds) == 1 else sum(took[k] for k in kinds)
        end = start + work
        for message in sends:
            way = ways[message]
            departs[message] = max(end, link_free[way])
            arrived[message] = link_free[way] = departs[message] + travels[message]
        free[rank] = end
        busy[rank] += work
        starts[rank].append(start)
        ends[rank].append(end)
    times = (tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(departs))
    return PipelineTime(max(free), tuple(busy), found.in_flight, *times)


def most_held(row: Sequence[Step], size: Callable[[int], float]) -> float:
    """The most that a rank holds at once of what is there from a forward until the weights' gradient has been taken,
    ``size(stage)`` of each."""
    most = now = 0.0
    for action in (action for step in row for action in step):
        now += size(action.stage) * {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
    return most
