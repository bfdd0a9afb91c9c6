"""The table of layers: what is split in them, what they cost, and below each its parameters and operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autopar.report.explain import Decision, Verdict, verdicts
from autopar.report.html.figures import count_text
from autopar.report.html.markup import Markup, cell, grid, section, tag
from autopar.report.names import kind_of_layer
from autopar.report.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from autopar.plan import Collective, LayerCosts, Plan

_HEADER = (
    ("layer", ""),
    ("count", "n"),
    ("split", ""),
    ("parameters", "n"),
    ("FLOPs", "n"),
    ("keeps", "n"),
    ("kernels", "n"),
    ("collectives", "n"),
    ("sent by a rank", ""),
)
_LEAD = (
    "Equal blocks are one row. FLOPs are those of the whole model; what a layer keeps on a device, the seconds of its "
    "kernels and of its collectives (as if nothing hid them) are those of a step, of all blocks on the ranks that run "
    "them. Open a row for its parameters and operators: with them stands what was chosen and why, and as collectives "
    "those between it and its neighbours, which both ends count."
)


def layers(plan: Plan) -> Markup:
    """The section; a plan without costs shows what it splits."""
    decisions: dict[str, list[Decision]] = defaultdict(list)
    for decision in plan.decisions:
        decisions[kind_of_layer(decision.module)].append(decision)
    splits = {layer.name: layer.splits for layer in plan.layers}
    costs = {found.name: found for found in plan.costs}
    counts = {layer.name: layer.count for layer in plan.layers} | {name: found.count for name, found in costs.items()}
    names = dict.fromkeys((*costs, *splits, *decisions))
    flops = sum(found.flops for found in plan.costs)
    bodies = [
        _layer(i, name, counts.get(name, 1), splits.get(name), costs.get(name), decisions.get(name, ()), flops)
        for i, name in enumerate(names)
    ]
    filtering = tag(
        "div",
        tag("label", "Filter ", tag("input", type="search", id="filter", placeholder="mlp, all-gather, over tp")),
        tag("button", "Open all", type="button", id="open-all", aria_pressed="false"),
        tag("span", f"{len(names)} layers", id="shown", role="status"),
        class_="tools",
    )
    table = grid(_HEADER, bodies, "Layers with layouts, costs and collectives", sortable=True, id="layers-table")
    return section("layers", "Layers", _LEAD, filtering, table)


def _layer(
    number: int,
    name: str,
    count: int,
    splits: Iterable[tuple[str, str]] | None,
    costs: LayerCosts | None,
    decisions: Sequence[Decision],
    flops: float,
) -> Markup:
    """One layer: its row, and the rows of its decisions."""
    opener = tag(
        "button", name, type="button", class_="open", aria_expanded="false", aria_controls=f"layer-{number}"
    )  # fmt: skip
    kept = sum(d.options[d.chosen].bytes for d in decisions)
    words = "" if splits is None else "; ".join(f"{meaning} over {axis}" for meaning, axis in splits) or "nothing"
    row = tag(
        "tr",
        tag("th", opener if decisions else name, scope="row", data_value=name),
        cell(count, "n", count),
        cell(words),
        *_costs(costs, kept, flops),
        class_="layer",
    )
    below = [_decision(decision, name) for decision in decisions]
    return Markup(tag("tbody", row) + (tag("tbody", below, class_="details", id=f"layer-{number}") if below else ""))


def _costs(costs: LayerCosts | None, kept: int, flops: float) -> list[Markup]:
    if costs is None:
        none = cell("", "n", 0)
        return [none, none, cell(bytes_text(kept), "n", kept), none, none, cell("")]
    moving = sum(c.seconds for c in costs.collectives)
    share = share_text(costs.flops / flops) if flops and costs.flops else ""
    return [
        cell(count_text(costs.parameters) if costs.parameters else "", "n", costs.parameters),
        cell([f"{count_text(costs.flops)} ", tag("small", share)] if share else "", "n", costs.flops),
        cell(bytes_text(kept) if kept else "", "n", kept),
        cell(seconds_text(costs.seconds) if costs.seconds else "", "n", costs.seconds),
        cell(seconds_text(moving) if moving else "", "n", moving),
        cell(tag("ul", [tag("li", _collective(c)) for c in costs.collectives]) if costs.collectives else ""),
    ]


def _collective(c: Collective) -> str:
    return f"{c.kind.replace('_', '-')} over {c.axis}, {bytes_text(c.wire_bytes)} of {c.purpose}"


def _decision(decision: Decision, layer: str) -> Markup:
    """What was chosen of one parameter or operator, and why."""
    found: tuple[Verdict, ...] = verdicts(decision)
    won = found[0]
    name = decision.name.removeprefix(f"{layer}.")
    rest = len(found) - 1 + decision.left_out
    return tag(
        "tr",
        tag("th", name, tag("small", f" {decision.kind}"), scope="row"),
        cell(decision.count, "n"),
        cell(won.choice),
        cell("", "n"),
        cell("", "n"),
        cell(bytes_text(won.bytes) if won.bytes else "", "n"),
        cell(seconds_text(won.seconds) if won.seconds else "", "n"),
        cell(seconds_text(won.communication) if won.communication else "", "n"),
        cell([won.why, f" (of {rest + 1} options)" if rest else ""], "quiet"),
    )
