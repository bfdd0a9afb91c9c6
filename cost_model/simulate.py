"""A discrete-event simulation of what ranks do: tasks on streams, each begun as soon as what it waits for is done.

A rank has one stream that computes and one of communication for every axis; a stream runs its tasks in the order in
which they are listed, one at a time. A collective hides behind the compute beside it only as long as that compute
lasts, and it is not free: its kernels take processors and memory bandwidth, so that while one runs compute advances at
the fraction ``rate`` of its speed (`hardware.Device.overlap_rate`). Collectives are not slowed down by compute, nor by
one another on different axes. Nothing here knows graphs or schedules.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

#: The stream that computes. All others communicate.
COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """``seconds`` of work on a ``stream`` (`COMPUTE` or the name of an axis) of a ``rank``, if nothing slows it down.

    ``after`` says what it waits for besides the task before it on its stream, by how many places back in the list of
    tasks that lies: the same for equal pieces of work wherever they stand. ``kind`` and ``name`` are for people.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    kind: str = ""
    name: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Ran:
    """When every task began and ended, in seconds."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From 0 to the end of the last task."""
        return max(self.ends, default=0.0)


def run(tasks: Sequence[Task], rate: float = 1.0) -> Ran:
    """Run ``tasks``; ``rate`` is the fraction of its speed (0 to 1) that compute keeps while a collective runs on its
    rank. IndexError if a task waits for one that does not come before it."""
    return _Loop(tasks, rate).run()


class _Loop:
    """The state of a simulation at one moment."""

    def __init__(self, tasks: Sequence[Task], rate: float) -> None:
        self.tasks, self.rate = tasks, rate
        self.missing = [0] * len(tasks)
        self.users: list[list[int]] = [[] for _ in tasks]
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.events: list[tuple[float, int, int]] = []  # when a task ends, which, and by which of its forecasts
        self.forecast = [0] * len(tasks)
        self.computing: dict[int, tuple[int, float, float]] = {}  # by rank: task, seconds of work left, since when
        self.communicating: dict[int, int] = {}  # by rank: how many collectives run
        self._connect()

    def _connect(self) -> None:
        last: dict[tuple[int, str], int] = {}
        for i, task in enumerate(self.tasks):
            before = {i - back for back in task.after}
            if any(not 0 <= j < i for j in before):
                raise IndexError(f"task {i} ({task.name}) waits for what does not come before it: {task.after}")
            if (task.rank, task.stream) in last:
                before.add(last[task.rank, task.stream])
            last[task.rank, task.stream] = i
            self.missing[i] = len(before)
            for j in before:
                self.users[j].append(i)

    def run(self) -> Ran:
        for i in [i for i, missing in enumerate(self.missing) if not missing]:
            self._start(i, 0.0)
        while self.events:
            now, i, forecast = heapq.heappop(self.events)
            if forecast == self.forecast[i]:
                self._end(i, now)
        return Ran(tuple(self.starts), tuple(self.ends))

    def _start(self, i: int, now: float) -> None:
        task = self.tasks[i]
        self.starts[i] = now
        if task.stream == COMPUTE:
            self.computing[task.rank] = (i, task.seconds, now)
            self._expect(task.rank)
        else:
            heapq.heappush(self.events, (now + task.seconds, i, 0))
            self._communicate(task.rank, now, +1)

    def _end(self, i: int, now: float) -> None:
        task = self.tasks[i]
        self.ends[i] = now
        if task.stream == COMPUTE:
            del self.computing[task.rank]
        else:
            self._communicate(task.rank, now, -1)
        for user in self.users[i]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self._start(user, now)

    def _communicate(self, rank: int, now: float, change: int) -> None:
        """One collective more or less runs on ``rank``: what computes there goes on at another speed."""
        before = self.communicating.get(rank, 0)
        self.communicating[rank] = before + change
        if rank in self.computing and self.rate < 1 and not (before and before + change):
            i, left, since = self.computing[rank]
            left -= (now - since) * (self.rate if before else 1.0)
            self.computing[rank] = (i, max(0.0, left), now)
            self._expect(rank)

    def _expect(self, rank: int) -> None:
        """Forecast the end of what computes on ``rank``."""
        i, left, since = self.computing[rank]
        speed = self.rate if self.communicating.get(rank, 0) else 1.0
        self.forecast[i] += 1
        if speed > 0 or not left:
            heapq.heappush(self.events, (since + (left / speed if left else 0.0), i, self.forecast[i]))
