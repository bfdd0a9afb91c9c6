"""Where the seconds of a step go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.cost_model.simulate import COMPUTE, Ran, Task
from autopar.cost_model.step import BEGIN, END, tasks_of
from autopar.report.html.markup import Markup, cell, grid, number, section, swatch, tag
from autopar.report.timeline import simulated
from autopar.report.units import seconds_text, share_text

if TYPE_CHECKING:
    from autopar.plan import Plan

EXPOSED = "exposed communication"

#: The colour of each part.
KINDS = {"compute": "forward", EXPOSED: "exposed", "bubble": "bubble", "optimizer": "optimizer"}
#: Those of exposed communication, of the axis that is waited for most first.
_EXPOSED = ("exposed", "exposed-second", "exposed-third", "exposed-fourth")
_WORDS = {
    "compute": "kernels, what is made again among them",
    "bubble": "waiting for other ranks of the pipeline",
    "optimizer": "the step of the optimizer",
}


def exposed_by_axis(plan: Plan) -> dict[str, float]:
    """The seconds of exposed communication by axis, of the rank that the plan's breakdown is of: those in which it
    computes nothing, and those by which collectives slow its kernels down. What runs at once on several axes is
    shared among them alike. Empty for a plan that does not say what its step consists of."""
    if plan.timing is None:
        return {}
    timing, steps, found = simulated(plan)
    often = Counter((action.stage, action.kind) for step in steps.rows[found.rank] for action in step)
    often.update((stage, kind) for stage in steps.of_rank[found.rank] for kind in (BEGIN, END))
    seconds: dict[str, float] = defaultdict(float)
    for (stage, kind), times in often.items():
        place = timing.actions[kind][stage]
        lost = lost_by_axis(tasks_of(timing.programs[place]), found.ran[place], timing.overlap_rate)
        for axis, part in lost.items():
            seconds[axis] += times * part
    if timing.shared[found.rank]:
        seconds["pp"] += timing.shared[found.rank]
    return {axis: part for axis, part in seconds.items() if part > 0}


def lost_by_axis(tasks: Sequence[Task], ran: Ran, rate: float) -> dict[str, float]:
    """The seconds that a program takes longer than its kernels, by the axis that is to blame. While collectives run
    kernels advance at the fraction ``rate`` of their speed."""
    moments: list[tuple[float, int, str]] = []
    for task, start, end in zip(tasks, ran.starts, ran.ends, strict=True):
        if end > start:
            moments += [(start, 1, task.stream), (end, -1, task.stream)]
    moments.sort()
    lost: dict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    before = 0.0
    for now, change, stream in moments:
        axes = [axis for axis, n in running.items() if n and axis != COMPUTE]
        part = (1 - rate) if running[COMPUTE] else 1.0
        for axis in axes:
            lost[axis] += (now - before) * part / len(axes)
        running[stream] += change
        before = now
    return dict(lost)


def parts_of(plan: Plan) -> list[tuple[str, str, float, str]]:
    """The parts of a step: name, colour, seconds, and what it is. They add up to the step."""
    found = []
    for what, seconds in plan.breakdown.items():
        axes = exposed_by_axis(plan) if what == EXPOSED else {}
        if axes:
            ordered = sorted(axes.items(), key=lambda pair: -pair[1])
            for i, (axis, part) in enumerate(ordered):
                colour = _EXPOSED[min(i, len(_EXPOSED) - 1)]
                found.append((f"exposed, {axis}", colour, part, f"communication over {axis} that nothing hides"))
        else:
            words = _WORDS.get(what, "communication that nothing hides")
            found.append((what, KINDS.get(what, "other"), seconds, words))
    return found


def breakdown(plan: Plan) -> Markup:
    """One bar and its table."""
    parts = parts_of(plan)
    total = sum(seconds for _, _, seconds, _ in parts) or 1.0
    shown = [(name, kind, seconds) for name, kind, seconds, _ in parts if seconds > 0]
    bar = tag(
        "div",
        [
            tag(
                "span",
                tag("b", name) if seconds > 0.09 * total else None,
                class_=f"k-{kind}",
                style=f"flex-grow:{number(1000 * seconds / total)}",
                title=f"{name}: {seconds_text(seconds)}, {share_text(seconds / total)}",
            )
            for name, kind, seconds in shown
        ],
        class_="bar tall",
        role="img",
        aria_label="; ".join(f"{name} {seconds_text(seconds)}" for name, _, seconds in shown),
    )
    rows = [
        tag(
            "tr",
            tag("th", swatch(kind), name, scope="row"),
            cell(seconds_text(seconds), "n"),
            cell(share_text(seconds / total), "n"),
            cell(words, "quiet"),
        )
        for name, kind, seconds, words in parts
    ]
    slowest = " It is that of the rank of the pipeline that waits least." if len(plan.peaks) > 1 else ""
    header = (("part", ""), ("seconds", "n"), ("of the step", "n"), ("", ""))
    return section(
        "step",
        "Where the time of a step goes",
        f"A step of {seconds_text(plan.step_time)}, simulated.{slowest}",
        bar,
        grid(header, [tag("tbody", rows)], "Seconds of a step by part"),
    )
