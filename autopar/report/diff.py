"""What differs between two plans of one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from autopar.capture.blocks import pattern
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.report.explain import layout_text
from autopar.report.tables import rendered, table
from autopar.report.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopar.plan import Plan

#: Numbers that differ by less, as a share of the larger, are the same.
SAME = 1e-9

#: The groups of differences, in the order in which they are shown, with their titles.
GROUPS = {
    "given": "What the plans were made for",
    "decided": "What was decided",
    "split": "What is split in the layers",
    "storage": "How parameters rest",
    "seconds": "Seconds of a step",
    "bytes": "Bytes a device",
}


@dataclass(frozen=True)
class Difference:
    """One thing that differs: ``group`` is one of `GROUPS`, ``mine`` and ``other`` are texts, for ``seconds`` and
    ``bytes`` numbers, and "" or 0 where a plan lacks the thing."""

    group: str
    what: str
    mine: str | float
    other: str | float


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans, none if they are equal; true if there is any. ``str()`` is a table for people."""

    model: str
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        if not self.differences:
            return f"The plans of {self.model} are the same."
        sections: list[tuple[str, RenderableType]] = []
        for group, title in GROUPS.items():
            rows = [_row(d) for d in self.differences if d.group == group]
            if rows:
                sections.append((title, table(rows, ("", "this plan", "the other", ""), right=_numeric(group))))
        return rendered(sections)


def diff(mine: Plan, other: Plan) -> PlanDiff:
    """What differs between two plans of one model. PlanError for plans of different models."""
    if mine.structure != other.structure:
        raise PlanError(
            "The plans are of different models.",
            expected=f"two plans of {mine.model} with the same parameters",
            found=_other_structure(mine, other),
            change="plan the same model twice, for instance with other hints or on another cluster",
        )
    every = (_given, decided, _split, _storage, _seconds, _bytes)
    return PlanDiff(mine.model, tuple(d for part in every for d in part(mine, other)))


def _other_structure(mine: Plan, other: Plan) -> str:
    """What is different in the model of the other plan."""
    ours, theirs = mine.parameters, other.parameters
    found = [f"{n} only in the first" for n in ours if n not in theirs]
    found += [f"{n} only in the second" for n in theirs if n not in ours]
    shared = (n for n in ours if n in theirs)
    found += [f"{n} of {ours[n].shape} and {theirs[n].shape}" for n in shared if ours[n].shape != theirs[n].shape]
    return f"plans of {mine.model} and {other.model}: {'; '.join(found[:3]) or 'other graphs'}"


def _numeric(group: str) -> tuple[int, ...]:
    return (1, 2, 3) if group in ("seconds", "bytes") else ()


def _row(d: Difference) -> tuple[str, str, str, str]:
    if isinstance(d.mine, str) or isinstance(d.other, str):
        return d.what, str(d.mine) or "-", str(d.other) or "-", ""
    text: Callable[[float], str] = seconds_text if d.group == "seconds" else bytes_text
    ratio = f"{d.other / d.mine:.2f}x" if d.mine > 0 else ""
    return d.what, text(d.mine), text(d.other), ratio


def _texts(group: str, pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[Difference]:
    for what, (a, b) in pairs.items():
        if a != b:
            yield Difference(group, what, *("" if value is None else str(value) for value in (a, b)))


def _numbers(group: str, mine: Mapping[str, float], other: Mapping[str, float]) -> Iterator[Difference]:
    for what in dict.fromkeys((*mine, *other)):
        a, b = mine.get(what, 0), other.get(what, 0)
        if abs(a - b) > SAME * max(abs(a), abs(b)):
            yield Difference(group, what, a, b)


def _given(mine: Plan, other: Plan) -> Iterator[Difference]:
    clusters = [str(Cluster.from_dict(plan.cluster)) for plan in (mine, other)]
    if mine.cluster != other.cluster:  # numbers of a device may differ where its name does not
        same = clusters[0] == clusters[1]
        yield Difference("given", "cluster", clusters[0], clusters[1] + (" (other numbers)" if same else ""))
    for what in ("workload", "hints"):
        ours, theirs = getattr(mine, what), getattr(other, what)
        keys = dict.fromkeys((*ours, *theirs))
        yield from _texts("given", {f"{what} {key}": (ours.get(key), theirs.get(key)) for key in keys})


def decided(mine: Plan, other: Plan) -> Iterator[Difference]:
    """What was decided otherwise, but for layouts."""
    axes = dict.fromkeys((*mine.degrees, *other.degrees))
    yield from _texts("decided", {axis: (mine.degrees.get(axis, 1), other.degrees.get(axis, 1)) for axis in axes})
    names = ("zero", "zero_group_size", "reshard_after_forward", "micro_batch_size", "num_micro_batches", "schedule",
             "recompute")  # fmt: skip
    yield from _texts("decided", {name: (getattr(mine, name), getattr(other, name)) for name in names})
    cuts = [tuple(names[0] for names in plan.stages if names) for plan in (mine, other)]
    yield from _texts("decided", {"stages begin at": (", ".join(cuts[0]), ", ".join(cuts[1]))})


def _split(mine: Plan, other: Plan) -> Iterator[Difference]:
    """What layers split, in words, and how many operators split something else, backward ones among them."""

    def words(plan: Plan) -> dict[str, str]:
        return {
            layer.name: "; ".join(f"{meaning} over {axis}" for meaning, axis in layer.splits) or "nothing"
            for layer in plan.layers
        }

    ours, theirs = words(mine), words(other)
    for name in dict.fromkeys((*ours, *theirs)):
        yield from _texts("split", {name: (ours.get(name), theirs.get(name))})
    keys = dict.fromkeys((*mine.operators, *other.operators))
    changed = [key for key in keys if _splits(mine, key) != _splits(other, key)]
    if changed:
        yield Difference("split", "operators that split something else", f"{len(changed)} of {len(keys)}",
                         f"among them {changed[0]}")  # fmt: skip


def _splits(plan: Plan, key: str) -> dict[str, str]:
    """What an operator splits on the axes that have more than one rank."""
    return {a: factor for a, factor in plan.operators.get(key, {}).items() if plan.mesh.degree(a) > 1 and factor != "-"}


def _storage(mine: Plan, other: Plan) -> Iterator[Difference]:
    """Layouts of parameters that differ, those of all blocks that change alike in one row."""
    changed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, p in mine.parameters.items():
        a, b = layout_text(p.storage), layout_text(other.parameters[name].storage)
        if a != b:
            changed[pattern(name), a, b].append(name)
    for (where, a, b), names in changed.items():
        yield Difference("storage", f"{where} x{len(names)}" if len(names) > 1 else names[0], a, b)


def _seconds(mine: Plan, other: Plan) -> Iterator[Difference]:
    yield from _numbers("seconds", *({"a step": plan.step_time, **plan.breakdown} for plan in (mine, other)))


def _bytes(mine: Plan, other: Plan) -> Iterator[Difference]:
    yield from _numbers("bytes", *({"at the peak": plan.peak_memory, **plan.memory} for plan in (mine, other)))
