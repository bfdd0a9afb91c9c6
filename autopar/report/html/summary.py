"""What was chosen and why, in words, and the numbers that one looks for first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.report.binding import memory_limit
from autopar.report.html.figures import count_text, mfu, work_of
from autopar.report.html.markup import Markup, tag
from autopar.report.text import storage_text
from autopar.report.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from autopar.plan import Alternative, Plan

#: What the degrees of a plan do, where they are more than 1.
_DOES = {
    "pp": "pp {} cuts the layers into pipeline stages",
    "dp": "dp {} splits the batch",
    "cp": "cp {} splits every sequence",
    "tp": "tp {} splits the layers themselves",
    "ep": "ep {} spreads the experts",
}


def header(plan: Plan) -> Markup:
    """The model, the machine and the work."""
    cluster = Cluster.from_dict(plan.cluster)
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''} of {cluster.devices_per_host}"
    return tag(
        "header",
        tag("p", "autopar plan", class_="brand"),
        tag("h1", plan.model),
        tag("p", f"on {plan.world_size} x {cluster.device.name} ({hosts})", class_="on"),
        tag("p", _workload(plan), class_="on"),
        tag("button", "Dark", type="button", id="theme", aria_pressed="false", hidden=True),
    )


def _workload(plan: Plan) -> str:
    """The batch and how it is computed."""
    asked = plan.workload
    batch, length = asked.get("global_batch"), asked.get("seq_len")
    if plan.prefill is not None:
        computed = f", {asked['param_dtype']} computation" if asked.get("param_dtype") else ""
        return f"to generate: a token of each of {batch} samples a step, with {length} of context{computed}"
    parts = [f"{batch} sequences of {length} tokens a step" if length else f"{batch} samples a step"] if batch else []
    parts += [f"{asked['param_dtype']} computation"] if asked.get("param_dtype") else []
    parts += [f"optimizer {asked['optimizer']}"] if asked.get("optimizer") else []
    return ", ".join(parts)


def tiles(plan: Plan) -> Markup:
    """Step time, throughput, MFU, memory and gap."""
    limit, origin = memory_limit(plan)
    work, unit = work_of(plan)
    count = plan.num_micro_batches
    parts = "without a backward" if plan.infers else f"{count} micro-batch{'es' if count > 1 else ''}"
    shown = [("Step time", seconds_text(plan.step_time), parts)]
    if work:
        rate = work / plan.step_time
        shown.append(
            ("Throughput", f"{count_text(rate)} {unit}/s", f"{count_text(rate / plan.world_size)} a device")
        )
    if (used := mfu(plan)) is not None:
        shown.append(("MFU", share_text(used), "of the devices' peak FLOP/s"))
    shown.append(
        (
            "Peak memory",
            bytes_text(plan.needed_memory),
            f"{_spare(limit - plan.needed_memory)} of the {bytes_text(limit)} {origin}",
        )
    )
    shown.append(("Gap", f"≤ {share_text(plan.gap)}", "longer than the best of its space"))
    return tag("dl", [tag("div", tag("dt", a), tag("dd", b), tag("dd", c, class_="more")) for a, b, c in shown],
               class_="tiles")  # fmt: skip


def summary(plan: Plan) -> Markup:
    """The decision in sentences, each under what it answers."""
    rows = [(what, list(sentences)) for what, sentences in _answers(plan)]
    return tag("dl", [tag("div", tag("dt", what), tag("dd", " ".join(words))) for what, words in rows if words],
               class_="words")  # fmt: skip


def _answers(plan: Plan) -> Iterator[tuple[str, Iterator[str]]]:
    yield "Chosen", _chosen(plan)
    yield "Cost", _cost(plan)
    yield "Memory", _memory(plan)
    yield "Why", _why(plan)
    yield "Limited by", _limits(plan)
    yield "Certainty", iter([f"A step takes at most {share_text(plan.gap)} longer than the best of: {plan.gap_space}."])
    if plan.hints:
        given = ", ".join(f"{name}={json.dumps(value)}" for name, value in plan.hints.items())
        yield "Hints", iter([f"Given by the user: {given}."])


def _chosen(plan: Plan) -> Iterator[str]:
    does = [text.format(plan.degrees[axis]) for axis, text in _DOES.items() if plan.degrees.get(axis, 1) > 1]
    many = f"{plan.world_size} devices" if plan.world_size > 1 else "one device"
    yield f"On {many}: {', '.join(does) or 'nothing is split'}."
    if plan.schedule is not None:
        chunks = len(plan.stages) // plan.degrees["pp"]
        yield f"{len(plan.stages)} stages, {chunks} a rank, run by the schedule {plan.schedule}."
    stored = storage_text(plan)
    yield f"{stored[0].upper()}{stored[1:]}."
    if plan.infers:
        return
    count, size = plan.num_micro_batches, plan.micro_batch_size
    parts = f"{count} micro-batch{'es' if count > 1 else ''} of {size} sequence{'s' if size > 1 else ''}"
    yield f"A step runs {parts}" + (
        "; nothing is recomputed." if plan.recompute == "none" else f"; the backward recomputes: {plan.recompute}."
    )


def _cost(plan: Plan) -> Iterator[str]:
    work, unit = work_of(plan)
    if work:
        rate = work / plan.step_time
        yield (
            f"{count_text(work)} {unit} a step in {seconds_text(plan.step_time)}: {count_text(rate)} {unit} a second, "
            f"{count_text(rate / plan.world_size)} a device."
        )
    if plan.prefill is not None:
        takes = f"{seconds_text(plan.prefill.seconds)} and {bytes_text(plan.prefill.memory)} a device"
        context = f"a context of {plan.workload['seq_len']} tokens"
        yield f"A step is one token of every sample with {context}; prompts that fill it, all at once, take {takes}."
    if (used := mfu(plan)) is not None:
        yield f"That is {share_text(used)} of what the devices could compute (MFU)."
    hidden = plan.breakdown.get("compute", 0.0) / plan.step_time
    yield f"{share_text(hidden)} of the step is computation."


def _memory(plan: Plan) -> Iterator[str]:
    limit, origin = memory_limit(plan)
    kind = max(plan.peak, key=plan.peak.__getitem__)
    where = f" (rank {plan.peaks.index(plan.peak)} of the pipeline)" if len(plan.peaks) > 1 else ""
    yield (
        f"The fullest device{where} holds {bytes_text(plan.peak_memory)}, with {_spare(limit - plan.peak_memory)} of "
        f"the {bytes_text(limit)} {origin}; most of it {kind}, {bytes_text(plan.peak[kind])}."
    )
    if plan.prefill is not None:
        most = plan.prefill.memory
        yield f"While prompts are read it holds {bytes_text(most)}, with {_spare(limit - most)}."


def _spare(count: int) -> str:
    return f"{bytes_text(count)} to spare" if count >= 0 else f"{bytes_text(-count)} too much"


def _why(plan: Plan) -> Iterator[str]:
    """How the next best plan lost, the next best of other degrees, and the best of those that do not fit."""
    limit, _ = memory_limit(plan)
    ordered = sorted(plan.alternatives, key=lambda a: a.step_time)
    fit = [a for a in ordered if a.peak_memory <= limit]
    if fit:
        yield f"Of {len(ordered)} runner-ups the nearest has {_instead(plan, fit[0])}: {_longer(plan, fit[0])}."
    others = [a for a in fit[1:] if a.degrees != plan.degrees]
    if others and fit[0].degrees == plan.degrees:
        yield f"Of other degrees it is {_degrees(others[0].degrees)}: {_longer(plan, others[0])}."
    unfit = [a for a in ordered if a.peak_memory > limit and a.step_time < plan.step_time]
    if unfit:
        more = bytes_text(unfit[0].peak_memory - limit)
        yield f"With {more} more memory a step could take about {seconds_text(unfit[0].step_time)}."


def _instead(plan: Plan, other: Alternative) -> str:
    """What another plan has decided otherwise."""
    if other.degrees != plan.degrees:
        return f"{_degrees(other.degrees)} with ZeRO {other.zero}"
    pairs = {
        "ZeRO": (_zero(plan.zero, plan.zero_group_size), _zero(other.zero, other.zero_group_size)),
        "micro-batches": (plan.num_micro_batches, other.micro_batches),
        "schedule": (plan.schedule, other.schedule),
        "recompute": (plan.recompute, other.recompute),
    }
    return ", ".join(f"{what} {b} instead of {a}" for what, (a, b) in pairs.items() if a != b) or "other layouts"


def _degrees(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one rank"


def _zero(stage: int, group: int | None) -> str:
    return f"{stage} in groups of {group}" if group else str(stage)


def _longer(plan: Plan, other: Alternative) -> str:
    _, _, why = other.reason.partition(": ")
    return f"{share_text(max(0.0, other.step_time / plan.step_time - 1))} longer" + (f" ({why})" if why else "")


def _limits(plan: Plan) -> Iterator[str]:
    found = plan.binding
    for limit in found.limits[:2]:
        if limit.saves > 0.005 * plan.step_time or limit is found.limits[0]:
            saved = f"{seconds_text(limit.saves)} ({share_text(limit.saves / plan.step_time)})"
            yield f"{limit.resource[0].upper()}{limit.resource[1:]}: {limit.change} would save {saved}."
