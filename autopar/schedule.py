"""Pipeline schedules: their names, what they ask for, which rank has which stage, and what ranks do in which order.

GPipe and 1F1B are written out here; the orders of the others are those of ``torch.distributed.pipelining``. Every one
of them runs on ``_PipelineScheduleRuntime`` (runtime/pipeline.py), is simulated by `autopar.verify`, and is what the
bubble is computed from (cost_model/bubble.py). `SIMULATED_SCHEDULES` are those that torch does not have: they can be
planned with, and compared with what others have published, but not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from autopar._compat import pipeline_action, pipeline_order
from autopar.errors import HintError

#: Schedule -> how many stages a rank has: exactly one, exactly two, or None for as many as there are.
SCHEDULES: dict[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": None,
    "interleaved-zb": None,
    "zbv": 2,
    "dualpipev": 2,
}
#: The same of schedules that cannot be run: ZB-2p (ZB-H2 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023) and
#: V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).
SIMULATED_SCHEDULES: dict[str, int | None] = {"zb-2p": 1, "v-half": 2}
#: All of them.
ALL_SCHEDULES = SCHEDULES | SIMULATED_SCHEDULES
#: Schedules whose ranks have their first stages in order and their second ones in reverse, so that the first and the
#: last stage share a rank.
V_SHAPED = frozenset({"zbv", "dualpipev", "v-half"})
#: Schedules whose ranks run all their forwards before their first backward.
FORWARDS_FIRST = frozenset({"gpipe"})
#: Schedules that run the backward of inputs and of weights apart.
SPLIT_BACKWARD = frozenset({"interleaved-zb", "zbv", "dualpipev", "zb-2p", "v-half"})


class Action(NamedTuple):
    """One piece of work: ``kind`` is F (forward), B (whole backward), I (backward of inputs) or W (of weights). A key
    of large tables, hence a tuple."""

    stage: int
    kind: str
    micro_batch: int


#: What a rank does as one: an action, or a forward and a backward of two stages side by side. It begins when all of it
#: can, and hands its results on when all of it is done.
Step = tuple[Action, ...]


def stage_ranks(schedule: str, pp: int, stages: int) -> tuple[int, ...]:
    """The place on the ``pp`` axis of every stage."""
    if schedule in V_SHAPED:
        return tuple(s if s < pp else 2 * pp - 1 - s for s in range(stages))
    return tuple(s % pp for s in range(stages))


def check_stages(schedule: str, pp: int, stages: int) -> None:
    """HintError unless ``schedule`` can run ``stages`` stages on ``pp`` ranks."""
    chunks = ALL_SCHEDULES[schedule]
    if stages % pp or (chunks is not None and stages != chunks * pp):
        raise HintError(
            f"The schedule {schedule} cannot run {stages} stages on {pp} ranks.",
            expected=f"{chunks * pp} stages" if chunks is not None else f"a multiple of {pp} stages",
            found=f"{stages} stages",
            change="give another number of stages in the hint stages, or another schedule",
        )


def check_schedule(schedule: str, pp: int, stages: int, micro_batches: int) -> None:
    """HintError unless ``schedule`` can run ``stages`` stages on ``pp`` ranks with so many micro-batches."""
    check_stages(schedule, pp, stages)
    rounds = max(1, micro_batches // pp)
    least = {"1f1b": pp, "dualpipev": stages}.get(schedule, 1)
    if micro_batches < least:
        expected, change = f"at least {least} micro-batches, one a stage", "a smaller micro_batch_size"
    elif schedule in ("interleaved", "interleaved-zb") and micro_batches % rounds:
        expected = f"a number of micro-batches that its {rounds} rounds (micro-batches // pp) divide"
        change = f"a micro_batch_size that gives for instance {rounds * pp} micro-batches"
    else:
        return
    raise HintError(
        f"The schedule {schedule} cannot run {micro_batches} micro-batches on pp={pp}.",
        expected=expected,
        found=f"{micro_batches} micro-batches",
        change=f"give {change}",
    )


def runs(schedule: str, pp: int, stages: int, micro_batches: int) -> bool:
    """Whether `check_schedule` has nothing to say."""
    try:
        check_schedule(schedule, pp, stages, micro_batches)
    except HintError:
        return False
    return True


def _breadth_first(stages: Sequence[int], micro_batches: int) -> list[tuple[int, str, int]]:
    """All forwards of a rank's stages, then all backwards."""
    every = range(micro_batches)
    return [(s, "F", m) for s in stages for m in every] + [(s, "B", m) for s in reversed(stages) for m in every]


def _one_f_one_b(rank: int, pp: int, micro_batches: int) -> list[tuple[int, str, int]]:
    """As many forwards ahead as there are stages behind, then a forward and a backward in turn, then the rest."""
    ahead = min(pp - 1 - rank, micro_batches)
    found = [(rank, "F", m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        found += [(rank, "F", m), (rank, "B", m - ahead)]
    return found + [(rank, "B", m) for m in range(micro_batches - ahead, micro_batches)]


def _zb_2p(rank: int, pp: int, micro_batches: int) -> list[tuple[int, str, int]]:
    """Twice as many forwards ahead as 1F1B, so that no rank waits for its first backward. For the last 2 pp - 1
    micro-batches ranks leave work on weights for later while there are forwards, so that the first rank, which has none
    left, gets its backwards as fast as it can run them with the work on weights."""
    ahead, done = min(2 * (pp - rank) - 1, micro_batches), 0
    found = [(rank, "F", m) for m in range(ahead)]
    for m in range(micro_batches):
        found.append((rank, "I", m))
        if m < micro_batches - 2 * pp + 1 or ahead == micro_batches:
            found.append((rank, "W", done))
            done += 1
        if ahead < micro_batches:
            found.append((rank, "F", ahead))
            ahead += 1
    return found + [(rank, "W", m) for m in range(done, micro_batches)]


def _v_half(rank: int, pp: int, micro_batches: int) -> list[tuple[int, str, int]]:
    """One micro-batch's actions at fixed times, the next one's six units later: of a rank's six actions (F, I and W of
    two stages, each of one unit) no two meet. A forward moves on by a rank in one unit going down the V and in two
    going up, a backward likewise, so that a rank holds a micro-batch's two stages for half as long as 1F1B on average.
    """
    wait = (4, 0, 3) if pp % 2 == 0 else (1, 0, 0)  # units at the turns, the fewest with which no two meet
    back = pp - 1 - rank
    up = pp + wait[0] + 2 * back
    turned = pp + wait[0] + 2 * (pp - 1) + 1 + wait[1]
    times = {(rank, "F"): rank, (pp + back, "F"): up, (pp + back, "I"): turned + rank}
    times[rank, "I"] = turned + pp + wait[2] + 2 * back
    taken = {time % 6 for time in times.values()}
    for stage in (pp + back, rank):
        free = next(t for t in range(times[stage, "I"] + 1, times[stage, "I"] + 7) if t % 6 not in taken)
        times[stage, "W"] = free
        taken.add(free % 6)
    every = [(time + 6 * m, stage, kind, m) for (stage, kind), time in times.items() for m in range(micro_batches)]
    return [(stage, kind, m) for _, stage, kind, m in sorted(every)]


_WRITTEN = {"1f1b": _one_f_one_b, "zb-2p": _zb_2p, "v-half": _v_half}


def torch_order(schedule: str, pp: int, stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """The actions of every rank of the ``pp`` axis as ``torch.distributed.pipelining`` writes actions; None is idle.

    A number of micro-batches that the schedule cannot run, which a batch of another size than the plan's may have, runs
    breadth first: every stage all its forwards, then all its backwards.
    """
    able = runs(schedule, pp, stages, micro_batches)
    if able and schedule != "gpipe" and schedule not in _WRITTEN:
        return pipeline_order(schedule, pp, stages, micro_batches)
    if able and schedule in _WRITTEN:
        rows = {r: _WRITTEN[schedule](r, pp, micro_batches) for r in range(pp)}
    else:
        ranks = stage_ranks(schedule, pp, stages)
        rows = {r: _breadth_first([s for s in range(stages) if ranks[s] == r], micro_batches) for r in range(pp)}
    return {r: [pipeline_action(*entry) for entry in row] for r, row in rows.items()}


def _step(action: Any) -> Step:
    return tuple(
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in action.sub_actions or (action,)
    )


def order(schedule: str, pp: int, stages: int, micro_batches: int) -> list[list[Step]]:
    """The steps of every rank of the ``pp`` axis, in order."""
    rows = torch_order(schedule, pp, stages, micro_batches)
    return [[_step(action) for action in rows[rank] if action is not None] for rank in range(pp)]


def last_backward(rows: Sequence[Sequence[Step]], stage: int) -> int:
    """The micro-batch whose backward a stage runs last: of the last stage, when it has run all its forwards."""
    actions = (action for row in rows for step in row for action in step)
    return [a.micro_batch for a in actions if a.stage == stage and a.kind in ("B", "I")][-1]


def needed(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What has to be done before an action: one of each of the tuples."""
    s, m = action.stage, action.micro_batch
    if action.kind == "F":
        return [(Action(s - 1, "F", m),)] if s > 0 else []
    if action.kind == "W":
        return [(Action(s, "I", m),)]
    after = [(Action(s + 1, "B", m), Action(s + 1, "I", m))] if s + 1 < stages else []
    return [(Action(s, "F", m),), *after]


def global_order(rows: Sequence[Sequence[Step]], stages: int) -> Iterator[Step]:
    """All ranks' steps in one order that every rank's own order and what they need of one another allow.

    ValueError if there is none: the ranks would wait for one another for ever.
    """
    at, done = [0] * len(rows), set[Action]()
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        before = list(at)
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and _ready(row[at[rank]], done, stages):
                yield row[at[rank]]
                done.update(row[at[rank]])
                at[rank] += 1
        if at == before:
            waiting = [row[i] for row, i in zip(rows, at, strict=True) if i < len(row)]
            raise ValueError(f"the schedule does not end: ranks wait with {waiting}")


def _ready(step: Step, done: set[Action], stages: int) -> bool:
    return all(any(a in done for a in either) for action in step for either in needed(action, stages))
