"""A step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: one process a rank of the pipeline, one
thread for what computes and one for every axis that communicates.

The format is Chrome's "Trace Event Format" (complete events X, metadata M; microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autopar.cost_model.bubble import Script, script
from autopar.cost_model.simulate import COMPUTE, Ran, Task
from autopar.cost_model.step import BEGIN, END, Simulated, Timing, simulate_step, tasks_of
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.plan import Plan

#: The thread of what goes between ranks of a pipeline.
_PIPELINE = "pp"
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def script_of(plan: Plan, timing: Timing) -> Script:
    """What the ranks of a plan's pipeline do in a step, in which order."""
    trained = any(kind in timing.actions for kind in ("B", "I"))
    stages = len(plan.stages) if plan.schedule is not None else 1
    first = plan.forwards_first
    return script(plan.schedule, plan.degrees[_PIPELINE], stages, plan.num_micro_batches, trained, first)


def simulated(plan: Plan) -> tuple[Timing, Script, Simulated]:
    """What a plan's step consists of, what ranks do in which order, and that step simulated. PlanError for a plan that
    does not say what its step consists of."""
    if plan.timing is None:
        raise PlanError(
            "The plan does not say what its step consists of.",
            expected="a plan that autopar.plan made",
            found="timing null",
            change="make the plan again",
        )
    steps = script_of(plan, plan.timing)
    if missing := {kind for _, kind in steps.kinds} - plan.timing.actions.keys():
        raise PlanError(
            "The plan does not say what all actions of its schedule consist of.",
            expected=f"timing.actions of {plan.schedule}",
            found=f"none of {', '.join(sorted(missing))}",
            change="make the plan again",
        )
    return plan.timing, steps, simulate_step(plan.timing, steps)


def timeline(plan: Plan) -> dict[str, Any]:
    """The trace of one step, as JSON holds it. PlanError as `simulated`."""
    return {"traceEvents": _Trace(*simulated(plan)).events(), "displayTimeUnit": "ms"}


class _Trace:
    """Writes the events of one simulated step."""

    def __init__(self, timing: Timing, steps: Script, simulated: Simulated) -> None:
        self.timing, self.steps, self.simulated = timing, steps, simulated
        self.tasks = [tasks_of(program) for program in timing.programs]
        axes = dict.fromkeys(t.stream for tasks in self.tasks for t in tasks if t.stream != COMPUTE)
        streams = (COMPUTE, *axes, *([_PIPELINE] if len(steps.rows) > 1 else []))
        self.threads = {stream: i for i, stream in enumerate(streams)}

    def events(self) -> list[dict[str, Any]]:
        """All events; those that name processes and threads first."""
        found = [event for rank in range(len(self.steps.rows)) for event in self._names(rank)]
        for rank in range(len(self.steps.rows)):
            found += self._rank(rank)
        return found + list(self._messages())

    def _names(self, rank: int) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for stream, thread in self.threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}

    def _rank(self, rank: int) -> Iterator[dict[str, Any]]:
        pipeline, now = self.simulated.pipeline, 0.0
        own = self.steps.of_rank[rank]
        for stage in own:
            yield from self._program(rank, stage, BEGIN, now, {"stage": stage, "phase": "step begins"})
            now += self._seconds(stage, BEGIN)
        for step, start in zip(self.steps.rows[rank], pipeline.starts[rank], strict=True):
            now = start
            for action in step:
                about = {"stage": action.stage, "micro-batch": action.micro_batch, "phase": _WORDS[action.kind]}
                yield from self._program(rank, action.stage, action.kind, now, about)
                now += self._seconds(action.stage, action.kind)
        for stage in own:
            yield from self._program(rank, stage, END, now, {"stage": stage, "phase": "step ends"})
            now += self._seconds(stage, END)
        yield from self._last(rank)

    def _last(self, rank: int) -> Iterator[dict[str, Any]]:
        """What all ranks do together at the end: sums of gradients that several stages have, and the optimizer."""
        shared, optimizer = self.timing.shared, self.timing.optimizer
        now = self.simulated.seconds - max(shared) - max(optimizer)
        if shared[rank]:
            yield self._event(rank, _PIPELINE, "gradients of several stages", now, shared[rank], {})
        if optimizer[rank]:
            yield self._event(rank, COMPUTE, "optimizer", now + max(shared), optimizer[rank], {})

    def _place(self, stage: int, kind: str) -> int:
        return self.timing.actions[kind][stage]

    def _seconds(self, stage: int, kind: str) -> float:
        return self.simulated.ran[self._place(stage, kind)].seconds

    def _program(
        self, rank: int, stage: int, kind: str, begin: float, about: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        place = self._place(stage, kind)
        tasks: Sequence[Task] = self.tasks[place]
        ran: Ran = self.simulated.ran[place]
        where = f", micro-batch {about['micro-batch']}" if "micro-batch" in about else ""
        for task, start, end in zip(tasks, ran.starts, ran.ends, strict=True):
            name = " ".join(word for word in (task.kind, task.name) if word)
            title = f"{name}, stage {stage}{where}"
            yield self._event(rank, task.stream, title, begin + start, end - start, about)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What travels between ranks, on the sender's side."""
        departs = self.simulated.pipeline.departs
        for action, (source, target), start in zip(self.steps.messages, self.steps.links, departs, strict=True):
            what = "activations" if action.kind == "F" else "gradients"
            title = f"send {what}, stage {source} to {target}, micro-batch {action.micro_batch}"
            about = {"stage": source, "micro-batch": action.micro_batch}
            seconds = self.timing.travels(source, target)
            yield self._event(self.steps.ranks[source], _PIPELINE, title, start, seconds, about)

    def _event(
        self, rank: int, stream: str, name: str, start: float, seconds: float, about: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "pid": rank,
            "tid": self.threads[stream],
            "ts": start * 1e6,
            "dur": seconds * 1e6,
            "args": about,
        }
