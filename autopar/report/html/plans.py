"""The plans that lost, and those that other questions would have got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.report.html.markup import Markup, cell, grid, number, section, tag
from autopar.report.units import bytes_text, seconds_text, share_text
from autopar.report.what_if import decision_text

if TYPE_CHECKING:
    from autopar.plan import Alternative, Plan
    from autopar.report.what_if import WhatIf


def alternatives(plan: Plan) -> Markup:
    """The plan and those that came near it, with why they lost."""
    if not plan.alternatives:
        return section("alternatives", "What came second", "No other plan was found.")
    most = max(abs(a.step_time / plan.step_time - 1) for a in plan.alternatives)
    header = (("degrees", ""), ("storage", ""), ("micro-batches", ""), ("recompute", ""), ("step time", "n"),
              ("longer by", ""), ("memory", "n"), ("why it lost", ""))  # fmt: skip
    chosen = _row(
        plan.degrees, plan.zero, plan.zero_group_size, plan.num_micro_batches, plan.schedule, plan.recompute,
        plan.step_time, plan.needed_memory, "chosen", cell("", value=0.0),
    )  # fmt: skip
    rows = [chosen, *(_alternative(a, a.step_time / plan.step_time - 1, most) for a in plan.alternatives)]
    table = grid(header, [tag("tbody", row) for row in rows], "Plans that lost, and why", sortable=True)
    lead = "Each was solved and simulated like the one that was chosen; of what does not fit all figures are estimates."
    return section("alternatives", "What came second, and why it lost", lead, table)


def _alternative(a: Alternative, longer: float, most: float) -> Markup:
    """A plan whose step is ``longer`` by a fraction; ``most`` is the largest of all plans."""
    width = number(100 * abs(longer) / most if most else 0.0)
    bar = tag("span", class_="k-backward" if longer >= 0 else "k-exposed", style=f"width:{width}%")
    text = share_text(longer) if longer >= 0 else f"-{share_text(-longer)}"
    difference = tag("span", tag("span", bar, class_="bar small", aria_hidden="true"), text, class_="longer")
    return _row(
        a.degrees, a.zero, a.zero_group_size, a.micro_batches, a.schedule, a.recompute, a.step_time, a.peak_memory,
        a.reason, cell(difference, value=longer),
    )  # fmt: skip


def _row(
    degrees: dict[str, int],
    zero: int,
    group: int | None,
    micro_batches: int,
    schedule: str | None,
    recompute: str,
    seconds: float,
    memory: int,
    reason: str,
    difference: Markup,
) -> Markup:
    words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one rank"
    return tag(
        "tr",
        tag("th", words, scope="row"),
        cell(f"ZeRO {zero}" + (f" in {group}" if group else "")),
        cell(f"{micro_batches}" + (f" {schedule}" if schedule else ""), value=micro_batches),
        cell(recompute),
        cell(seconds_text(seconds), "n", seconds),
        difference,
        cell(bytes_text(memory), "n", memory),
        cell(reason),
        class_="chosen" if reason == "chosen" else None,
    )


def what_ifs(plan: Plan) -> Markup:
    """The questions that were asked with what would be decided, or how to ask them."""
    title = "What would change the decision"
    if not plan.what_ifs:
        asking = [tag("code", text) for text in ("autopar plan ... --what-if", "plan.what_if()")]
        words = ["Not asked for this plan: ", asking[0], " does, and so does ", asking[1], " in the process that made "
                 "the plan. Both search again for each question."]  # fmt: skip
        return section("what-if", title, words)
    lead = f"Each question was searched anew. Now: {decision_text(plan)}."
    return section("what-if", title, lead, tag("div", [_what_if(plan, w) for w in plan.what_ifs], class_="cards"))


def _what_if(plan: Plan, w: WhatIf) -> Markup:
    verdict = "no plan" if w.error else "another plan" if w.changes else "the same plan"
    kind = "none" if w.error else "changed" if w.changes else "same"
    return tag(
        "article",
        tag("h3", f"With {w.question}"),
        tag("p", verdict, class_=f"verdict {kind}"),
        tag("p", w.error) if w.error else list(_answer(plan, w)),
        class_="card",
    )


def _answer(plan: Plan, w: WhatIf) -> Iterator[Markup]:
    speed = w.speed(plan)
    assert speed is not None and w.step_time is not None and w.peak_memory is not None
    pace = "as fast as now" if abs(speed - 1) < 0.005 else f"{share_text(abs(speed - 1))} " + (
        "faster" if speed > 1 else "slower"
    )
    unit = " a token" if w.work > 1 else ""
    yield tag("p", f"{pace}{unit if pace != 'as fast as now' else ''}", class_="pace")
    yield tag("p", f"{seconds_text(w.step_time)} a step, {bytes_text(w.peak_memory)} a device", class_="quiet")
    if w.changes:
        yield tag("ul", [tag("li", f"{what.replace('_', ' ')}: ", _shift(a, b)) for what, a, b in w.changes])


def _shift(before: str, then: str) -> Markup:
    return tag("span", f"{_short(before)} ", tag("span", "to", class_="quiet"), f" {_short(then)}")


def _short(text: str) -> str:
    """A value that may be a list of all stages."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def replicated(plan: Plan) -> Markup:
    """The operators whose work ranks repeat."""
    title = "Work that is repeated"
    if not plan.replicated:
        return section("repeated", title, "None: every operator with FLOPs is split on every axis.")
    rows = [
        tag(
            "tr",
            tag("th", r.operator, scope="row"),
            cell(", ".join(r.axes)),
            cell(r.count, "n"),
            cell(share_text(r.flops_share), "n"),
            cell(share_text(r.bytes_share), "n"),
            cell(r.reason),
        )
        for r in plan.replicated
    ]
    header = (("operator", ""), ("over", ""), ("count", "n"), ("of FLOPs", "n"), ("of bytes", "n"), ("because", ""))
    lead = "Operators that all ranks along an axis do alike."
    return section("repeated", title, lead, grid(header, [tag("tbody", rows)], "Operators whose work is repeated"))
