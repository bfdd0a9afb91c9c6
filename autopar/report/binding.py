"""What limits a plan: by how much a step would be shorter with twice as much of each resource.

The account of the plan is perturbed, nothing is searched again: a plan made for the better machine may gain more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.cost_model.communication import collective_seconds
from autopar.hints import parse_bytes
from autopar.report.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from autopar.plan import Plan


@dataclass(frozen=True)
class Limit:
    """A resource, what more of it would mean, and how many seconds of a step that saves, at most."""

    resource: str
    change: str
    saves: float


@dataclass(frozen=True)
class Binding:
    """The resources that limit a plan, the most binding first; ``step_time`` in seconds."""

    step_time: float
    limits: tuple[Limit, ...]

    @property
    def resource(self) -> str:
        """The resource of which more would help most: "compute", "bandwidth of tp", "latency of tp" (or of another
        axis), "bubble" or "memory"."""
        return self.limits[0].resource

    def __str__(self) -> str:
        shown = [limit for limit in self.limits if limit.saves > 0.005 * self.step_time] or self.limits[:1]
        return "; ".join(
            f"{limit.resource}: {limit.change} would save up to {seconds_text(limit.saves)} "
            f"({share_text(limit.saves / self.step_time if self.step_time else 0.0)})"
            for limit in shown
        )


def binding(plan: Plan) -> Binding:
    """Which of compute, bandwidth of each axis, the pipeline's bubble and memory limits ``plan``."""
    limits = [Limit("compute", "devices twice as fast", plan.breakdown.get("compute", 0.0) / 2)]
    limits += _communication(plan)
    if (bubble := plan.breakdown.get("bubble", 0.0)) > 0:
        limits.append(Limit("bubble", "twice as many micro-batches", bubble / 2))
    limits += _memory(plan)
    return Binding(plan.step_time, tuple(sorted(limits, key=lambda limit: -limit.saves)))


def _communication(plan: Plan) -> Iterator[Limit]:
    """Each axis with its share of the exposed communication: what its bytes take, and what its calls take at any size.
    With half the bytes a collective takes half the former less."""
    exposed = sum(t for what, t in plan.breakdown.items() if what.startswith("exposed"))
    every = sum(c.seconds for c in plan.collectives)
    share = min(1.0, exposed / every) if every else 0.0
    cluster, mesh = Cluster.from_dict(plan.cluster), plan.mesh
    moving: dict[str, float] = defaultdict(float)
    calling: dict[str, float] = defaultdict(float)
    for c in plan.collectives:
        inside = c.axis in mesh.names
        stride, size = (mesh.stride(c.axis), mesh.degree(c.axis)) if inside else (mesh.size, plan.degrees[c.axis])
        group, nbytes = cluster.group(stride, size), c.bytes / max(c.count, 1)
        whole, half = (float(collective_seconds(c.kind, n, group, cluster.device)) for n in (nbytes, nbytes / 2))
        of_bytes = min(2 * (1 - half / whole), 1.0) if whole > 0 else 0.0
        moving[c.axis] += c.seconds * of_bytes
        calling[c.axis] += c.seconds * (1 - of_bytes)
    for what, how, seconds in (
        ("bandwidth", "links twice as fast", moving),
        ("latency", "collectives that start twice as fast", calling),
    ):
        for axis, found in seconds.items():
            yield Limit(f"{what} of {axis}", how, found * share / 2)


def _memory(plan: Plan) -> Iterator[Limit]:
    """Memory limits a plan if a faster one was found that keeps too much."""
    limit = Cluster.from_dict(plan.cluster).device.memory_bytes
    if "memory_limit" in plan.hints:
        limit = min(limit, parse_bytes(plan.hints["memory_limit"]))
    faster = [a for a in plan.alternatives if a.step_time < plan.step_time and a.peak_memory > limit]
    if faster:
        best = min(faster, key=lambda a: a.step_time)
        more = f"{bytes_text(best.peak_memory - limit)} more"
        yield Limit("memory", more, plan.step_time - best.step_time)
