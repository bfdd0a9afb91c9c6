"""What a training step takes: the programs of its stages, each simulated once, and the schedule that runs them.

A rank makes what lives for the step (``begin``), runs the actions of its schedule, reduces what it has summed up over
micro-batches (``end``), and steps the optimizer. That is what the runtime does: a graph waits for its own collectives
before it ends, so that no action is beside another one's; with more than one micro-batch the gradients that are reduced
once a step have no compute beside them; and all ranks wait for one another before the optimizer, as the norm of all
gradients makes them (but under a schedule that is only simulated, `Script.synchronised`: there a step takes what its
slowest rank takes from its own beginning to its own end).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.bubble import PipelineTime, Script, simulate
from autopar.cost_model.simulate import COMPUTE, Ran, Task, run

#: The actions of a stage besides those of a schedule (F, B, I, W): what it does first and last in a step.
BEGIN, END = "begin", "end"
#: The parts of a step, which add up to its seconds.
PARTS = ("compute", "exposed communication", "bubble", "optimizer")


@dataclass(frozen=True)
class Repeated:
    """Tasks that come ``count`` times in a row: those of equal blocks."""

    count: int
    tasks: tuple[Task, ...]


#: What one action of one stage does, in order.
Program = tuple[Repeated, ...]


@dataclass(frozen=True)
class Timing:
    """What a step is simulated from. ``actions`` has for every kind of action the place in ``programs`` of every
    stage's; equal stages share theirs. ``up`` and ``down`` are the seconds that what every stage sends to the next,
    and to the one before, travels. By rank of pp: ``shared`` are those of summing up gradients that several stages
    have, and ``optimizer`` those of its step. ``overlap_rate`` is the device's."""

    programs: tuple[Program, ...]
    actions: dict[str, tuple[int, ...]]
    up: tuple[float, ...]
    down: tuple[float, ...]
    shared: tuple[float, ...]
    optimizer: tuple[float, ...]
    overlap_rate: float

    def travels(self, source: int, target: int) -> float:
        """Seconds that what one stage sends another travels."""
        return self.up[source] if target > source else self.down[source]


@dataclass(frozen=True)
class Simulated:
    """One step: ``pipeline`` is the schedule from the step's start, ``ran`` every program. ``ranks`` are the seconds of
    every rank of pp by `PARTS`: of kernels, of communication that they do not hide (and by which it slows them down),
    of waiting for other ranks, and of the optimizer; ``rank`` is the slowest, and ``breakdown`` its seconds."""

    seconds: float
    ranks: tuple[dict[str, float], ...]
    rank: int
    pipeline: PipelineTime
    ran: tuple[Ran, ...]

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the slowest rank by `PARTS`."""
        return self.ranks[self.rank]


def tasks_of(program: Program) -> list[Task]:
    """The tasks of a program one by one."""
    return list(itertools.chain.from_iterable(part.tasks * part.count for part in program))


def is_whole(timing: Timing, stages: int, pp: int) -> bool:
    """Whether a timing can be that of ``stages`` stages on ``pp`` ranks: as many entries of everything, places that
    there are, and tasks that wait for tasks before them."""
    places, by_stage = range(len(timing.programs)), (timing.up, timing.down, *timing.actions.values())
    if not {BEGIN, "F", END} <= timing.actions.keys() or any(len(entries) != stages for entries in by_stage):
        return False
    if len(timing.shared) != pp or len(timing.optimizer) != pp or not 0 <= timing.overlap_rate <= 1:
        return False
    if any(place not in places for found in timing.actions.values() for place in found):
        return False
    numbers = itertools.chain(timing.up, timing.down, timing.shared, timing.optimizer)
    return all(n >= 0 for n in numbers) and all(_can_run(program) for program in timing.programs)


def _can_run(program: Program) -> bool:
    if any(part.count < 1 for part in program):
        return False
    tasks = enumerate(tasks_of(program))
    return all(task.seconds >= 0 and all(0 < back <= i for back in task.after) for i, task in tasks)


def simulate_step(timing: Timing, steps: Script) -> Simulated:
    """Simulate a step whose actions are ``steps``."""
    return _Step(timing, steps).simulate()


def _parts(work: float, busy: float, total: float, optimizer: float) -> dict[str, float]:
    """Seconds of a rank by `PARTS`, of which it is ``busy`` and its kernels ``work``, the optimizer's left out."""
    parts = (work, busy - work - optimizer, total - busy, optimizer)
    # rounding must not leave less than nothing
    return {kind: max(0.0, seconds) for kind, seconds in zip(PARTS, parts, strict=True)}


class _Step:
    """One step of all ranks of a pipeline."""

    def __init__(self, timing: Timing, steps: Script) -> None:
        self.timing, self.steps = timing, steps
        programs = [tasks_of(program) for program in timing.programs]
        self.ran = tuple(run(tasks, timing.overlap_rate) for tasks in programs)
        #: Seconds of every program, and of its kernels alone.
        self.seconds = [ran.seconds for ran in self.ran]
        self.work = [sum(task.seconds for task in tasks if task.stream == COMPUTE) for tasks in programs]

    @cached_property
    def counts(self) -> list[Counter[tuple[int, str]]]:
        """How often every rank runs every (stage, kind)."""
        return [Counter((action.stage, action.kind) for step in row for action in step) for row in self.steps.rows]

    def took(self, stage: int, kind: str) -> float:
        """Seconds of one action."""
        return self.seconds[self.timing.actions[kind][stage]]

    def around(self, kind: str) -> list[float]:
        """Seconds of what every rank does first or last in a step."""
        return [sum(self.took(s, kind) for s in stages) for stages in self.steps.of_rank]

    def simulate(self) -> Simulated:
        begin, end = self.around(BEGIN), self.around(END)
        pipeline = simulate(self.steps, self.steps.stages, self.took, self.timing.travels, begin)
        begun = [0.0 if self.steps.synchronised else s[0] - b for s, b in zip(pipeline.starts, begin, strict=True)]
        done = max(e[-1] + last - b for e, last, b in zip(pipeline.ends, end, begun, strict=True))
        total = done + max(self.timing.shared) + max(self.timing.optimizer)
        work = [self._work(rank) for rank in range(len(self.steps.rows))]
        busy = [
            begin[r] + pipeline.busy[r] + end[r] + self.timing.shared[r] + self.timing.optimizer[r]
            for r in range(len(self.steps.rows))
        ]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        ranks = tuple(
            _parts(work[r], busy[r], total, optimizer) for r, optimizer in enumerate(self.timing.optimizer)
        )
        return Simulated(sum(ranks[slowest].values()), ranks, slowest, pipeline, self.ran)

    def _work(self, rank: int) -> float:
        """Seconds of a rank's kernels in a step, the optimizer's left out."""
        actions = self.timing.actions
        around = sum(self.work[actions[kind][s]] for s in self.steps.of_rank[rank] for kind in (BEGIN, END))
        return around + sum(n * self.work[actions[kind][s]] for (s, kind), n in self.counts[rank].items())
