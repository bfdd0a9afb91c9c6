"""What limits a plan: by how much a step would be shorter with twice as much of each resource.

The account of the plan is perturbed, and its step simulated again; nothing is searched: a plan made for the better
machine may gain more. A plan that was written by hand has nothing to simulate, there the parts of its step are scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.cost_model.communication import collective_seconds
from autopar.cost_model.simulate import COMPUTE
from autopar.cost_model.step import Program, Repeated, Timing, simulate_step
from autopar.hints import Hints
from autopar.report.timeline import script_of
from autopar.report.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from autopar.plan import Plan

#: The axis of the pipeline, on which there are messages between stages.
_PIPELINE = "pp"


@dataclass(frozen=True)
class Limit:
    """A resource, what more of it would mean, and how many seconds of a step that would save."""

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
            f"{limit.resource}: {limit.change} would save {seconds_text(limit.saves)} "
            f"({share_text(limit.saves / self.step_time if self.step_time else 0.0)})"
            for limit in shown
        )


def binding(plan: Plan) -> Binding:
    """Which of compute, bandwidth and latency of each axis, the pipeline's bubble and memory limits ``plan``."""
    limits = [Limit("compute", "devices twice as fast", _saved(plan, {COMPUTE: 0.5}))]
    for axis, share in _shares_of_bytes(plan).items():
        faster, sooner = (_saved(plan, {axis: 1 - part / 2}) for part in (share, 1 - share))
        limits.append(Limit(f"bandwidth of {axis}", "links twice as fast", faster))
        limits.append(Limit(f"latency of {axis}", "collectives that start twice as fast", sooner))
    if (bubble := plan.breakdown.get("bubble", 0.0)) > 0:
        limits.append(Limit("bubble", "twice as many micro-batches, each as efficient,", bubble / 2))
    limits += _memory(plan)
    return Binding(plan.step_time, tuple(sorted(limits, key=lambda limit: -limit.saves)))


def _saved(plan: Plan, factors: dict[str, float]) -> float:
    """Seconds that a step is shorter where what runs on a stream takes its factor of the time."""
    if plan.timing is None:
        return _saved_by_parts(plan, factors)
    after = simulate_step(_scaled(plan.timing, factors), script_of(plan, plan.timing))
    return max(0.0, plan.step_time - after.seconds)


def _saved_by_parts(plan: Plan, factors: dict[str, float]) -> float:
    """The same of a plan without a simulation: an axis has its share of the exposed communication."""
    exposed = sum(t for what, t in plan.breakdown.items() if what.startswith("exposed"))
    every = sum(c.seconds for c in plan.collectives)
    share = min(1.0, exposed / every) if every else 0.0
    streams: dict[str, float] = defaultdict(float)
    streams[COMPUTE] = plan.breakdown.get("compute", 0.0) + plan.breakdown.get("optimizer", 0.0)
    for c in plan.collectives:
        streams[c.axis] += c.seconds * share
    return sum(streams[stream] * (1 - factor) for stream, factor in factors.items())


def _scaled(timing: Timing, factors: dict[str, float]) -> Timing:
    """``timing`` with every task times the factor of its stream."""

    def scaled(program: Program) -> Program:
        return tuple(
            Repeated(part.count, tuple(replace(t, seconds=t.seconds * factors.get(t.stream, 1.0)) for t in part.tasks))
            for part in program
        )

    def times(values: tuple[float, ...], stream: str) -> tuple[float, ...]:
        return tuple(value * factors.get(stream, 1.0) for value in values)

    return replace(
        timing,
        programs=tuple(map(scaled, timing.programs)),
        up=times(timing.up, _PIPELINE),
        down=times(timing.down, _PIPELINE),
        shared=times(timing.shared, _PIPELINE),
        optimizer=times(timing.optimizer, COMPUTE),
    )


def _shares_of_bytes(plan: Plan) -> dict[str, float]:
    """Which share of the seconds of an axis' collectives their bytes take, the rest being what calls take at any size.
    With half the bytes a collective takes half of the former less."""
    cluster, mesh = Cluster.from_dict(plan.cluster), plan.mesh
    moving: dict[str, float] = defaultdict(float)
    every: dict[str, float] = defaultdict(float)
    for c in plan.collectives:
        inside = c.axis != _PIPELINE
        stride, size = (mesh.stride(c.axis), mesh.degree(c.axis)) if inside else (mesh.size, plan.degrees[c.axis])
        group, nbytes = cluster.group(stride, size), c.bytes / max(c.count, 1)
        whole, half = (float(collective_seconds(c.kind, n, group, cluster.device)) for n in (nbytes, nbytes / 2))
        moving[c.axis] += c.seconds * (min(2 * (1 - half / whole), 1.0) if whole > 0 else 0.0)
        every[c.axis] += c.seconds
    return {axis: moving[axis] / seconds for axis, seconds in every.items() if seconds > 0}


def memory_limit(plan: Plan) -> tuple[int, str]:
    """The bytes that a plan may take on a device, and whose limit that is."""
    device, hinted = Cluster.from_dict(plan.cluster).device.memory_bytes, Hints.from_dict(plan.hints).memory_bytes
    if hinted is not None and hinted < device:
        return hinted, "of the hint memory_limit"
    return device, "of the device"


def _memory(plan: Plan) -> Iterator[Limit]:
    """Memory limits a plan if a faster one was found that keeps too much."""
    limit, _ = memory_limit(plan)
    faster = [a for a in plan.alternatives if a.step_time < plan.step_time and a.peak_memory > limit]
    if faster:
        best = min(faster, key=lambda a: a.step_time)
        more = f"{bytes_text(best.peak_memory - limit)} more"
        yield Limit("memory", more, plan.step_time - best.step_time)
