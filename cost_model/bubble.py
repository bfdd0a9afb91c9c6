"""Seconds that pipeline ranks wait: a schedule's own order of actions, simulated.

A rank runs its steps in order, each as soon as what it needs has been computed and has arrived. The closed forms that
this gives for equal stages, with F, B, I and W the seconds of a rank's share of one micro-batch, B = I + W:
(p - 1)(F + B) for GPipe and 1F1B, (p - 1)(F + B) / v for interleaved 1F1B with v stages a rank, and
(p - 1)(F + B - 2 W) / v for interleaved zero bubble (Qi et al., 2023; Narayanan et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.schedule import Action, Step, global_order, needed


@dataclass(frozen=True)
class PipelineTime:
    """``makespan``: seconds from the first action to the last; ``busy``: seconds of work of every rank; ``in_flight``:
    the most micro-batches, counted by stage, of which a rank holds activations at once."""

    makespan: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Seconds that the busiest rank waits."""
        return self.makespan - max(self.busy)


def simulate(
    rows: Sequence[Sequence[Step]], stages: int, seconds: Callable[[int, str], float], transfer: float = 0.0
) -> PipelineTime:
    """Run the ``rows`` of steps, one a rank. ``seconds(stage, kind)`` is what an action takes, ``transfer`` what the
    tensors between two stages on different ranks take; they travel while ranks compute."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for step in row for action in step}
    ended: dict[Action, float] = {}
    free, busy = [0.0] * len(rows), [0.0] * len(rows)
    for step in global_order(rows, stages):
        rank = rank_of[step[0].stage]
        arrived = [
            ended[other] + (transfer if rank_of[other.stage] != rank else 0.0)
            for action in step
            for either in needed(action, stages)
            for other in either
            if other in ended
        ]
        took = sum(seconds(action.stage, action.kind) for action in step)
        free[rank] = max([free[rank], *arrived]) + took
        busy[rank] += took
        ended.update(dict.fromkeys(step, free[rank]))
    return PipelineTime(max(free), tuple(busy), tuple(int(most_held(row, lambda stage: 1)) for row in rows))


def most_held(row: Sequence[Step], size: Callable[[int], float]) -> float:
    """The most that a rank holds at once of what is there from a forward until the weights' gradient has been taken,
    ``size(stage)`` of each."""
    most = now = 0.0
    for action in (action for step in row for action in step):
        now += size(action.stage) * {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
    return most
