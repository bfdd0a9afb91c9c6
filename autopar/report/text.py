"""The plan report for people: plain text of fixed width, the same for the same plan."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from autopar.cluster import Cluster
from autopar.report.binding import memory_limit
from autopar.report.tables import rendered, table
from autopar.report.units import bytes_text, seconds_text, share_text
from autopar.schedule import stage_ranks

if TYPE_CHECKING:
    from autopar.plan import Alternative, Plan, Prefill

_ZERO = {
    0: "ZeRO 0: parameters, gradients and optimizer state rest whole on every dp rank",
    1: "ZeRO 1: parameters and optimizer state rest split over {}, whole copies and gradients live for a step",
    2: "ZeRO 2: parameters, gradients and optimizer state rest split over {}, whole copies live for a step",
    3: "ZeRO 3: parameters, gradients and optimizer state rest split over {}",
}

#: The same without a training state.
_ZERO_OF_INFERENCE = {
    0: "parameters rest whole on every dp rank",
    1: "ZeRO 1: parameters rest split over {}, whole copies live from step to step",
    2: "ZeRO 2: parameters rest split over {}, whole copies live from step to step",
    3: "ZeRO 3: parameters rest split over {}, and are gathered where they are used",
}

#: What is no tensor's: the device's context, and gaps between what comes and goes.
_NO_TENSORS = ("workspace", "slack")


def text_report(plan: Plan) -> str:
    """What was chosen, what it costs and what came second, in plain text of fixed width without colours."""
    sections: list[tuple[str, RenderableType]] = [
        ("", _summary(plan)),
        *([("Pipeline stages", _stages(plan))] if plan.schedule is not None else []),
        ("What is split", _layers(plan)),
        ("Memory a device", _memory(plan)),
        *([("Memory of the ranks of pp, of each at its peak", _ranks(plan))] if plan.schedule is not None else []),
        ("Collectives of one step, a rank", _collectives(plan)),
        ("Operators whose work is repeated", _replicated(plan)),
        ("Runner-up plans", _alternatives(plan)),
        *([("What would change the decision", _what_ifs(plan))] if plan.what_ifs else []),
    ]
    return rendered(sections)


def _summary(plan: Plan) -> Table:
    def rows() -> Iterator[tuple[str, str]]:
        """What it is, and how it is here."""
        yield "Plan", f"{plan.model} on {Cluster.from_dict(plan.cluster)} ({plan.world_size} ranks)"
        said = {key: value for key, value in plan.workload.items() if not (plan.infers and key == "optimizer")}
        if given := [f"{key} {value}" for key, value in said.items() if value is not None]:
            yield "Workload", ", ".join(given)
        if plan.hints:
            yield "Hints", ", ".join(f"{name}={json.dumps(value)}" for name, value in plan.hints.items())
        yield "Degrees", " x ".join(f"{axis} {degree}" for axis, degree in plan.degrees.items())
        if plan.schedule is not None:
            chunks = len(plan.stages) // plan.degrees["pp"]
            yield "Pipeline", f"{len(plan.stages)} stages, {chunks} a rank of pp, by the schedule {plan.schedule}"
        yield "Storage", storage_text(plan)
        first = ", all forwards before the first backward" if plan.forwards_first else ""
        if not plan.infers:
            yield "Micro-batches", f"{plan.num_micro_batches} of {plan.micro_batch_size} sequences{first}"
            yield "Recompute", plan.recompute
        yield "Step time", f"{seconds_text(plan.step_time)}: {_parts(plan.breakdown)}"
        if plan.prefill is not None:
            yield "Generation", _generation(plan, plan.prefill)
        found = plan.binding
        yield "Limits", str(replace(found, limits=found.limits[:2]))
        yield "Work", f"one rank does at most {share_text(plan.flops_share)} of the model's FLOPs"
        yield "Gap", f"at most {share_text(plan.gap)} slower than the best of: {plan.gap_space}"

    return table(rows())


def _generation(plan: Plan, first: Prefill) -> str:
    """Tokens a second, and what prompts take."""
    batch, length = plan.workload["global_batch"], plan.workload["seq_len"]
    rate = f"{batch / plan.step_time:,.0f} tokens/s: one of each of {batch} samples a step, with {length} of context"
    takes = f"{seconds_text(first.seconds)} and {bytes_text(first.memory)} a device"
    return f"{rate}; prompts as long, all at once, take {takes}"


def storage_text(plan: Plan) -> str:
    """What ZeRO splits, over what, and how long copies live."""
    size, dp, cp = plan.zero_group_size, plan.degrees["dp"], plan.degrees["cp"]
    over = "dp" if size is None else f"groups of {size} ranks of dp"
    kept = "" if plan.reshard_after_forward else "; what is gathered lives from forward to backward"
    replicas = "" if size is None or plan.zero == 0 else f"; {dp // size} groups have replicas"
    words = _ZERO_OF_INFERENCE if plan.infers else _ZERO
    return words[plan.zero].format(over if cp == 1 else f"{over} and cp") + kept + replicas


def _stages(plan: Plan) -> Table:
    """One row a stage: where it runs, and its modules from the first to the last."""
    assert plan.schedule is not None
    ranks = stage_ranks(plan.schedule, plan.degrees["pp"], len(plan.stages))
    rows = [
        (f"stage {s}", f"pp rank {rank}", names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
        for s, (rank, names) in enumerate(zip(ranks, plan.stages, strict=True))
    ]
    return table(rows)


def _parts(breakdown: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {seconds_text(seconds)}" for what, seconds in breakdown.items())


def _layers(plan: Plan) -> Table:
    """One row a kind of layer. What all of them split of the tokens is said once."""
    of_tokens = [
        split
        for split in dict.fromkeys(s for layer in plan.layers for s in layer.splits)
        if split[0] in ("batch", "sequence")
    ]
    everywhere = [split for split in of_tokens if all(split in layer.splits for layer in plan.layers)]

    def words(splits: Iterable[tuple[str, str]], otherwise: str) -> str:
        return "; ".join(f"{meaning} over {axis}" for meaning, axis in splits) or otherwise

    nothing = "only the tokens" if everywhere else "nothing"
    rows = [("tokens", "", words(everywhere, "not the same in all layers" if of_tokens else "nothing"))]
    for layer in plan.layers:
        own = [split for split in layer.splits if split not in everywhere]
        rows.append((layer.name, f"x{layer.count}" if layer.count > 1 else "", words(own, nothing)))
    return table(rows, right=(1,))


def _memory(plan: Plan) -> Table:
    limit, origin = memory_limit(plan)
    peak = plan.peak_memory
    every = dict.fromkeys((*plan.memory, *plan.peak))
    kinds = [kind for kind in every if not plan.infers or plan.memory.get(kind) or plan.peak.get(kind)]
    rows = [(kind, *(bytes_text(part.get(kind, 0)) for part in (plan.memory, plan.peak)), "") for kind in kinds]
    rows.append(("total", "", bytes_text(peak), f"{share_text(peak / limit)} of the {bytes_text(limit)} {origin}"))
    if plan.prefill is not None:
        most = plan.prefill.memory
        rows.append(("total of prompts", "", bytes_text(most), f"{share_text(most / limit)}, while they are read"))
    return table(rows, ("", "at most", "at the peak", ""), right=(1, 2))


def _ranks(plan: Plan) -> Table:
    """One row for neighbours whose bytes read the same. What no tensor has is in ``other``."""
    kinds = [kind for kind in dict.fromkeys(kind for peak in plan.peaks for kind in peak) if kind not in _NO_TENSORS]

    def figures(peak: Mapping[str, int]) -> tuple[str, ...]:
        other = sum(peak.get(kind, 0) for kind in _NO_TENSORS)
        return tuple(bytes_text(n) for n in (*(peak.get(kind, 0) for kind in kinds), other, sum(peak.values())))

    rows = []
    for shown, same in itertools.groupby(enumerate(map(figures, plan.peaks)), key=lambda row: row[1]):
        ranks = [rank for rank, _ in same]
        rows.append((f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}", *shown))
    return table(rows, ("pp rank", *kinds, "other", "total"), right=range(1, len(kinds) + 3))


def _collectives(plan: Plan) -> Table | str:
    if not plan.collectives:
        return "none"
    rows = [
        (
            c.kind,
            c.axis,
            c.purpose,
            str(c.count),
            bytes_text(c.bytes),
            bytes_text(c.wire_bytes),
            seconds_text(c.seconds),
        )
        for c in plan.collectives
    ]
    return table(rows, ("kind", "axis", "of", "count", "tensors", "sent", "time"), right=(3, 4, 5, 6))


def _replicated(plan: Plan) -> Table | str:
    if not plan.replicated:
        return "none"
    rows = [
        (r.operator, ", ".join(r.axes), str(r.count), share_text(r.flops_share), share_text(r.bytes_share), r.reason)
        for r in plan.replicated
    ]
    return table(rows, ("operator", "over", "count", "of FLOPs", "of bytes", "because"), right=(2, 3, 4))


def _alternatives(plan: Plan) -> Table | str:
    return plans_table(plan.alternatives) if plan.alternatives else "none"


def _what_ifs(plan: Plan) -> Table:
    """One row a question."""
    rows = [
        (
            w.question,
            w.error or w.decision,
            "" if w.step_time is None else seconds_text(w.step_time),
            "" if (speed := w.speed(plan)) is None else f"{speed:.2f}x",
            "" if w.peak_memory is None else bytes_text(w.peak_memory),
            "" if w.error else "another plan" if w.changes else "the same",
        )
        for w in plan.what_ifs
    ]
    return table(rows, ("with", "would be", "step time", "speed", "memory", ""), right=(2, 3, 4))


def plans_table(plans: Iterable[Alternative]) -> Table:
    """One row a plan."""
    rows = [
        (
            " x ".join(f"{axis} {degree}" for axis, degree in a.degrees.items() if degree > 1) or "one rank",
            f"ZeRO {a.zero}" + (f" in {a.zero_group_size}" if a.zero_group_size else ""),
            f"{a.micro_batches}" + (f" {a.schedule}" if a.schedule else ""),
            a.recompute,
            seconds_text(a.step_time),
            bytes_text(a.peak_memory),
            a.reason,
        )
        for a in plans
    ]
    columns = ("degrees", "storage", "micro-batches", "recompute", "step time", "memory", "why it lost")
    return table(rows, columns, right=(4, 5))
