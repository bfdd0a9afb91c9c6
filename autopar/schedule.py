"""Pipeline schedules: their names, what they ask for, which rank has which stage, and what ranks do in which order.

GPipe and 1F1B are written out here; the orders of the others are those of ``torch.distributed.pipelining``. Every one
of them runs on ``_PipelineScheduleRuntime`` (runtime/pipeline.py), is simulated by `autopar.verify`, and is what the
bubble is computed from (cost_model/bubble.py).
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
#: Schedules whose ranks have their first stages in order and their second ones in reverse, so that the first and the
#: last stage share a rank.
V_SHAPED = frozenset({"zbv", "dualpipev"})
#: Schedules that run the backward of inputs and of weights apart.
SPLIT_BACKWARD = frozenset({"interleaved-zb", "zbv", "dualpipev"})


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
    chunks = SCHEDULES[schedule]
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


def torch_order(schedule: str, pp: int, stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """The actions of every rank of the ``pp`` axis as ``torch.distributed.pipelining`` writes them; None is idle.

    A number of micro-batches that the schedule cannot run, which a batch of another size than the plan's may have, runs
    breadth first: every stage all its forwards, then all its backwards.
    """
    able = runs(schedule, pp, stages, micro_batches)
    if able and schedule not in ("gpipe", "1f1b"):
        return pipeline_order(schedule, pp, stages, micro_batches)
    if able and schedule == "1f1b":
        rows = {r: _one_f_one_b(r, pp, micro_batches) for r in range(pp)}
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
