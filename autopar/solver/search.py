"""The outer search: every mesh of the cluster, each solved for its layouts; the fastest that fits becomes the plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Cluster
from autopar.errors import HintError, InfeasibleError
from autopar.garbage import collecting_later
from autopar.hints import Hints, check_hints, check_recompute
from autopar.plan import Alternative, ParameterPlan, Plan
from autopar.report.describe import describe_layers, describe_replicated
from autopar.report.units import bytes_text
from autopar.schedule import check_schedule, runs
from autopar.sharding.assignment import Assignment
from autopar.sharding.axes import STATE_AXES, data_degree, degree, degrees, make_mesh, state_axes, zero_group_size
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.recompute import forward_blocks
from autopar.sharding.zero import Zero
from autopar.solver.carry import hint_pins, operator_choices
from autopar.solver.pipeline import Pipeline, make_pipeline, units
from autopar.solver.program import Solution, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Pins
from autopar.solver.spmd import Solved, account, make_program, read
from autopar.workload import Workload

#: What `Plan.gap` is a bound over.
GAP_SPACE = (
    "all meshes dp x tp; batch over dp; matrix products and attention split on every axis, weights over tp; "
    "other operators follow an operand; equal blocks alike"
)


#: Micro-batches a rank of a pipeline, where the hints leave it open: the bubble of 1F1B is then a fifth of a step.
FILLING = 4


@dataclass(frozen=True)
class _Task:
    """What every candidate is solved for; ``pipeline`` is the one of which they are a stage."""

    setting: Setting
    workload: Workload
    pipeline: Pipeline | None = None

    def solve(self, mesh: Mesh, pins: Pins, budget: float) -> Solved | None:
        """The fastest assignment on ``mesh`` that keeps at most ``budget`` bytes a device, or None.

        The program counts a saved view as the solver expects it to be read; where the account of the answer comes out
        higher, the program's budget is lowered by the difference and it is solved again.
        """
        limit = budget
        if self.pipeline is not None:  # the program counts the whole model, of which a rank has its stages
            limit = np.inf if np.isinf(budget) else budget * self.pipeline.pp
        space, program = make_program(self.setting, mesh, pins)
        while True:
            solution = solve(replace(program, budget=limit))
            if solution is None:
                return None
            solved = self._account(space.assignment(solution.options), solution, pins)
            if solved.peak_memory <= budget:
                return solved
            limit -= solved.peak_memory - budget

    def least_memory(self, mesh: Mesh, pins: Pins) -> tuple[float, Solved | None]:
        """Bytes a device for which `solve` finds an assignment on ``mesh``, about the fewest, and that assignment; inf
        and None if there is none."""
        space, program = make_program(self.setting, mesh, pins)
        # Only bytes count; where there is no way between two layouts there still is none.
        pairs = zip(program.seconds, program.memory, strict=True)
        program.seconds = [np.where(np.isfinite(s), m * 1e-9, s) for s, m in pairs]
        program.edges = [replace(e, cost=np.where(np.isfinite(e.cost), 0.0, np.inf)) for e in program.edges]
        solution = solve(program)
        if solution is None:
            return float("inf"), None
        solved = self._account(space.assignment(solution.options), solution, pins)
        if self.pipeline is not None:
            return solved.peak_memory, solved
        return max(solution.memory, solved.peak_memory), solved

    def _account(self, assignment: Assignment, solution: Solution, pins: Pins) -> Solved:
        """What an assignment costs, of a whole step on a mesh or of a pipeline of such meshes."""
        return account(self.setting, assignment, solution, pins.micro_batches, self.pipeline)


def structure_hash(names_and_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 of a model's parameters, by name and shape."""
    return hashlib.sha256(repr(sorted(names_and_shapes)).encode()).hexdigest()


def meshes(world_size: int, hints: Hints) -> list[Mesh]:
    """Every mesh dp x cp x tp that the hints allow for a pipeline stage, or without a pipeline for all of
    ``world_size`` ranks, tp innermost; not hinted, cp is 1."""
    found = []
    cp, size = hints.cp or 1, hints.zero_group_size or 1
    world_size //= (hints.pp or 1) * cp
    for tp in range(1, world_size + 1):
        dp = world_size // tp
        if dp * tp == world_size and hints.tp in (None, tp) and hints.dp in (None, dp) and dp % size == 0:
            found.append(make_mesh(dp, cp, tp, hints.zero_group_size))
    return found


def micro_batches(mesh: Mesh, hints: Hints, batch: int, pipeline: Pipeline | None = None) -> int:
    """Into how many micro-batches the hints cut a global ``batch`` on ``mesh``; 0 if it does not divide. Not hinted, a
    ``pipeline`` has at least `FILLING` times as many as ranks if there are so many samples, else one for each."""
    if hints.micro_batch_size is None and pipeline is not None:
        return _filling(pipeline, batch // data_degree(mesh))
    if hints.micro_batch_size is None:
        return 1
    count, rest = divmod(batch, data_degree(mesh) * hints.micro_batch_size)
    return 0 if rest else count


def _filling(pipeline: Pipeline, samples: int) -> int:
    """A number of micro-batches of a rank's ``samples`` that fills a pipeline, of those that its schedule can run."""
    counts = [n for n in range(1, samples + 1) if samples % n == 0]
    able = [n for n in counts if runs(pipeline.schedule, pipeline.pp, len(pipeline.stages), n)] or counts
    return next((n for n in able if n >= FILLING * pipeline.pp), able[-1] if able else 1)


def _check_micro_batches(hints: Hints, batch: int, found: list[Mesh]) -> None:
    """HintError if the micro-batch size divides the batch on none of the meshes."""
    if hints.micro_batch_size is not None and not any(micro_batches(mesh, hints, batch) for mesh in found):
        degrees = ", ".join(str(n) for n in sorted({data_degree(mesh) for mesh in found}))
        raise HintError(
            f"The hint micro_batch_size={hints.micro_batch_size} does not divide the batch.",
            expected="a global batch of dp x micro_batch_size x a whole number of micro-batches",
            found=f"a global batch of {batch}, and dp of {degrees}",
            change="choose a micro_batch_size that divides global_batch / dp, or another batch",
        )


#: Finds the exact peak of a plan's memory, which the search does not know: it counts what is kept, in full.
Measure = Callable[[Plan], Plan]


@collecting_later()
def search(
    model: nn.Module,
    captured: Captured,
    cluster: Cluster,
    workload: Workload,
    hints: Hints,
    measure: Measure = lambda plan: plan,
    compiled: bool = False,
) -> Plan:
    """The fastest plan that fits, of graphs that are ``compiled`` or run operator by operator. Where the peak that
    ``measure`` finds is more than that, room is left for it. Raises HintError and InfeasibleError."""
    shapes = {name: p.spec.shape for p in captured.parameters for name in (p.name, *p.aliases)}
    check_hints(hints, cluster.size, shapes)
    operators = read(captured)
    pipeline = make_pipeline(captured, operators, cluster, hints)
    zero = Zero(hints.zero, hints.reshard_after_forward is not False)
    setting = Setting(captured, operators, cluster, workload.optimizer, hints.recompute or "none", zero, compiled)
    check_recompute(setting.recompute, len(forward_blocks(operators)))
    task = _Task(setting, workload, pipeline)
    pins = hint_pins(captured, hints)
    budget = min(float(cluster.device.memory_bytes), hints.memory_bytes or float("inf"))
    batch = workload.global_batch or 1
    _check_micro_batches(hints, batch, meshes(cluster.size, hints))
    counted = [(mesh, micro_batches(mesh, hints, batch, pipeline)) for mesh in meshes(cluster.size, hints)]
    candidates = _able(pipeline, [(mesh, count) for mesh, count in counted if count])
    pinned = [(mesh, replace(pins, micro_batches=count)) for mesh, count in candidates]
    limit = budget
    while (found := _fastest(model, task, hints, pinned, limit)) is not None:
        found = measure(found)
        if found.peak_memory <= budget:
            return found
        limit = min(limit, sum(found.memory.values())) - math.ceil(found.peak_memory - budget)
    return _smallest(model, task, hints, pinned, budget, measure)


def _fastest(
    model: nn.Module, task: _Task, hints: Hints, pinned: list[tuple[Mesh, Pins]], budget: float
) -> Plan | None:
    """The fastest plan of those that keep at most ``budget`` bytes, with what lost; None if there is none."""
    solved: list[tuple[Mesh, Solved | None]] = [(mesh, task.solve(mesh, pins, budget)) for mesh, pins in pinned]
    fitting = sorted((s for _, s in solved if s is not None), key=lambda s: s.step_time)
    if not fitting:
        return None
    best, pins_of = fitting[0], dict(pinned)
    others = list(fitting[1:])
    if hints.zero is None and any(degree(best.mesh, axis) > 1 for axis in STATE_AXES):
        other = task.solve(best.mesh, replace(pins_of[best.mesh], zero=0 if best.zero == 3 else 3), float("inf"))
        others += [other] if other is not None and other.zero != best.zero else []
    alternatives = [_alternative(best, s, budget) for s in others]
    alternatives += [a for m, s in solved if s is None and (a := _unfit(task, m, pins_of[m], budget)) is not None]
    bound = min(s.bound for s in fitting)
    alternatives = [replace(a, degrees={"pp": hints.pp or 1, **a.degrees}) for a in alternatives]
    return _plan(model, task, hints, best, tuple(sorted(alternatives, key=lambda a: a.step_time)), bound)


def _able(pipeline: Pipeline | None, candidates: list[tuple[Mesh, int]]) -> list[tuple[Mesh, int]]:
    """The candidates with a number of micro-batches that the schedule can run. HintError if there is none."""
    if pipeline is None:
        return candidates
    schedule, pp, count = pipeline.schedule, pipeline.pp, len(pipeline.stages)
    able = [(mesh, m) for mesh, m in candidates if runs(schedule, pp, count, m)]
    if not able and candidates:
        check_schedule(schedule, pp, count, candidates[0][1])
    return able


def _alternative(best: Solved, other: Solved, budget: float) -> Alternative:
    """Why a solved candidate lost."""
    ratio = other.step_time / best.step_time
    parts = [
        f"{kind} {_change(other.breakdown[kind], best.breakdown[kind])}"
        for kind in ("compute", "exposed communication")
        if abs(other.breakdown[kind] - best.breakdown[kind]) > 0.005 * best.step_time
    ]
    reason = f"{ratio:.2f}x the time" + (f": {', '.join(parts)}" if parts else "")
    if other.peak_memory > budget:
        reason = f"needs {(other.peak_memory - budget) / 2**30:.2f} GiB more than fits"
    return Alternative(degrees(other.mesh), other.zero, other.step_time, other.peak_memory, reason)


def _change(other: float, best: float) -> str:
    return f"{other / best:.2f}x" if best > 0 else f"+{other * 1e3:.3g} ms"


def _unfit(task: _Task, mesh: Mesh, pins: Pins, budget: float) -> Alternative | None:
    """A mesh on which nothing fits, with its fastest assignment if memory were no matter; None if hints exclude it."""
    solved = task.solve(mesh, pins, float("inf"))
    if solved is None:
        return None
    reason = f"needs {(task.least_memory(mesh, pins)[0] - budget) / 2**30:.2f} GiB more than fits"
    return Alternative(degrees(mesh), solved.zero, solved.step_time, solved.peak_memory, reason)


def _smallest(
    model: nn.Module, task: _Task, hints: Hints, pinned: list[tuple[Mesh, Pins]], budget: float, measure: Measure
) -> Plan:
    """The plan that keeps the fewest bytes, if that fits. HintError if the hints cannot be kept on any mesh,
    InfeasibleError if it does not fit."""
    bounds = [s.bound for mesh, pins in pinned if (s := task.solve(mesh, pins, float("inf"))) is not None]
    bound = min(bounds, default=0.0)
    least, plan = _least(model, task, hints, pinned, bound, measure)
    if plan is None:
        raise HintError(
            "the hints cannot be kept together",
            expected=f"a mesh dp x cp x tp = {task.setting.cluster.size} on which every hinted dim divides",
            found=f"none for {hints.to_dict()}",
            change="drop a hint of shard, or give degrees that divide its dims",
        )
    if least <= budget:
        return plan
    unpinned = [(mesh, pins) for mesh in meshes(task.setting.cluster.size, Hints()) for pins in (Pins(zero=3), Pins())]
    plain = replace(task, setting=replace(task.setting, zero=Zero()))
    free, other = _least(model, plain, Hints(pp=hints.pp), unpinned, bound, measure)
    assert other is not None  # nothing is pinned but ZeRO-3, where a dim divides
    raise _no_plan(task, hints, budget, (least, plan), (free, other))


def _least(
    model: nn.Module, task: _Task, hints: Hints, pinned: list[tuple[Mesh, Pins]], bound: float, measure: Measure
) -> tuple[float, Plan | None]:
    """The plan that needs the fewest bytes of those that keep the fewest on each mesh, and how many it needs."""
    found = sorted((task.least_memory(mesh, pins) for mesh, pins in pinned), key=lambda f: f[0])
    least, best = float("inf"), None
    for kept, solved in found:
        if solved is None or kept >= least:
            break  # no mesh that keeps as much can need less
        plan = measure(_plan(model, task, hints, solved, (), bound))
        if max(kept, plan.peak_memory) < least:
            least, best = max(kept, float(plan.peak_memory)), plan
    return least, best


def _no_plan(
    task: _Task, hints: Hints, budget: float, smallest: tuple[float, Plan], unhinted: tuple[float, Plan]
) -> InfeasibleError:
    """By how many bytes a budget is too small for the ``smallest`` plan, and for the smallest without hints."""

    def describe(mesh: Mesh, least: float) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in degrees(mesh).items() if a in mesh.names)
        return f"{axes} with {math.ceil(least)} bytes ({bytes_text(least)})"

    (least, plan), (free, other) = smallest, unhinted
    source = (
        "the hint memory_limit"
        if hints.memory_bytes and hints.memory_bytes <= budget
        else f"one {task.setting.cluster.device.name}"
    )
    if free <= budget:
        change = f"drop hints: {describe(other.mesh, free)} and zero={other.zero} fits"
    else:
        change = f"raise the limit to {math.ceil(least)} bytes, take more devices, or a smaller batch or sequence"
        if free < least:
            nearest = f"{describe(other.mesh, free)} and zero={other.zero}"
            change += f"; without the other hints {nearest} is nearest to fitting"
    return InfeasibleError(
        "no plan fits into the memory of a device",
        expected=f"at most {int(budget)} bytes a device ({source})",
        found=f"{math.ceil(least - budget)} bytes ({bytes_text(least - budget)}) too many: the smallest plan that "
        f"the hints allow is {describe(plan.mesh, least)}",
        change=change,
    )


def _parameter_plan(p: Parameter, storage: Layout, zero: Zero) -> ParameterPlan:
    kept = zero.keeping(bool(state_axes(storage)), p.master is not None)
    return ParameterPlan(p.spec.shape, storage, kept.copy, kept.gradient)


def _plan(
    model: nn.Module, task: _Task, hints: Hints, best: Solved, alternatives: tuple[Alternative, ...], bound: float
) -> Plan:
    batch = task.workload.global_batch or 1
    count = micro_batches(best.mesh, hints, batch, task.pipeline)
    setting = task.setting
    parameters = {
        p.name: _parameter_plan(p, best.assignment.sources[p.placeholder], setting.zero)
        for p in setting.captured.parameters
    }
    return Plan(
        model=type(model).__name__,
        structure=structure_hash((name, p.shape) for name, p in parameters.items()),
        degrees={"pp": hints.pp or 1, **degrees(best.mesh)},
        zero=best.zero,
        zero_group_size=zero_group_size(best.mesh),
        micro_batch_size=max(1, batch // data_degree(best.mesh) // count),
        num_micro_batches=count,
        schedule=task.pipeline.schedule if task.pipeline else None,
        stages=task.pipeline.stages if task.pipeline else (units(task.setting.captured, task.setting.operators),),
        recompute=task.setting.recompute,
        step_time=best.step_time,
        breakdown=best.breakdown,
        memory=best.memory,
        peak=best.memory,
        gap=max(0.0, best.step_time / bound - 1.0) if bound > 0 else 0.0,
        gap_space=GAP_SPACE,
        parameters=parameters,
        operators=operator_choices(task.setting.operators, best.assignment),
        layers=describe_layers(task.setting.captured, task.setting.operators, best.assignment),
        collectives=best.collectives,
        replicated=describe_replicated(task.setting.operators, best.assignment),
        alternatives=alternatives,
        cluster=task.setting.cluster.to_dict(),
        workload=task.workload.to_dict(),
        hints=hints.to_dict(),
        flops_share=best.flops_share,
        timing=best.timing,
    )
