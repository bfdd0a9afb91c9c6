"""What was measured beside what a plan predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from autopar.errors import PlanError
from autopar.hint_checks import nearest_names
from autopar.report.tables import rendered, table
from autopar.report.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopar.plan import Plan

#: What may be measured: seconds of a step, of every step of a run, or of the parts of `Plan.breakdown` by name.
Measured = float | Sequence[float] | Mapping[str, float]

#: Names of the whole step among measured parts.
STEP = "step_time"


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured, by part: ``seconds`` of ``step_time`` and of the parts that were measured, ``bytes`` of
    ``peak_memory`` if it was. ``steps`` is how many steps were measured, of which the median is taken."""

    seconds: dict[str, tuple[float, float]]
    bytes: dict[str, tuple[float, float]]
    steps: int
    spread: float
    where: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Measured seconds of a step for each that was predicted."""
        predicted, measured = self.seconds[STEP]
        return measured / predicted

    @property
    def memory_ratio(self) -> float | None:
        """Measured bytes at the peak for each that was predicted; None if they were not measured."""
        if not self.bytes:
            return None
        predicted, measured = self.bytes["peak_memory"]
        return measured / predicted

    def __str__(self) -> str:
        rows = [_row(what, *pair, seconds_text) for what, pair in self.seconds.items()]
        rows += [_row(what, *pair, bytes_text) for what, pair in self.bytes.items()]
        sections: list[tuple[str, RenderableType]] = [
            ("", table(rows, ("", "predicted", "measured", "measured / predicted"), right=(1, 2, 3)))
        ]
        if self.steps > 1:
            text = f"median of {self.steps} steps, half of which lie within {100 * self.spread:.2g}% of it"
            sections.append(("Measured", text))
        sections.append(("Where the difference may lie", "\n".join(self.where)))
        return rendered(sections)


def compare(plan: Plan, measured: Measured, peak_memory: float | None = None) -> Comparison:
    """Compare what was measured with what ``plan`` predicts. ``measured`` are seconds: of a step, of several steps (the
    median counts, so that a slow first one does not), or of parts by their names in ``plan.breakdown``, and
    ``step_time``; ``peak_memory`` is in bytes a device. PlanError for what is no time, and for an unknown part."""
    times = _times(measured)
    parts = _parts(plan, measured) if isinstance(measured, Mapping) else {}
    whole = statistics.median(times) if times else parts.get(STEP, sum(parts.values()))
    seconds = {STEP: (plan.step_time, whole)}
    seconds |= {name: (plan.breakdown[name], value) for name, value in parts.items() if name != STEP}
    found: dict[str, tuple[float, float]] = {}
    if peak_memory is not None:
        found["peak_memory"] = (float(plan.needed_memory), _positive("peak_memory", peak_memory))
    spread = statistics.median(abs(t - whole) for t in times) / whole if times else 0.0
    where = tuple(_where(plan, seconds)) + tuple(_where_bytes(plan, found))
    return Comparison(seconds, found, len(times), spread, where)


def _times(measured: Measured) -> list[float]:
    """Seconds of steps; none if parts were measured."""
    if isinstance(measured, Mapping):
        return []
    if isinstance(measured, Sequence):
        if not measured:
            raise _bad("no step", "[]")
        return [_positive("a step", t) for t in measured]
    return [_positive("a step", measured)]


def _parts(plan: Plan, measured: Mapping[str, float]) -> dict[str, float]:
    """Seconds of parts; together they are a step if ``step_time`` is not among them."""
    known = (STEP, *plan.breakdown)
    for name in measured:
        if name not in known:
            raise PlanError(
                f"The plan predicts no part {name!r} of a step.",
                expected=f"seconds of {', '.join(known)}",
                found=repr(name),
                change=nearest_names(str(name), known),
            )
    if missing := [name for name in plan.breakdown if name not in measured and STEP not in measured]:
        raise PlanError(
            f"The measured parts leave out {missing[0]}.",
            expected=f"seconds of {STEP}, or of all of {', '.join(plan.breakdown)}",
            found=", ".join(measured) or "nothing",
            change=f"add {missing[0]}, or {STEP}",
        )
    return {name: _positive(name, value, zero=name != STEP) for name, value in measured.items()}


def _positive(what: str, value: object, zero: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):  # type: ignore[operator]  # a number, as good says
        raise _bad(what, repr(value))
    return float(value)  # type: ignore[arg-type]


def _bad(what: str, found: str) -> PlanError:
    return PlanError(
        f"What was measured of {what} is no number.",
        expected="seconds of a step (a number, a list of them, or a mapping from parts), and peak bytes above 0",
        found=found,
        change="pass for instance plan.compare([0.41, 0.40, 0.42], peak_memory=21.3e9)",
    )


def _row(what: str, predicted: float, measured: float, text: Callable[[float], str]) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else ""
    return what, text(predicted), text(measured), ratio


def _where(plan: Plan, seconds: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Which part would explain the difference: the one that was measured to differ most, else for every part how far
    off it would have to be, alone, the least first."""
    predicted, measured = seconds[STEP]
    difference = measured - predicted
    known = {name: b - a for name, (a, b) in seconds.items() if name != STEP}
    if known:
        name = max(known, key=lambda name: abs(known[name]))
        a, b = seconds[name]
        yield f"{name}: {seconds_text(abs(b - a))} {'more' if b > a else 'less'} than predicted"
    rest = difference - sum(known.values())
    unknown = {name: t for name, t in plan.breakdown.items() if name not in known and t > 0 and t + rest > 0}
    if abs(rest) <= 0.01 * predicted or not unknown:
        return
    for name, t in sorted(unknown.items(), key=lambda part: abs(math.log((part[1] + rest) / part[1]))):
        yield f"if all of it lay in {name}: {seconds_text(t + rest)}, {(t + rest) / t:.2f} times what was predicted"


def _where_bytes(plan: Plan, found: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Which kinds of memory are large enough to explain a difference in bytes."""
    for a, b in found.values():
        if abs(b - a) > 0.01 * a:
            kind = max(plan.peak, key=lambda kind: plan.peak[kind])
            yield f"memory: {bytes_text(abs(b - a))} {'more' if b > a else 'less'}; most was predicted for {kind}"
