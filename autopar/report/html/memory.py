"""What fills the memory of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.report.binding import memory_limit
from autopar.report.html.markup import Markup, cell, grid, number, section, swatch, tag
from autopar.report.units import bytes_text, share_text
from autopar.schedule import stage_ranks

if TYPE_CHECKING:
    from autopar.plan import Plan

#: The colours of kinds; what is not here has that of ``other``.
KINDS = ("parameters", "gradients", "optimizer", "activations", "cache", "copies", "transients", "workspace", "slack")
_WORDS = {
    "parameters": "as they rest",
    "gradients": "as they rest",
    "optimizer": "state of the optimizer",
    "activations": "kept from forwards to backwards",
    "cache": "keys and values that a generation keeps",
    "copies": "whole copies of parameters, and gradients that are summed up whole",
    "transients": "what lives shortly at that moment",
    "workspace": "context of the device, buffers of its libraries",
    "slack": "gaps that the allocator leaves",
}


def memory(plan: Plan) -> Markup:
    """A bar for every rank of the pipeline, neighbours that are alike as one, and a table of kinds."""
    limit, origin = memory_limit(plan)
    device = Cluster.from_dict(plan.cluster).device.memory_bytes
    scale = max(limit, device, plan.peak_memory) * 1.02
    bars = [_bar(name, peak, limit, device, scale) for name, peak in _ranks(plan)]
    lines = [f"the {bytes_text(device)} of the device"]
    if limit != device:
        lines.insert(0, f"the {bytes_text(limit)} {origin}")
    legend = [tag("li", swatch(_colour(kind)), kind) for kind in _kinds(plan)]
    legend.append(tag("li", tag("i", class_="swatch line", aria_hidden="true"), " and ".join(lines)))
    return section(
        "memory",
        "Memory against the budget",
        "Every device at the fullest moment of its step.",
        tag("div", bars, class_="bars"),
        tag("ul", legend, class_="legend"),
        grid(
            (("kind", ""), ("at the peak", "n"), ("of the budget", "n"), ("at most", "n"), ("", "")),
            [tag("tbody", list(_rows(plan, limit)))],
            "Memory of the fullest device by kind",
        ),
    )


def _ranks(plan: Plan) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Names of neighbouring ranks of the pipeline with the same bytes, and these."""
    stages: dict[int, list[int]] = {}
    if plan.schedule is not None:
        for stage, rank in enumerate(stage_ranks(plan.schedule, len(plan.peaks), len(plan.stages))):
            stages.setdefault(rank, []).append(stage)
    for _, same in itertools.groupby(enumerate(plan.peaks), key=lambda pair: pair[1]):
        ranks = list(same)
        first, last = ranks[0][0], ranks[-1][0]
        if not stages:
            yield "every device", ranks[0][1]
        elif first == last:
            own = stages[first]
            word = "stages" if len(own) > 1 else "stage"
            yield f"rank {first} · {word} {', '.join(map(str, own))}", ranks[0][1]
        else:
            yield f"ranks {first} to {last}", ranks[0][1]


def _bar(name: str, peak: Mapping[str, int], limit: int, device: int, scale: float) -> Markup:
    total = sum(peak.values())
    parts = [
        tag(
            "span",
            tag("b", kind) if peak[kind] > 0.12 * scale else None,
            class_=f"k-{_colour(kind)}",
            style=f"width:{number(100 * peak[kind] / scale)}%",
            title=f"{kind}: {bytes_text(peak[kind])}",
        )
        for kind in _ordered(peak)
        if peak[kind]
    ]
    marks = [
        tag("i", class_=f"mark {what}", style=f"left:{number(100 * at / scale)}%", title=f"{bytes_text(at)} {what}")
        for what, at in dict.fromkeys((("device", device), ("limit", limit)))
        if what == "device" or at != device
    ]
    words = f"{name}: {bytes_text(total)}, {share_text(total / limit)} of the budget"
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", parts, marks, class_="bar", role="img", aria_label=words),
        tag("span", bytes_text(total), class_="total"),
        class_="row",
    )


def _rows(plan: Plan, limit: int) -> Iterator[Markup]:
    for kind in _kinds(plan):
        at_peak = plan.peak.get(kind, 0)
        yield tag(
            "tr",
            tag("th", swatch(_colour(kind)), kind, scope="row"),
            cell(bytes_text(at_peak), "n"),
            cell(share_text(at_peak / limit), "n"),
            cell(bytes_text(plan.memory[kind]) if kind in plan.memory else "", "n"),
            cell(_WORDS.get(kind, ""), "quiet"),
        )
    yield _sum("total", plan.peak_memory, limit, "")
    if plan.prefill is not None:
        yield _sum("total of prompts", plan.prefill.memory, limit, "while they are read, before the first step")


def _sum(name: str, count: int, limit: int, words: str) -> Markup:
    """The row of all kinds together."""
    return tag(
        "tr",
        tag("th", name, scope="row"),
        cell(bytes_text(count), "n"),
        cell(share_text(count / limit), "n"),
        cell("", "n"),
        cell(words, "quiet"),
        class_="sum",
    )


def _kinds(plan: Plan) -> list[str]:
    """What there is; a plan to infer has nothing that only training keeps."""
    every = dict.fromkeys((*plan.memory, *plan.peak))
    return _ordered(k for k in every if not plan.infers or plan.memory.get(k) or plan.peak.get(k))


def _ordered(kinds: Iterable[str]) -> list[str]:
    """In the order of `KINDS`, others last."""
    return sorted(kinds, key=lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS))


def _colour(kind: str) -> str:
    return kind if kind in KINDS else "other"
