"""The peak memory of a plan's training step, by the life of every tensor of the program that is emitted for it.

What rests between steps (parameters, optimizer state) is the plan's own account. To it come, whichever is most: what is
alive at some moment of the forward, of the backward, or of the optimizer's step. Plans say the same of themselves
without a program (`solver.peaks`); this is what they are checked against.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from liveness import Life, life
from torch import Tensor, fx, nn

from autopar._compat import storage_key
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.passes.inplace import reuse
from autopar.passes.partition import Program
from autopar.passes.phases import Phase, Phases
from autopar.passes.pipeline import Stage
from autopar.passes.shaped import Shaped
from autopar.passes.sums import keep_sums
from autopar.plan import Plan
from autopar.runtime.program import Emitted, StepProgram
from autopar.sharding.operators import ROUTED, Value
from autopar.solver.carry import keepings
from autopar.solver.peaks import ACTIVATIONS, COPIES, GRADIENTS, TRANSIENTS, Moment, StageLife, fullest, of_ranks
from autopar.solver.pipeline import Pipeline
from autopar.solver.setting import Setting
from autopar.specialize import specialize, specialize_step
from autopar.workload import Workload


def _life(graph: fx.Graph, given: Mapping[str, Any], entering: Mapping[str, str], leaving: Mapping[str, str]) -> Life:
    """`liveness.life` of a graph as it runs: with results over operands that are of no use afterwards. No rows of
    experts are there, whose graphs run as they are."""
    run = copy.deepcopy(graph)
    if not any(node.meta.get(ROUTED) for node in run.nodes):
        reuse(Shaped(run, [given[node.name] for node in run.find_nodes(op="placeholder")]))
    return life(run, given, entering, leaving)


def with_peak(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], captured: Captured
) -> Plan:
    """``plan`` with ``peaks`` as its program on the batch that was ``captured`` has them."""
    if plan.schedule is not None:
        ranks = _of_ranks(plan, specialize_step(model, plan, args, kwargs, captured=captured))
        return replace(plan, peaks=ranks)
    moments = [_optimizer_moment(plan, captured)]
    if plan.num_micro_batches > 1:
        step = specialize_step(model, plan, args, kwargs, captured=captured)
        moments += _of_phases(step.phases, _given(step), step.count)
    else:
        special = specialize(model, plan, args, kwargs, captured=captured)
        moments = [*_of_program(special.loss_only(), _given(special), moments[0])]
    return replace(plan, peaks=(fullest(Cluster.from_dict(plan.cluster).device, plan.memory, moments),))


def _of_ranks(plan: Plan, step: StepProgram) -> tuple[Moment, ...]:
    """The fullest moment of every rank of a pipeline."""
    assert plan.schedule is not None
    optimizer, cluster = Workload.from_dict(plan.workload).optimizer, Cluster.from_dict(plan.cluster)
    setting = Setting(step.captured, step.operators, cluster, optimizer, plan.recompute)
    kept = keepings(step.captured, step.operators, step.assignment, plan)
    pipeline = Pipeline(plan.degrees["pp"], plan.schedule, plan.stages)
    return of_ranks(setting, step.assignment, kept, step.count, pipeline, stage_lives(step))


def stage_lives(step: StepProgram) -> list[StageLife]:
    """The life of every stage of a pipeline, by its emitted graphs."""
    given = _given(step)
    values: dict[str, Any] = dict(given)
    for stage in step.stages:
        for phase in (stage.prologue, stage.once):
            _run(phase, values, {}, {})
    forwards = []
    for stage in step.stages:
        saved = _kinds(stage.saved, ACTIVATIONS)
        forwards.append(_run(stage.forward, values, _kinds(stage.receives, TRANSIENTS) | saved, saved))
    for stage in step.stages:
        _run(stage.known, values, {}, {})
    backwards = [_backward(stage, values, given) for stage in reversed(step.stages)][::-1]
    return [StageLife(forward, *backward) for forward, backward in zip(forwards, backwards, strict=True)]


def _backward(
    stage: Stage, values: dict[str, Any], given: Collection[str]
) -> tuple[Moment, Moment, Moment, Moment, Moment, Moment, int, int, int, int]:
    """What `StageLife` has after the forward, of a stage whose forward has run, as have the stages behind it."""
    received, saved = _kinds(stage.receives_back, TRANSIENTS), _kinds(stage.saved, ACTIVATIONS)
    ends = [name for name in stage.left if name in stage.backward.outputs]
    once = (*(stage.once.outputs if stage.once else ()), *stage.awaited, *(stage.known.outputs if stage.known else ()))
    left = [name for name in stage.weight.inputs if name not in given and name not in once]
    sums = _kinds(ends, GRADIENTS)
    return (
        _run(stage.backward, values, received | saved, sums),
        _run(stage.input, values, received | saved, _kinds(stage.between, ACTIVATIONS)),
        _run(stage.weight, values, _kinds(left, ACTIVATIONS), sums),
        _adding(stage.backward, values, received | saved, ends),
        _adding(stage.weight, values, _kinds(left, ACTIVATIONS), ends),
        _run(stage.finish, values, {}, {}),
        _bytes(values, stage.saved),
        _bytes(values, left),
        _bytes(values, ends),
        _bytes(values, once),
    )


def _run(
    phase: Phase | None, values: dict[str, Any], entering: Mapping[str, str], leaving: Mapping[str, str]
) -> Moment:
    """The fullest moment of a phase, of whose ``values`` it makes more; kinds are by name. Nothing without a phase."""
    if phase is None:
        return {}
    nodes = phase.module.graph.output_node().args[0]
    assert isinstance(nodes, tuple)
    by_node = {n.name: leaving[name] for n, name in zip(nodes, phase.outputs, strict=True) if name in leaving}
    found = _life(phase.module.graph, values, entering, by_node)
    values.update(zip(phase.outputs, found.outputs, strict=True))
    return found.peak


def _adding(
    phase: Phase, values: Mapping[str, Any], entering: Mapping[str, str], ends: Collection[str]
) -> Moment:
    """The fullest moment of a phase that has run before and now adds to what it has left under the names ``ends``."""
    places = [i for i, name in enumerate(phase.outputs) if name in ends]
    module = keep_sums(phase.module, (), places)
    sums = {f"sum_{i}": values[phase.outputs[i]] for i in places}
    return _life(module.graph, {**values, **sums}, entering, {}).peak


def _kinds(names: Collection[str], kind: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


def _bytes(values: Mapping[str, Any], names: Collection[str]) -> int:
    tensors = [values[name] for name in names if isinstance(values[name], Tensor)]
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _given(emitted: Emitted) -> dict[str, Tensor]:
    """What enters a rank's program, on the meta device, by name."""
    mesh = emitted.assignment.mesh
    given = {emitted.sharded.coordinates.name: torch.empty(len(mesh.axes), dtype=torch.int64, device="meta")}
    masters = {p.placeholder: p.storage_dtype for p in emitted.captured.parameters}
    for node, new in emitted.sharded.inputs.items():
        spec = emitted.operators.specs[Value(node)]
        shape = emitted.assignment.sources[node].local_shape(mesh, spec.shape)
        given[new.name] = torch.empty(shape, dtype=masters.get(node, spec.dtype), device="meta")
    return given


def _leaving(module: fx.GraphModule, names: Sequence[str], saved: Collection[str]) -> dict[str, str]:
    """The kind of what a graph returns under ``names``: saved for the backward, or on its way to a gradient."""
    nodes = module.graph.output_node().args[0]
    assert isinstance(nodes, tuple)
    pairs = zip(nodes, names, strict=True)
    return {n.name: ACTIVATIONS if name in saved else GRADIENTS for n, name in pairs if isinstance(n, fx.Node)}


def _of_program(program: Program, given: Mapping[str, Tensor], optimizer: Moment) -> Iterator[Moment]:
    """The fullest moments of a forward, its backward and the ``optimizer``'s step; copies that are kept from step to
    step are there in all of them."""
    if program.copies is None:
        yield from (optimizer, *_of_directions(program, given))
        return
    made = _life(program.copies.module.graph, given, {}, {})
    yield made.peak
    given = {**given, **dict(zip(program.copies.outputs, made.outputs, strict=True))}
    copies = {storage_key(t): t.untyped_storage().nbytes() for t in made.outputs}
    for moment in (optimizer, *_of_directions(program, given)):
        yield _sum(moment, {COPIES: sum(copies.values())})


def _of_directions(program: Program, given: Mapping[str, Tensor]) -> Iterator[Moment]:
    """The fullest moments of a forward and its backward."""
    forward = _life(program.forward.graph, given, {}, dict.fromkeys(program.saved, ACTIVATIONS))
    yield forward.peak
    if program.backward is not None:
        saved = dict(zip(program.saved, forward.outputs[program.num_results :], strict=True))
        returned = program.backward.graph.output_node().args[0]
        assert isinstance(returned, tuple)
        leaving = _leaving(program.backward, [""] * len(returned), ())
        yield _life(program.backward.graph, {**given, **saved}, dict.fromkeys(saved, ACTIVATIONS), leaving).peak


@dataclass
class _Step:
    """Walks through the phases of a step over micro-batches, as `runtime.step.run_step` runs them. ``resting`` is what
    phases before have left, ``sums`` are the bytes of what micro-batches add up, ``ahead`` those of what other
    micro-batches have saved."""

    values: dict[str, Any]
    saved: frozenset[str]
    resting: int = 0
    sums: int = 0
    ahead: int = 0

    def run(self, phase: Phase | None, entering: Collection[str] = ()) -> Iterator[Moment]:
        """The fullest moment of one phase."""
        if phase is None:
            return
        leaving = _leaving(phase.module, phase.outputs, self.saved)
        found = _life(phase.module.graph, self.values, dict.fromkeys(entering, ACTIVATIONS), leaving)
        self.values.update(zip(phase.outputs, found.outputs, strict=True))
        yield _sum(found.peak, {TRANSIENTS: self.resting, GRADIENTS: self.sums, ACTIVATIONS: self.ahead})

    def left(self, *phases: Phase | None) -> int:
        """The bytes of what phases return and the backward does not take."""
        names = [name for phase in phases if phase is not None for name in phase.outputs if name not in self.saved]
        return _bytes(self.values, names)


def _of_phases(phases: Phases, given: Mapping[str, Tensor], count: int) -> Iterator[Moment]:
    """The fullest moments of a step over ``count`` micro-batches; from the second on all are alike, but that all
    forwards may come first."""
    made_once = [name for p in (phases.once, phases.between) if p is not None for name in p.outputs]
    step = _Step(dict(given), frozenset(phases.backward.inputs if phases.backward else ()).difference(made_once))
    yield from step.run(phases.prologue)
    yield from step.run(phases.once)
    step.resting = step.left(phases.once)
    saved = [name for name in phases.forward.outputs if name in step.saved and name not in phases.awaited]
    yield from step.run(phases.forward)
    if phases.awaited:
        step.ahead = (count - 1) * _bytes(step.values, saved)
        yield from step.run(phases.forward)
        yield from step.run(phases.between)
    yield from step.run(phases.backward, saved)
    step.ahead -= _bytes(step.values, saved) if phases.awaited else 0
    step.sums = step.left(phases.forward, phases.backward)
    if not phases.awaited:
        yield from step.run(phases.forward)
    if phases.backward is not None:
        moment = _adding(phases.backward, step.values, dict.fromkeys(saved, ACTIVATIONS), phases.backward.outputs)
        yield _sum(moment, {TRANSIENTS: step.resting, GRADIENTS: step.sums, ACTIVATIONS: step.ahead})
    yield from step.run(phases.finish)


def _sum(first: Moment, second: Moment) -> Moment:
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in (*first, *second)}


def _optimizer_moment(plan: Plan, captured: Captured) -> Moment:
    """The optimizer's step. torch.optim.AdamW computes the root of the second moment and what it is divided by beside
    the state (torch/optim/adam.py): of all parameters at once on GPUs (foreach), of one after the other on CPUs."""
    moment = {GRADIENTS: plan.memory.get(GRADIENTS, 0)}
    if Workload.from_dict(plan.workload).optimizer != "adamw" or not moment[GRADIENTS]:
        return moment
    trained = [p for p in captured.parameters if p.gradient is not None]
    specs = [replace(p.spec, dtype=p.storage_dtype) for p in trained]
    layouts = [plan.parameters[p.name].storage for p in trained]
    nbytes = [layout.local_bytes(plan.mesh, spec) for layout, spec in zip(layouts, specs, strict=True)]
    one_by_one = Cluster.from_dict(plan.cluster).device.name == "cpu"
    return {**moment, TRANSIENTS: 2 * max(nbytes) if one_by_one else sum(nbytes)}
