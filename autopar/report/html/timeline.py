"""One simulated step as a picture: what every rank of the pipeline does when, and the streams of one micro-batch."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost_model.simulate import COMPUTE, Task
from autopar.cost_model.step import BEGIN, END, Simulated, Timing, tasks_of
from autopar.errors import PlanError
from autopar.report.html.markup import Markup, legend, number, section, tag
from autopar.report.timeline import simulated
from autopar.report.units import seconds_text

if TYPE_CHECKING:
    from autopar.cost_model.bubble import Script
    from autopar.plan import Plan

#: Units that a step is wide, and those at its left for names.
WIDTH, LEFT = 1080.0, 76.0
#: What is narrower is drawn together with its neighbours of the same kind, if the gap between them is narrower too.
NARROW, GAP = 1.0, 0.4
#: What is left out at the end of a box, where there is room, so that one sees where the next begins.
SEAM = 0.6
#: Width from which the number of a micro-batch is written.
NUMBERED = 13.0
#: Waits for communication that are narrower are left out, as nobody could see them.
SEEN = 0.3
#: Width of an action, on average, below which the beginning of a step is drawn once more, so many times larger.
SMALL, LARGER = 4.0, 10
#: Actions up to which the page's script says what is under the pointer.
POINTED = 20_000

_WORDS = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights", BEGIN: "begin of the step",
    END: "end of the step", "shared": "gradients of several stages", "optimizer": "optimizer",
}  # fmt: skip
_COLOURS = {
    "F": "forward", "B": "backward", "I": "backward", "W": "weights", BEGIN: "exposed", END: "exposed",
    "shared": "exposed", "optimizer": "optimizer",
}  # fmt: skip
#: Colours of tasks by their kind (of kernels) or purpose (of collectives).
_TASKS = {"forward": "forward", "backward": "backward", "recompute": "again", "accumulate": "weights"}
_PURPOSES = ("parameters", "gradients", "activations")


@dataclass(frozen=True)
class Segment:
    """What a rank does for a while, in seconds; ``exposed`` are those that it waits for communication, of which the
    kernels are none. ``micro_batch`` is None for what is done once a step."""

    kind: str
    stage: int
    micro_batch: int | None
    start: float
    seconds: float
    exposed: float


def segments(timing: Timing, steps: Script, found: Simulated) -> list[list[Segment]]:
    """What every rank of the pipeline does, in order; between the segments it waits for other ranks."""
    work = [sum(t.seconds for t in tasks_of(program) if t.stream == COMPUTE) for program in timing.programs]

    def one(kind: str, stage: int, micro_batch: int | None, start: float) -> Segment:
        place = timing.actions[kind][stage]
        took = found.ran[place].seconds
        return Segment(kind, stage, micro_batch, start, took, max(0.0, took - work[place]))

    rows: list[list[Segment]] = []
    for rank, (row, starts) in enumerate(zip(steps.rows, found.pipeline.starts, strict=True)):
        made: list[Segment] = []
        now = 0.0
        for stage in steps.of_rank[rank]:
            made.append(one(BEGIN, stage, None, now))
            now += made[-1].seconds
        for step, start in zip(row, starts, strict=True):
            now = start
            for action in step:
                made.append(one(action.kind, action.stage, action.micro_batch, now))
                now += made[-1].seconds
        for stage in steps.of_rank[rank]:
            made.append(one(END, stage, None, now))
            now += made[-1].seconds
        made += _last(timing, found, rank)
        rows.append([s for s in made if s.seconds > 0])
    return rows


def _last(timing: Timing, found: Simulated, rank: int) -> Iterator[Segment]:
    """What all ranks do together at the end."""
    shared, optimizer = timing.shared, timing.optimizer
    now = found.seconds - max(shared) - max(optimizer)
    yield Segment("shared", 0, None, now, shared[rank], shared[rank])
    yield Segment("optimizer", 0, None, now + max(shared), optimizer[rank], 0.0)


def timeline(plan: Plan) -> Markup:
    """The section; of a plan that was written by hand it says why there is none."""
    try:
        timing, steps, found = simulated(plan)
    except PlanError as error:
        return section("timeline", "The step as it runs", f"There is nothing to draw: {error.what}")
    rows = segments(timing, steps, found)
    kinds = {s.kind for row in rows for s in row}
    names = [(_COLOURS[kind], _WORDS[kind]) for kind in ("F", "B", "I", "W", "optimizer") if kind in kinds]
    names.append(("exposed", "exposed communication"))
    lead = (
        f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}, every rank from left to "
        "right; numbers are those of micro-batches. "
        "What a rank waits for communication in an action is drawn at the end of the action."
    )
    if len(rows) > 1:
        names.append(("bubble", "waiting for other ranks"))
        lead = f"{len(rows)} ranks of the pipeline by the schedule {plan.schedule}, {lead}"
    return section(
        "timeline",
        "The step as it runs",
        lead[0].upper() + lead[1:],
        legend(names),
        _figure(_Picture(found.seconds, rows).svg(), "The step, rank by rank of the pipeline"),
        *_beginning(found.seconds, rows),
        *_streams(plan, timing, steps, found),
    )


def _beginning(total: float, rows: Sequence[Sequence[Segment]]) -> Iterator[Markup]:
    """The beginning of a step that has many actions, enlarged."""
    if WIDTH / max(map(len, rows)) >= SMALL:
        return
    end = total / LARGER
    shown = [[_until(s, end) for s in row if s.start < end] for row in rows]
    yield tag("h3", f"The first {seconds_text(end)}, enlarged")
    yield _figure(_Picture(end, shown).svg(), "The beginning of the step, enlarged")


def _until(s: Segment, end: float) -> Segment:
    """What of a segment is before ``end``."""
    seconds = min(s.seconds, end - s.start)
    return replace(s, seconds=seconds, exposed=max(0.0, s.exposed - (s.seconds - seconds)))


def _figure(drawing: Markup, title: str) -> Markup:
    return tag("div", drawing, class_="scroll wide", tabindex="0", role="region", aria_label=title)


class _Picture:
    """Rows of segments over one axis of time."""

    def __init__(self, total: float, rows: Sequence[Sequence[Segment]]) -> None:
        self.total, self.rows = total, rows
        self.height = 40.0 if len(rows) == 1 else 22.0 if len(rows) <= 8 else 16.0 if len(rows) <= 16 else 9.0
        self.pitch = self.height + (2.0 if len(rows) > 16 else 4.0)
        self.pointed = sum(map(len, rows)) <= POINTED

    def svg(self) -> Markup:
        """The drawing."""
        bottom = len(self.rows) * self.pitch
        hatch = tag(
            "defs",
            tag(
                "pattern",
                tag("rect", width=6, height=6, class_="k-bubble"),
                tag("path", d="M0 6L6 0M-1 1L1-1M5 7L7 5", class_="hatch"),
                id="bubble", width=6, height=6, patternUnits="userSpaceOnUse",
            ),
        )  # fmt: skip
        return tag(
            "svg",
            hatch if len(self.rows) > 1 else None,
            ticks(self.total, bottom),
            [shape for rank in range(len(self.rows)) for shape in self._row(rank)],
            viewBox=f"0 0 {number(LEFT + WIDTH + 4)} {number(bottom + 22)}",
            role="img",
            aria_label=f"A step of {seconds_text(self.total)} on {len(self.rows)} ranks of the pipeline",
            class_="time",
        )

    def _row(self, rank: int) -> Iterator[Markup]:
        top, row = rank * self.pitch, self.rows[rank]
        name = f"rank {rank}" if len(self.rows) > 1 else "each rank"
        if self.height >= 9:
            yield tag("text", name, x=LEFT - 8, y=top + self.height / 2 + 4, class_="small end")
        if len(self.rows) > 1:
            yield tag("rect", x=LEFT, y=top, width=WIDTH, height=self.height, fill="url(#bubble)")
        boxes: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for s in row:
            exposed = s.exposed if s.exposed / self.total * WIDTH >= SEEN else 0.0
            if s.seconds > exposed:
                boxes[_COLOURS[s.kind]].append((self._x(s.start), (s.seconds - exposed) / self.total * WIDTH))
            if exposed:
                boxes["exposed"].append((self._x(s.start + s.seconds - exposed), exposed / self.total * WIDTH))
        for colour, places in boxes.items():
            yield path(places, top, self.height, colour)
        yield from self._numbers(row, top)
        if self.pointed:
            yield self._target(rank, top)

    def _x(self, seconds: float) -> float:
        return LEFT + seconds / self.total * WIDTH

    def _numbers(self, row: Iterable[Segment], top: float) -> Iterator[Markup]:
        for s in row:
            wide = s.seconds / self.total * WIDTH
            if s.micro_batch is not None and wide >= NUMBERED and self.height >= 14:
                middle = self._x(s.start + (s.seconds - s.exposed) / 2)
                kind = f"mb o-{_COLOURS[s.kind]}"
                yield tag("text", s.micro_batch, x=middle, y=top + self.height / 2 + 4, class_=kind)

    def _target(self, rank: int, top: float) -> Markup:
        """What the script reads to say what is under the pointer: words, and for every segment its begin and width in
        tenths of a unit, its words and its micro-batch."""
        words: dict[str, int] = {}
        numbers: list[int] = []
        for s in self.rows[rank]:
            stage = f", stage {s.stage}" if len(self.rows) > 1 and s.micro_batch is not None else ""
            said = f"{_WORDS[s.kind]}{stage}, {seconds_text(s.seconds)}"
            place = (round(10 * self._x(s.start)), round(10 * s.seconds / self.total * WIDTH))
            number = -1 if s.micro_batch is None else s.micro_batch
            numbers += [*place, words.setdefault(said, len(words)), number]
        data = json.dumps([list(words), numbers], separators=(",", ":"))
        return tag(
            "rect", x=LEFT, y=top, width=WIDTH, height=self.height, class_="target", data_rank=str(rank), data_row=data
        )


def ticks(total: float, bottom: float) -> Markup:
    """The axis of time below a drawing of ``total`` seconds that ends at ``bottom``."""
    step = _nice(total / 8)
    shapes = []
    for i in range(int(total / step * (1 + 1e-9)) + 1):
        x = LEFT + i * step / total * WIDTH
        shapes.append(tag("path", d=f"M{number(x)} 0V{number(bottom)}", class_="tick"))
        shapes.append(tag("text", seconds_text(i * step), x=x, y=bottom + 14, class_="small middle"))
    return tag("g", shapes)


def _nice(step: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * (1 - 1e-9))


def path(places: Iterable[tuple[float, float]], top: float, height: float, colour: str) -> Markup:
    """Boxes of one colour as one line of that width, given by where they begin and how long they are; narrow neighbours
    as one."""
    merged: list[tuple[float, float]] = []
    for x, width in places:
        if merged:
            before, wide = merged[-1]
            if width < NARROW and x - (before + wide) < GAP and wide < WIDTH:
                merged[-1] = (before, x + width - before)
                continue
        merged.append((x, width))
    at, lines = 0, [f"M0 {number(top + height / 2)}"]
    for x, wide in merged:
        left, drawn = round(10 * x), max(1, round(10 * (wide - SEAM if wide > 5 * SEAM else wide)))
        lines.append(f"m{number((left - at) / 10)} 0h{number(drawn / 10)}")
        at = left + drawn
    return tag("path", d="".join(lines), stroke_width=height, class_=f"k-{colour}")


def _streams(plan: Plan, timing: Timing, steps: Script, found: Simulated) -> Iterator[Markup]:
    """One micro-batch on one rank, stream by stream."""
    rank = found.rank
    stage = steps.of_rank[rank][len(steps.of_rank[rank]) // 2]
    kinds = [kind for kind in ("F", "B", "I", "W") if (stage, kind) in steps.kinds]
    if "B" in kinds and "I" in kinds:
        kinds = ["F", "B"]
    lanes: dict[str, dict[str, list[tuple[float, float]]]] = {COMPUTE: defaultdict(list)}
    now = 0.0
    for kind in kinds:
        place = timing.actions[kind][stage]
        tasks, ran = tasks_of(timing.programs[place]), found.ran[place]
        for task, start, end in zip(tasks, ran.starts, ran.ends, strict=True):
            colour = _task_colour(task, kind)
            lanes.setdefault(task.stream, defaultdict(list))[colour].append((now + start, end - start))
        now += ran.seconds
    if not now:
        return
    where = f" of stage {stage}, on rank {rank}" if len(steps.rows) > 1 else ""
    words = " and ".join(_WORDS[kind] for kind in kinds)
    used = dict.fromkeys(colour for lane in lanes.values() for colour in lane)
    said = {"forward": "forward", "backward": "backward", "weights": "backward of weights, sums", "again": "recomputed"}
    said |= {f"moves-{purpose}": f"collectives of {purpose}" for purpose in _PURPOSES}
    yield tag("h3", f"One micro-batch{where}")
    yield tag("p", f"Its {words}: kernels, and the collectives beside them by axis.", class_="lead")
    yield legend((colour, said.get(colour, colour)) for colour in said if colour in used)
    yield _figure(_lanes(lanes, now), "One micro-batch, stream by stream")


def _task_colour(task: Task, kind: str) -> str:
    if task.stream != COMPUTE:
        return f"moves-{task.name if task.name in _PURPOSES else 'activations'}"
    return "weights" if kind == "W" else _TASKS.get(task.kind, _COLOURS[kind])


def _lanes(lanes: dict[str, dict[str, list[tuple[float, float]]]], total: float) -> Markup:
    height, pitch = 22.0, 28.0
    shapes = []
    for i, (stream, boxes) in enumerate(lanes.items()):
        top = i * pitch
        shapes.append(tag("text", stream, x=LEFT - 8, y=top + height / 2 + 4, class_="small end"))
        shapes.append(tag("rect", x=LEFT, y=top, width=WIDTH, height=height, class_="lane"))
        for colour, places in boxes.items():
            scaled = [(LEFT + start / total * WIDTH, seconds / total * WIDTH) for start, seconds in places]
            shapes.append(path(scaled, top, height, colour))
    bottom = len(lanes) * pitch
    return tag(
        "svg",
        ticks(total, bottom),
        shapes,
        viewBox=f"0 0 {number(LEFT + WIDTH + 4)} {number(bottom + 22)}",
        role="img",
        aria_label=f"One micro-batch of {seconds_text(total)} on the streams {', '.join(lanes)}",
        class_="time",
    )
