"""One simulated step, rank by rank of the pipeline and stage by stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from autopar.cost_model.step import PARTS
from autopar.report.binding import Binding
from autopar.report.tables import rendered, table
from autopar.report.timeline import simulated
from autopar.report.units import seconds_text

if TYPE_CHECKING:
    from autopar.plan import Plan


@dataclass(frozen=True)
class RankSeconds:
    """The seconds of a rank of pp by the names of `Plan.breakdown`, and the stages that it runs."""

    rank: int
    stages: tuple[int, ...]
    seconds: dict[str, float]


@dataclass(frozen=True)
class StageSeconds:
    """A stage, its rank of pp, and the seconds of one micro-batch's ``forward`` and ``backward`` in it."""

    stage: int
    rank: int
    forward: float
    backward: float


@dataclass(frozen=True)
class SimulatedStep:
    """A step of ``step_time`` seconds. Every rank of pp takes all of them; ``slowest`` waits least, and its parts are
    the plan's breakdown. ``limits`` are the resources of which more would help, the most binding first."""

    step_time: float
    micro_batches: int
    slowest: int
    ranks: tuple[RankSeconds, ...]
    stages: tuple[StageSeconds, ...]
    limits: Binding

    def __str__(self) -> str:
        title = f"A step of {self.micro_batches} micro-batches takes {seconds_text(self.step_time)}"
        by_rank = [
            (str(r.rank), _numbers(r.stages), *(seconds_text(r.seconds[part]) for part in PARTS), self._mark(r))
            for r in self.ranks
        ]
        by_stage = [
            (str(s.stage), str(s.rank), seconds_text(s.forward), seconds_text(s.backward)) for s in self.stages
        ]
        sections: list[tuple[str, RenderableType]] = [
            (title, table(by_rank, ("pp rank", "stages", *PARTS, ""), right=range(2, 2 + len(PARTS)))),
            ("One micro-batch", table(by_stage, ("stage", "pp rank", "forward", "backward"), right=(2, 3))),
            ("What limits it", str(self.limits)),
        ]
        return rendered(sections)

    def _mark(self, rank: RankSeconds) -> str:
        return "waits least" if rank.rank == self.slowest and len(self.ranks) > 1 else ""


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def simulated_step(plan: Plan) -> SimulatedStep:
    """Simulate one step of ``plan``. PlanError for a plan that does not say what its step consists of."""
    timing, steps, found = simulated(plan)
    ranks = tuple(
        RankSeconds(rank, tuple(stages), dict(found.ranks[rank])) for rank, stages in enumerate(steps.of_rank)
    )

    def seconds(stage: int, kind: str) -> float:
        """Of one action; 0 if the schedule has none of the kind."""
        return found.ran[timing.actions[kind][stage]].seconds if (stage, kind) in steps.kinds else 0.0

    stages = tuple(
        StageSeconds(s, rank, seconds(s, "F"), seconds(s, "B") or seconds(s, "I") + seconds(s, "W"))
        for s, rank in enumerate(steps.ranks)
    )
    return SimulatedStep(found.seconds, plan.num_micro_batches, found.rank, ranks, stages, plan.binding)
