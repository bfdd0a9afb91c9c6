"""The mesh: which devices of which hosts an axis joins, and what travels between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.cluster import Cluster, Group
from autopar.report.html.markup import Markup, cell, grid, joined, number, section, tag
from autopar.report.units import bytes_text, seconds_text
from autopar.sharding.axes import (
    BATCH_AXES,
    CONTEXT_AXES,
    CONTEXT_AXIS,
    CONTEXT_EXPERT_AXIS,
    DATA_AXIS,
    EXPERT_AXIS,
    REPLICATE_AXIS,
    TENSOR_AXIS,
)

if TYPE_CHECKING:
    from autopar.plan import Collective, Plan

PIPELINE = "pp"
#: Hosts that are drawn; others are counted.
HOSTS_DRAWN = 64
#: Hosts up to which devices are numbered.
HOSTS_NUMBERED = 8

_SPLITS = {
    PIPELINE: "the layers, as stages of a pipeline",
    REPLICATE_AXIS: "the batch, between groups that have the same state",
    DATA_AXIS: "the batch",
    EXPERT_AXIS: "the batch, and the experts",
    CONTEXT_AXIS: "every sequence",
    CONTEXT_EXPERT_AXIS: "every sequence, and the experts",
    TENSOR_AXIS: "the work inside of layers",
}


_COLOURS = {PIPELINE: "pp", REPLICATE_AXIS: "replicate", DATA_AXIS: "dp", EXPERT_AXIS: "ep", CONTEXT_AXIS: "cp",
            CONTEXT_EXPERT_AXIS: "ep", TENSOR_AXIS: "tp"}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """An axis, or several that collectives go over together: ``size`` ranks that are ``stride`` apart."""

    name: str
    size: int
    stride: int
    group: Group
    collectives: tuple[Collective, ...]


def axes_of(plan: Plan) -> list[Axis]:
    """The axes of more than one rank, the pipeline first, then outermost first; what is only a way to communicate
    over several of them comes last."""
    cluster, mesh = Cluster.from_dict(plan.cluster), plan.mesh
    names = [name for name, size in mesh.axes if size > 1]
    names += [c.axis for c in plan.collectives if c.axis not in (*names, PIPELINE) and mesh.degree(c.axis) > 1]
    found = [(PIPELINE, plan.degrees[PIPELINE], mesh.size)] if plan.degrees[PIPELINE] > 1 else []
    found += [(name, mesh.degree(name), mesh.stride(name)) for name in dict.fromkeys(names)]
    return [
        Axis(name, size, stride, cluster.group(stride, size), tuple(c for c in plan.collectives if c.axis == name))
        for name, size, stride in found
    ]


def mesh(plan: Plan) -> Markup:
    """The hosts once for every axis, with the ranks that it joins with rank 0."""
    cluster, axes = Cluster.from_dict(plan.cluster), axes_of(plan)
    hosts = "One host" if cluster.hosts == 1 else f"{cluster.hosts} hosts"
    lead = (
        f"{hosts} of {cluster.devices_per_host} devices; ranks are numbered host by host. Every axis "
        "shows the ranks that communicate with rank 0 on it, and what they send; the other ranks form groups like "
        "theirs."
    ) + _made_of(plan)
    if not axes:
        return section("mesh", "The mesh", "One rank, which communicates with nobody.")
    return section("mesh", "The mesh, and what its axes carry", lead, [_card(plan, cluster, axis) for axis in axes])


def _made_of(plan: Plan) -> str:
    """What the degrees dp and cp are made of where several axes split the batch or the sequence."""
    found = ""
    for degree, axes in ((DATA_AXIS, BATCH_AXES), (CONTEXT_AXIS, CONTEXT_AXES)):
        parts = [name for name in axes if name in plan.mesh.names]
        if len(parts) > 1:
            product = " x ".join(f"{name} {plan.mesh.degree(name)}" for name in parts)
            found += f" The degree {degree} {plan.degrees[degree]} of the plan is {product}."
    return found


def _card(plan: Plan, cluster: Cluster, axis: Axis) -> Markup:
    return tag(
        "article",
        tag("figure", _drawing(cluster, axis)),
        tag(
            "div",
            tag("h3", tag("b", axis.name, class_="axis"), f" {axis.size} ranks"),
            tag("p", f"splits {_splits(plan, axis)}", class_="what"),
            tag("p", _link(cluster, axis), class_="quiet"),
            _carried(axis),
        ),
        class_="card axis-card",
    )


def _splits(plan: Plan, axis: Axis) -> str:
    """What an axis splits, in layers as far as these say it."""
    if axis.name not in _SPLITS:
        return "nothing by itself: one collective over all of these axes"
    if axis.name != TENSOR_AXIS:
        return _SPLITS[axis.name]
    words = dict.fromkeys(meaning for layer in plan.layers for meaning, name in layer.splits if name == axis.name)
    return ", ".join(words) or _SPLITS[axis.name]


def _link(cluster: Cluster, axis: Axis) -> str:
    """Over which links a group of the axis communicates."""
    group, device = axis.group, cluster.device
    inside = f"{group.intra.name}, {group.intra.bandwidth / 1e9:.4g} GB/s a device"
    if group.inter is None:
        whole = "one host" if axis.size * axis.stride <= cluster.devices_per_host else "what one scale-up link joins"
        return f"Inside of {whole}: {inside}."
    network = f"{group.inter.name}, {group.inter.bandwidth / 1e9:.4g} GB/s a device"
    where = "domains" if device.scale_up_spans_hosts else "hosts"
    if group.per_host == 1:
        return f"Over the network, one rank in each of {group.hosts} {where}: {network}."
    return f"Over the network between {group.hosts} {where}: {network}; {group.per_host} ranks in each: {inside}."


def _carried(axis: Axis) -> Markup:
    if not axis.collectives:
        last = "The rank that waits least has the last stage: it sends nothing on, and back what it gets."
        words = last if axis.name == PIPELINE else "Carries nothing in this step."
        return tag("p", words, class_="quiet")
    rows = [
        tag(
            "tr",
            tag("th", c.kind.replace("_", "-"), scope="row"),
            cell(c.purpose),
            cell(c.count, "n"),
            cell(bytes_text(c.wire_bytes), "n"),
            cell(seconds_text(c.seconds), "n"),
        )
        for c in axis.collectives
    ]
    header = (("collective", ""), ("of", ""), ("a step", "n"), ("sent by a rank", "n"), ("time", "n"))
    table = grid(header, [tag("tbody", rows)], f"Collectives over {axis.name} in one step")
    back = tag("p", "Sent on to the stages that follow; as much comes back.", class_="quiet")
    return joined([table, back if axis.name == PIPELINE else None])


def _drawing(cluster: Cluster, axis: Axis) -> Markup:
    """All hosts with their devices; those of rank 0's group are filled."""
    hosts, per_host = min(cluster.hosts, HOSTS_DRAWN), cluster.devices_per_host
    place = _Places(hosts, per_host)
    joined = {i * axis.stride for i in range(axis.size)}
    shapes = [shape for host in range(hosts) for shape in place.host(host, joined)]
    left_out = cluster.hosts - hosts
    if left_out:
        shapes.append(tag("text", f"and {left_out} more hosts", x=2, y=place.height + 12, class_="small"))
    height = place.height + (18 if left_out else 0)
    where = "devices of one host" if axis.group.hosts == 1 else f"devices of {axis.group.hosts} hosts"
    return tag(
        "svg",
        shapes,
        viewBox=f"0 0 {number(place.width)} {number(height)}",
        width=place.width,
        height=height,
        role="img",
        aria_label=f"{axis.name}: a group of {axis.size} {where}, every {axis.stride}. rank",
        class_=f"mesh a-{_COLOURS.get(axis.name, 'several')}",
    )


class _Places:
    """Where hosts and devices are drawn: few hosts one below the other with numbers, many as a grid of small boxes."""

    def __init__(self, hosts: int, per_host: int) -> None:
        self.per_host, self.numbered = per_host, hosts <= HOSTS_NUMBERED and per_host <= 8
        self.cell = 24.0 if self.numbered else 7.0
        self.across = per_host if self.numbered else math.ceil(math.sqrt(2 * per_host))
        down = math.ceil(per_host / self.across)
        self.box = (self.across * self.cell + 6, down * self.cell + 6)
        self.columns = 1 if self.numbered else min(hosts, max(1, int(320 // (self.box[0] + 5))))
        self.label = 54.0 if self.numbered else 0.0
        self.width = self.label + self.columns * (self.box[0] + 5) - 3
        self.height = math.ceil(hosts / self.columns) * (self.box[1] + 5) - 3

    def host(self, host: int, joined: set[int]) -> Iterator[Markup]:
        """One host."""
        x = self.label + host % self.columns * (self.box[0] + 5) + 1
        y = host // self.columns * (self.box[1] + 5) + 1
        yield tag("rect", x=x, y=y, width=self.box[0], height=self.box[1], rx=4, class_="host")
        if self.numbered:
            yield tag("text", f"host {host}", x=0, y=y + self.box[1] / 2 + 4, class_="small")
        for i in range(self.per_host):
            rank = host * self.per_host + i
            across, down = x + 3 + i % self.across * self.cell, y + 3 + i // self.across * self.cell
            size = self.cell - 2
            kind = "on" if rank in joined else "off"
            yield tag("rect", x=across + 1, y=down + 1, width=size, height=size, rx=size / 6, class_=kind)
            if self.numbered:
                middle = (across + 1 + size / 2, down + size / 2 + 4.5)
                yield tag("text", rank, x=middle[0], y=middle[1], class_=f"rank {kind}")
