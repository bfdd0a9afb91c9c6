"""Why a plan splits what it splits: the options that the solver had, what each costs, and why one won.

A plan carries its decisions as small tables (`Decision`), blocks of one class as one, so that a plan read from a file
explains itself without the model. Seconds are those of a step and bytes those of a device, of all blocks together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from autopar.errors import PlanError
from autopar.hint_checks import nearest_names
from autopar.report.tables import rendered, table
from autopar.report.units import bytes_text, seconds_text
from autopar.sharding.layout import Layout

if TYPE_CHECKING:
    from autopar.plan import Plan

#: Options whose seconds differ by less, as a share of them, are equally fast: a plan keeps six digits.
TIE = 1e-5

#: Numbers of blocks as a decision writes them, such as "0-15, 17-31".
RANGES = re.compile(r"(\d+(-\d+)?(, \d+(-\d+)?)*)?")


@dataclass(frozen=True)
class Option:
    """One way to split an operator or a parameter, in words such as "batch over dp; ffn over tp".

    ``seconds`` are its own work, ``communication`` is what the collectives between it and its neighbours would take if
    these stayed as they are (None: there is no way between their layouts), both a step and of all blocks of the class;
    ``bytes`` are what it keeps on a device; ``ruled_out`` says by what it is excluded ("hints"), if it is.
    """

    choice: str
    seconds: float
    communication: float | None
    bytes: int
    ruled_out: str

    @property
    def total(self) -> float | None:
        """Seconds with communication, None if there is no way."""
        return None if self.communication is None else self.seconds + self.communication


@dataclass(frozen=True)
class Decision:
    """What was decided for an operator or a parameter: the cheapest of its options with the one that was taken, which
    is that at ``chosen``, and how many more were ``left_out``.

    ``module`` and ``name`` have ``*`` for the number of a block where ``blocks``, ranges such as "0-15, 17-31", are
    alike. ``kind`` is "parameter", or an operator with its direction, such as "einsum forward".
    """

    name: str
    module: str
    kind: str
    blocks: str
    chosen: int
    left_out: int
    options: tuple[Option, ...]

    @property
    def count(self) -> int:
        """How many blocks decide alike."""
        return len(self._numbers()) or 1

    def names(self) -> Iterator[str]:
        """Every name of it: modules, or parameters, of all its blocks and of the class."""
        for text in (self.name, self.module) if self.kind == "parameter" else (self.module,):
            yield text
            yield from (text.replace("*", str(number), 1) for number in self._numbers())

    def _numbers(self) -> list[int]:
        ranges = (part.partition("-") for part in self.blocks.split(", ") if part)
        return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]


@dataclass(frozen=True)
class Verdict:
    """One option of one decision, as `Explanation` judges it. ``slower`` is by how many seconds a step would be longer
    with it and everything else as it is, None where there is no way; ``why`` says why it won or lost."""

    name: str
    kind: str
    choice: str
    seconds: float
    communication: float | None
    bytes: int
    chosen: bool
    slower: float | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """The decisions of a plan that match a pattern, each with its options. ``str()`` is a table for people."""

    pattern: str
    summary: str
    decisions: tuple[Decision, ...]
    verdicts: tuple[tuple[Verdict, ...], ...]

    @property
    def options(self) -> tuple[Verdict, ...]:
        """The options of all decisions, each decision's own first, then from the fastest on."""
        return tuple(verdict for found in self.verdicts for verdict in found)

    def __str__(self) -> str:
        sections: list[tuple[str, RenderableType]] = [("", f"{self.pattern}: {self.summary}")]
        for decision, verdicts in zip(self.decisions, self.verdicts, strict=True):
            count = f" x{decision.count}" if decision.count > 1 else ""
            more = f", {decision.left_out} slower ones left out" if decision.left_out else ""
            rows = [
                (
                    "*" if v.chosen else "",
                    v.choice,
                    seconds_text(v.seconds),
                    "no way" if v.communication is None else seconds_text(v.communication),
                    bytes_text(v.bytes),
                    v.why,
                )
                for v in verdicts
            ]
            header = ("", "option", "work", "exchange", "keeps", "why")
            sections.append((f"{decision.name} ({decision.kind}{count}{more})", table(rows, header, right=(2, 3, 4))))
        return rendered(sections)


def layout_text(layout: Layout) -> str:
    """Where a parameter rests: "dim 0 over tp, dp; dim 1 over cp", the outermost axis of a dim first; or "whole"."""
    dims = [f"dim {d} over {', '.join(axes)}" for d, axes in enumerate(layout.dims) if axes]
    return "; ".join(dims) or "whole"


def explain(plan: Plan, pattern: str) -> Explanation:
    """The decisions of the modules and parameters that ``pattern`` matches: a name, ``*`` standing for any part of it,
    of a parameter, of a module, or of one around it. PlanError, with the nearest names, if there is none."""
    expression = re.compile(".+".join(map(re.escape, str(pattern).split("*"))) + r"(\..+)?")
    found = tuple(d for d in plan.decisions if any(expression.fullmatch(name) for name in d.names()))
    if not found:
        raise PlanError(
            f"The plan has nothing to explain of {pattern!r}.",
            expected="a module or parameter of the model, * standing for any part of its name",
            found=f"{pattern!r} among {len(plan.decisions)} decisions",
            change=nearest_names(str(pattern), _known(plan)) if plan.decisions else "plan the model again",
        )
    limits = ", ".join(f"{axis} {n}" for axis, n in plan.degrees.items())
    hinted = ", ".join(name for name in plan.hints if name in plan.degrees or name == "zero")
    decisions = "1 decision" if len(found) == 1 else f"{len(found)} decisions"
    summary = f"{decisions} on {limits}" + (f" (hinted: {hinted})" if hinted else "")
    return Explanation(str(pattern), summary, found, tuple(verdicts(d) for d in found))


def _known(plan: Plan) -> list[str]:
    """Names that a pattern may have meant: of classes, and of the modules around them."""
    names: dict[str, None] = {}
    for decision in plan.decisions:
        parts = (decision.name if decision.kind == "parameter" else decision.module).split(".")
        names |= dict.fromkeys(".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return [name for name in names if name]


def verdicts(decision: Decision) -> tuple[Verdict, ...]:
    """Every option of a decision with its verdict, the chosen one first."""
    won = decision.options[decision.chosen]
    rest = [option for option in decision.options if option is not won]
    rest.sort(key=lambda o: (o.total is None, o.total or 0.0))
    return tuple(
        Verdict(
            decision.name, decision.kind, o.choice, o.seconds, o.communication, o.bytes, o is won, _slower(o, won), why
        )
        for o, why in [(won, _why_won(won, rest)), *((o, _why_lost(o, won)) for o in rest)]
    )


def _slower(option: Option, won: Option) -> float | None:
    """By how many seconds ``option`` is slower than what was taken; 0 for a tie."""
    if option.total is None or won.total is None:
        return None
    difference = option.total - won.total
    return 0.0 if abs(difference) <= TIE * max(option.total, won.total) else difference


def _why_won(won: Option, rest: list[Option]) -> str:
    """Why the chosen option won: what would be better is closed or keeps more bytes."""
    able = [(slower, o) for o in rest if (slower := _slower(o, won)) is not None]
    if not able:
        return "chosen: no other is possible as long as its neighbours stay" if rest else "chosen: the only option"
    faster = [o for slower, o in able if slower < 0]
    heavier = [o for o in faster if not o.ruled_out and o.bytes > won.bytes]
    if heavier:
        return f"chosen: {heavier[0].choice} needs {bytes_text(heavier[0].bytes - won.bytes)} more memory"
    if excluded := [o for o in faster if o.ruled_out]:
        best, gain = excluded[0], -(_slower(excluded[0], won) or 0.0)
        return f"chosen: {best.choice}, {seconds_text(gain)} faster, is ruled out by {best.ruled_out}"
    if faster:
        return f"chosen, although {faster[0].choice} alone is faster: within the plan's gap"
    slower = min(slower for slower, _ in able)
    return f"chosen: the fastest by {seconds_text(slower)}" if slower else "chosen: as fast as any other"


def _why_lost(option: Option, won: Option) -> str:
    """Why an option lost, first of all what makes it impossible."""
    slower = _slower(option, won)
    if option.ruled_out:
        return f"ruled out by {option.ruled_out}" + (f", {_pace(slower)}" if slower is not None else "")
    if slower is None or option.communication is None or won.communication is None:
        return "there is no way between it and its neighbours"
    if slower < 0:
        more = option.bytes - won.bytes
        return f"{_pace(slower)}, " + (f"but keeps {bytes_text(more)} more" if more > 0 else "within the plan's gap")
    if slower == 0:
        return f"{_pace(slower)}, and keeps more" if option.bytes > won.bytes else _pace(slower)
    changes = {"work": option.seconds - won.seconds, "exchange": option.communication - won.communication}
    parts = [f"{what} {_signed(t)}" for what, t in changes.items() if abs(t) > TIE * slower]
    return f"{_pace(slower)}: {', '.join(parts)}"


def _pace(slower: float) -> str:
    return f"{seconds_text(abs(slower))} {'slower' if slower > 0 else 'faster'}" if slower else "as fast"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{seconds_text(abs(seconds))}"
