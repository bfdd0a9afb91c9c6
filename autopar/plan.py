"""Everything that was decided for a model on a cluster, serialisable and independent of the machine that made it.

Times are seconds a step, memory is bytes a device. The JSON form is the dataclasses below, field by field; reading it
checks every field and names the place of what is wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, cast

from autopar.cluster import Cluster
from autopar.cost_model.step import Timing, is_whole
from autopar.errors import AutoparError, HintError, PlanError
from autopar.hint_checks import DEGREES, EXPERTS, ZERO_STAGES, check_recompute, nearest_names
from autopar.hints import Hints
from autopar.plan_file import decode, encode, malformed, write
from autopar.replan import with_hints
from autopar.report.binding import Binding, binding
from autopar.report.compare import Comparison, Measured, compare
from autopar.report.diff import PlanDiff, diff
from autopar.report.explain import RANGES, Decision, Explanation, explain
from autopar.report.html import framed, html_report
from autopar.report.text import text_report
from autopar.report.timeline import timeline
from autopar.report.what_if import WhatIf, what_if
from autopar.schedule import ALL_SCHEDULES, check_schedule
from autopar.sharding.axes import CONTEXT_AXIS, DATA_AXIS, TENSOR_AXIS, ExpertRanks, make_mesh
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.zero import COPIES, REDUCED
from autopar.workload import Workload

#: Raised whenever a plan that an older autopar wrote would be misread.
PLAN_VERSION = 5


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind, axis and purpose in one step of one rank. ``bytes`` are those of the whole tensors,
    ``wire_bytes`` those that the rank sends, ``seconds`` their time if nothing hid it. ``purpose`` is ``parameters``,
    ``gradients`` or ``activations``."""

    kind: str
    axis: str
    purpose: str
    count: int
    bytes: int
    wire_bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerSummary:
    """What is split in one kind of layer: (meaning, axis) pairs such as ("ffn", "tp"); ``count`` modules are alike."""

    name: str
    count: int
    splits: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LayerCosts:
    """What ``count`` modules of one kind cost together: ``parameters`` in elements, the model's ``flops`` in a step
    (forward and backward, all ranks together, none for what is made again), and of the ranks that run them, one of
    each stage, the ``seconds`` of kernels in a step and the ``collectives``; those of a bucket of parameters or
    gradients are the block's."""

    name: str
    count: int
    parameters: int
    flops: float
    seconds: float
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Prefill:
    """The first forward of a generation, of prompts as long as its context all at once: ``seconds``, and ``memory``,
    bytes a device at its peak, the cache included."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class ReplicatedOperator:
    """``count`` calls of one operator whose work all ranks along ``axes`` repeat, their share of the model's FLOPs and
    of the bytes moved, and the reason."""

    operator: str
    axes: tuple[str, ...]
    count: int
    flops_share: float
    bytes_share: float
    reason: str


@dataclass(frozen=True)
class Alternative:
    """A plan that lost, and why. ``micro_batches`` is their number; ``step_time`` in seconds, ``peak_memory`` in bytes
    a device; of what does not fit both are estimates."""

    degrees: dict[str, int]
    zero: int
    zero_group_size: int | None
    micro_batches: int
    schedule: str | None
    recompute: str
    step_time: float
    peak_memory: int
    reason: str


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter, its gradient and its optimizer state rest between steps. ``shape`` is global; ``copy`` and
    ``gradient`` are how long the copy lives in which it is used, and how often its gradient is reduced over dp
    (`sharding.zero`); ``used`` are the axes of the tokens that split it in use too, those of experts."""

    shape: tuple[int, ...]
    storage: Layout
    copy: str = "use"
    gradient: str = "step"
    used: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan for one model, cluster and workload.

    ``structure`` is the hash of the model's graph and shapes. ``zero_group_size`` is the number of ranks of dp over
    which hybrid ZeRO splits state (`sharding.axes`), None where it is split over all of them or not at all.
    ``expert_group_size`` is the number of ranks of dp over which experts are spread, None where they are over none, and
    ``expert_context_size`` that of ranks of cp, None where they are over none or over all of these; ``degrees`` says of
    a model that has experts over how many ranks of all axes they are, as "ep".
    ``breakdown`` has the seconds of ``compute``, ``exposed
    communication``, ``bubble`` and ``optimizer``, which add up to ``step_time``, of the slowest rank of a simulation of
    ``timing`` (None in a plan written by hand); ``memory`` has bytes by kind, each at its most, and
    ``peaks`` those that are alive at the moment when most are, with what lives shortly (``transients``), of every rank
    of pp.
    ``stages`` are the modules of every pipeline stage (blocks, and modules outside of them that own parameters), in the
    order in which they run, as many stages a rank of pp as ``schedule`` has; one stage without a pipeline, and then
    ``schedule`` is None. ``forwards_first`` if the backwards of micro-batches need a sum over all their forwards, which
    then come first. ``recompute`` says what the backward makes again instead of keeping it (`sharding.recompute`).
    A step takes at most ``gap`` (a fraction) longer than with the best plan of ``gap_space``. ``operators`` gives, for
    every operator, what is split on each axis; ``flops_share`` is the largest share of the model's FLOPs that one rank
    does. ``decisions`` are what `explain` shows. ``flops`` are the model's in one step by the dtype that they are done
    in, forward and backward, attention whole and without what is made again, as MFU counts them; ``costs`` are those of
    its layers. To infer with a decoder, a step is one token of every sample with a cache of all before it, and
    ``prefill`` is of prompts as long as that; None for all else. ``what_ifs`` are the answers of `what_if`, where it
    was asked. All numbers are finite.
    """

    model: str
    structure: str
    degrees: dict[str, int]
    zero: int
    zero_group_size: int | None
    micro_batch_size: int
    num_micro_batches: int
    schedule: str | None
    stages: tuple[tuple[str, ...], ...]
    recompute: str
    step_time: float
    breakdown: dict[str, float]
    memory: dict[str, int]
    peaks: tuple[dict[str, int], ...]
    gap: float
    gap_space: str
    parameters: dict[str, ParameterPlan]
    operators: dict[str, dict[str, str]]
    layers: tuple[LayerSummary, ...]
    collectives: tuple[Collective, ...]
    replicated: tuple[ReplicatedOperator, ...]
    alternatives: tuple[Alternative, ...]
    cluster: dict[str, Any]
    workload: dict[str, Any]
    hints: dict[str, Any]
    flops_share: float
    expert_group_size: int | None = None
    expert_context_size: int | None = None
    prefill: Prefill | None = None
    forwards_first: bool = False
    decisions: tuple[Decision, ...] = ()
    flops: dict[str, float] = field(default_factory=dict)
    costs: tuple[LayerCosts, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    timing: Timing | None = None
    version: int = PLAN_VERSION

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind at the fullest moment of a step, of the rank of pp with most."""
        return max(self.peaks, key=lambda kinds: sum(kinds.values()))

    @property
    def peak_memory(self) -> int:
        """Bytes a device at the fullest moment of a step."""
        return sum(self.peak.values())

    @property
    def infers(self) -> bool:
        """Whether it is for inference: no gradients, no optimizer, no micro-batches."""
        return self.workload.get("mode") == "infer"

    @property
    def needed_memory(self) -> int:
        """Bytes a device that a run needs: those of a step, or of the prompts before it where they need more."""
        return self.peak_memory if self.prefill is None else max(self.peak_memory, self.prefill.memory)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether what is gathered for a forward is given up before its backward; False is FSDP's SHARD_GRAD_OP."""
        return not any(p.copy == "micro-batch" for p in self.parameters.values())

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs."""
        return math.prod(self.degrees[axis] for axis in DEGREES)

    @property
    def mesh(self) -> Mesh:
        """The device mesh of a pipeline stage, as `sharding.axes.make_mesh` makes it."""
        dp, cp, tp = (self.degrees[axis] for axis in (DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS))
        spread = ExpertRanks(self.expert_group_size or 1, self.expert_context_size or 1)
        return make_mesh(dp, cp, tp, self.zero_group_size, spread)

    def layout(self, name: str) -> Layout:
        """The storage layout of a parameter. PlanError, with the nearest names, if the plan has none of that name."""
        if name not in self.parameters:
            raise PlanError(
                f"The plan has no parameter {name!r}.",
                found=name,
                expected=f"one of the {len(self.parameters)} parameters of {self.model}",
                change=nearest_names(name, self.parameters),
            )
        return self.parameters[name].storage

    def __str__(self) -> str:
        degrees = ", ".join(f"{axis}={degree}" for axis, degree in self.degrees.items())
        return (
            f"Plan of {self.model} on {self.world_size} ranks: {degrees}, zero={self.zero}, "
            f"{self.step_time * 1e3:.3g} ms a step, {self.peak_memory / 2**30:.3g} GiB a device"
        )

    def report(self, format: str = "text") -> str:
        """The plan for people (``text``, or ``html``: one page that needs nothing else) or for programs (``json``, as
        `save` writes). PlanError for other formats."""
        if format == "text":
            return text_report(self)
        if format == "html":
            return html_report(self)
        if format == "json":
            return json.dumps(self.to_dict(), indent=1, allow_nan=False)
        raise PlanError(
            f"There is no report format {format!r}.",
            expected="text, html or json",
            found=repr(format),
            change=nearest_names(str(format), ("text", "html", "json")),
        )

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML page. The file appears whole or not at all. PlanError if it cannot be
        written."""
        write(Path(path), self.report("html"), "report")

    def _repr_html_(self) -> str:
        """The report in a notebook, in a frame of its own."""
        return framed(self.report("html"), f"Report: {self}")

    def explain(self, pattern: str) -> Explanation:
        """Why the modules and parameters that ``pattern`` matches are split as they are: the options that the solver
        had, what each costs, and why one won. A pattern is a name in which ``*`` stands for any part, such as
        "model.layers.*.mlp". PlanError, with the nearest names, if nothing matches."""
        return explain(self, pattern)

    def diff(self, other: Plan) -> PlanDiff:
        """What differs between this plan and ``other``, of the same model. PlanError for one of another model."""
        return diff(self, other)

    def compare(self, measured: Measured, peak_memory: float | None = None) -> Comparison:
        """What was measured beside what is predicted: seconds of a step, of several steps, or of parts by the names in
        ``breakdown``; and bytes a device at the peak. PlanError for what is no time, and for an unknown part."""
        return compare(self, measured, peak_memory)

    @property
    def binding(self) -> Binding:
        """Which of compute, bandwidth, bubble and memory limits the plan: what more of each would save."""
        return binding(self)

    def with_hints(self, hints: Hints) -> Self:
        """The plan for the same model, cluster and workload under ``hints``, and those of its own that they do not
        replace. PlanError if this plan was loaded, changed or its model is gone; and what `autopar.plan` raises."""
        return cast(Self, with_hints(self, hints))

    def what_if(self, search_seconds: float | None = None) -> Self:
        """This plan with ``what_ifs``: what would be decided with links half as fast, twice the batch, twice the
        sequence, and a fifth more memory, each searched anew (for ``search_seconds`` at most, as `autopar.plan`; None:
        as long as for this plan). PlanError if this plan was loaded, changed or its model is gone."""
        return cast(Self, what_if(self, search_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` gives an equal plan."""
        return {field.name: encode(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. PlanError, naming the place, for a missing, unknown or malformed entry, another
        version, or a layout that does not fit its parameter."""
        if not isinstance(data, Mapping):
            raise malformed("plan", "an object", data)
        if "version" in data and data["version"] != PLAN_VERSION:
            raise PlanError(
                f"The plan has version {data['version']!r}.",
                expected=f"version {PLAN_VERSION}",
                found=repr(data["version"]),
                change="make the plan again with this version of autopar",
            )
        plan: Self = decode(cls, data, "plan")
        _check(plan)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all. PlanError if it cannot be written."""
        write(Path(path), self.report("json") + "\n", "plan")

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write one step as a trace that Perfetto opens: a process for every rank of the pipeline, a thread for its
        compute and for every axis. The file appears whole or not at all. PlanError if it cannot be written."""
        write(Path(path), json.dumps(timeline(self), allow_nan=False) + "\n", "timeline")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote. PlanError if there is no such file, or as `from_dict`."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"Cannot read the plan {path}.",
                expected="a file that Plan.save wrote",
                found=str(error),
                change="check the path",
            ) from error
        except ValueError as error:  # not UTF-8, or not JSON
            raise PlanError(
                f"{path} is not valid JSON.",
                expected="a file that Plan.save wrote",
                found=str(error),
                change="save the plan again",
            ) from error
        return cls.from_dict(data)


def _check_pipeline(plan: Plan) -> None:
    """The schedule is one that can run the plan's stages and micro-batches."""
    pp = plan.degrees["pp"]
    if (plan.schedule is None) != (pp == 1) or (plan.schedule is not None and plan.schedule not in ALL_SCHEDULES):
        expected = f"one of {', '.join(ALL_SCHEDULES)}" if pp > 1 else "null, because pp is 1"
        raise malformed("plan.schedule", expected, plan.schedule)
    if len(plan.peaks) != pp:
        raise malformed("plan.peaks", f"one for each of the {pp} ranks of pp", plan.peaks)
    if plan.schedule is not None:
        try:
            check_schedule(plan.schedule, pp, len(plan.stages), plan.num_micro_batches)
        except HintError as error:
            raise malformed("plan.stages", error.expected, error.found) from None


def _check_parameters(plan: Plan) -> None:
    """Every parameter's layout fits its shape, and is kept and reduced in ways that there are."""
    mesh = plan.mesh
    for name, parameter in plan.parameters.items():
        layout, shape = parameter.storage, parameter.shape
        axes = layout.split_axes
        known = set(axes) <= set(mesh.names) and len(set(axes)) == len(axes) and not layout.partial
        if len(layout.dims) != len(shape) or not known or not layout.divides(mesh, shape):
            raise malformed(f"plan.parameters.{name}.storage", f"a split of {shape} over {plan.degrees}", str(layout))
        for what, values in (("copy", COPIES), ("gradient", REDUCED)):
            if (value := getattr(parameter, what)) not in values:
                raise malformed(f"plan.parameters.{name}.{what}", f"one of {', '.join(values)}", value)


def _check(plan: Plan) -> None:
    """What the types do not say: axes and zero are known ones, every parameter's layout fits its shape, and cluster,
    workload and hints can be read."""
    if set(plan.degrees) - {EXPERTS} != set(DEGREES) or any(degree < 1 for degree in plan.degrees.values()):
        raise malformed("plan.degrees", "positive degrees of pp, dp, cp and tp, and ep of experts", plan.degrees)
    _check_pipeline(plan)
    if plan.zero not in ZERO_STAGES:
        raise malformed("plan.zero", " or ".join(map(str, ZERO_STAGES)), plan.zero)
    size, dp = plan.zero_group_size, plan.degrees[DATA_AXIS]
    if size is not None and (not 1 < size < dp or dp % size):
        raise malformed("plan.zero_group_size", f"null, or a divisor of dp={dp} other than 1 and {dp}", size)
    spread, group = plan.expert_group_size, size or dp
    if spread is not None and (spread < 2 or group % spread):
        raise malformed("plan.expert_group_size", f"null, or a divisor of {group} other than 1", spread)
    part, cp = plan.expert_context_size, plan.degrees[CONTEXT_AXIS]
    if part is not None and (not 1 < part < cp or cp % part):
        raise malformed("plan.expert_context_size", f"null, or a divisor of cp={cp} other than 1 and {cp}", part)
    try:
        check_recompute(plan.recompute)
    except HintError as error:
        raise malformed("plan.recompute", error.expected, plan.recompute) from None
    _check_parameters(plan)
    stages = len(plan.stages) if plan.schedule is not None else 1
    if plan.timing is not None and not is_whole(plan.timing, stages, plan.degrees["pp"]):
        expected = f"programs of {stages} stages, of tasks that wait for tasks before them"
        raise malformed("plan.timing", expected, plan.timing)
    for decision in plan.decisions:
        if not (0 <= decision.chosen < len(decision.options) and RANGES.fullmatch(decision.blocks)):
            raise malformed(f"plan.decisions of {decision.name}", "one of its options, and ranges of blocks", decision)
    for read, table in (
        (Cluster.from_dict, plan.cluster),
        (Workload.from_dict, plan.workload),
        (Hints.from_dict, plan.hints),
    ):
        try:
            read(table)
        except AutoparError as error:
            raise PlanError(
                f"The plan is malformed. {error.what}", expected=error.expected, found=error.found, change=error.change
            ) from error
    if (ranks := Cluster.from_dict(plan.cluster).size) != plan.world_size:
        raise malformed("plan.degrees", f"degrees whose product is {ranks}, the devices of its cluster", plan.degrees)
