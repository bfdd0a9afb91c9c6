"""From a plan and a batch's shapes to the program of a rank: capture, carry the plan over, emit."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx, nn

from autopar.arguments import is_for
from autopar.capture import capture
from autopar.capture.activations import Activations
from autopar.capture.graph import Captured
from autopar.capture.hf_cache import TracedCache
from autopar.cluster import Cluster
from autopar.errors import InputError, MicroBatchError
from autopar.fallback import fallbacks
from autopar.garbage import collecting_later
from autopar.passes import pipeline, recompute, zero
from autopar.passes.phases import cut
from autopar.passes.shard import shard
from autopar.plan import Plan
from autopar.runtime.batches import input_names, widened
from autopar.runtime.program import Makers, Specialization, StepProgram, emit
from autopar.schedule import FORWARDS_FIRST
from autopar.sharding.assignment import Assignment
from autopar.sharding.axes import BATCH_AXES, degree
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.operators import Operators, value_of
from autopar.sharding.stages import homes
from autopar.solver.carry import keepings, plan_pins
from autopar.solver.microbatches import in_micro_batches, loss_place, rows, split_inputs
from autopar.solver.pipeline import Stages, balanced, costs
from autopar.solver.program import solve
from autopar.solver.setting import Setting
from autopar.solver.spmd import make_program, read
from autopar.workload import Precision, Workload


def capture_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool | None = None,
    precision: Precision | None = None,
    gradients: bool = True,
    activations: Activations | None = None,
) -> Captured:
    """`capture`, with transformers' warnings about tracing kept quiet. Of a forward with a cache all blocks are traced,
    since each has keys and values of its own.

    ``activations`` are the hint of that name. Raises InputError if the batch does not fit ``forward``, and what
    `capture` raises.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(model.forward).parameters)
        raise InputError(
            f"the batch does not fit {type(model).__name__}.forward: {error}",
            expected=f"inputs among {accepted}",
            found=", ".join([f"{len(args)} positional"] * bool(args) + list(kwargs)) or "nothing",
            change="pass the batch as the model's forward takes it",
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more: dict[str, Any] = {"training": training, "precision": precision, "gradients": gradients}
        more["activations"] = activations
        return capture(model, args, kwargs, **more, whole=any(isinstance(x, TracedCache) for x in kwargs.values()))


@dataclass(frozen=True)
class _Carried:
    """A batch's graph with what a plan decides for it."""

    captured: Captured
    operators: Operators
    assignment: Assignment


def _capture_for(
    model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool | None
) -> Captured:
    """A batch's graph in the dtype in which ``plan`` computes, with what its hints say of activations."""
    precision, activations = Workload.from_dict(plan.workload).precision, plan.hints.get("activations")
    return capture_batch(model, args, kwargs, training, precision, activations=activations)


def _carry(plan: Plan, captured: Captured, local: bool, micro_batches: int = 1) -> _Carried:
    """Solve for the shapes of a captured batch what ``plan`` leaves open."""
    operators, cluster = read(captured), Cluster.from_dict(plan.cluster)
    split = _split_inputs(captured, plan.mesh) if local else {}
    pins = replace(plan_pins(captured, operators, plan), inputs=split, micro_batches=micro_batches)
    optimizer = Workload.from_dict(plan.workload).optimizer
    setting = Setting(captured, operators, cluster, optimizer, plan.recompute)
    space, program = make_program(setting, plan.mesh, pins)
    solution = solve(program)
    assert solution is not None  # without a budget every space has an answer
    return _Carried(captured, operators, space.assignment(solution.options))


@collecting_later()
def specialize(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    captured: Captured | None = None,
    inputs: str = "global",
    compiles: bool = False,
) -> Specialization:
    """The program that ``plan`` gives for one batch's shapes.

    What the plan decides is kept: where parameters rest and what heavy operators split; the rest is solved again for
    these shapes. For the batch that the plan was made for the answer is the plan's own; what does not divide another
    takes the nearest valid layout and is listed in ``fallbacks``. ``captured`` saves a trace. With "local" ``inputs``
    the batch is one rank's part, cut along dim 0 over dp, and so are the tensors that the program takes; InputError if
    they differ in dim 0. ``compiles`` says that the graphs will be compiled.
    """
    local = inputs == "local"
    if local:
        args, kwargs = widened(args, kwargs, plan.degrees["dp"])
    found = _carry(plan, captured or _capture_for(model, plan, args, kwargs, training), local)
    lost = fallbacks(found.captured, found.operators, found.assignment, plan, input_names(args, kwargs))
    lengths = _length_dims(found.captured) if Workload.from_dict(plan.workload).pad_to else ()
    decided = keepings(found.captured, found.operators, found.assignment, plan)
    copies = {name: kept.copy for name, kept in decided.items()}
    emitted = emit(found.captured, found.operators, found.assignment, plan.recompute, copies, compiles)
    units = _stage_units(model, plan, found.captured, found.operators) if plan.schedule is not None else ()
    return replace(emitted, fallbacks=lost, length_dims=lengths, units=units)


def specialize_cached(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    inputs: str = "global",
) -> Specialization:
    """`specialize` for a forward with a cache of keys and values (`hf_cache.TracedCache`): without a backward."""
    precision = Workload.from_dict(plan.workload).precision
    activations = plan.hints.get("activations")
    captured = capture_batch(model, args, kwargs, training, precision, gradients=False, activations=activations)
    return specialize(model, plan, args, kwargs, captured=captured, inputs=inputs)


def specialize_step(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    captured: Captured | None = None,
    inputs: str = "global",
    compiles: bool = False,
) -> StepProgram:
    """The program of a whole training step on one batch, in micro-batches as the plan has them: loss and gradients of
    the global batch. Takes what `specialize` takes. Raises InputError if the model returns no loss, MicroBatchError if
    it mixes samples."""
    local = inputs == "local"
    if local:
        args, kwargs = widened(args, kwargs, plan.degrees["dp"])
    captured = captured or _capture_for(model, plan, args, kwargs, training)
    loss, count = loss_place(captured), _count(plan, captured)
    found = _carry(plan, captured, local, count)
    operators, assignment = found.operators, found.assignment
    kept = keepings(captured, operators, assignment, plan)
    split = frozenset(rows(captured))
    if count > 1:
        split = split_inputs(captured)
        assignment = in_micro_batches(captured, operators, assignment, count, split, kept)
    emitted = shard(captured, operators, assignment)
    recompute.tag(emitted, operators, plan.recompute, compiles)
    zero.keep(emitted.module.graph, {name: keeping.copy for name, keeping in kept.items()})
    given = [emitted.inputs[node] for node in captured.inputs if node in split]
    places = tuple(i for i, o in enumerate(captured.outputs) if i == loss or o.buffer is not None)
    once, merge = zero.kept_for_the_step, plan.schedule is None
    phases = cut(emitted, assignment.mesh, given, results=places, hoist=once, merge=merge)
    program = StepProgram(captured, operators, assignment, emitted, phases, count, split, places, loss)
    if plan.schedule is None:
        return program
    if phases.awaited and plan.schedule not in FORWARDS_FIRST:
        raise _backwards_wait(plan.schedule)
    by_stage = _stage_units(model, plan, captured, operators)
    held = {program.input_name(p.placeholder): homes((p.name, *p.aliases), by_stage) for p in captured.parameters}
    stages = pipeline.cut(phases, by_stage, held, [program.input_name(node) for node in captured.inputs])
    return replace(program, stages=stages, schedule=plan.schedule, pp=plan.degrees["pp"])


def _backwards_wait(schedule: str) -> MicroBatchError:
    return MicroBatchError(
        f"the schedule {schedule} cannot run the model in micro-batches: its backwards need a sum over all forwards",
        expected=f"a schedule that runs all forwards first: {', '.join(sorted(FORWARDS_FIRST))}",
        found=f"schedule {schedule}, and a loss that is no sum over samples, as a balancing loss of experts",
        change="plan for this model, or with the hint schedule=\"gpipe\"",
    )


def _stage_units(model: nn.Module, plan: Plan, captured: Captured, operators: Operators) -> Stages:
    """The modules of every pipeline stage: the plan's, or for another model as many stages of equal seconds."""
    if is_for(plan, model):
        return plan.stages
    return balanced(costs(captured, operators, Cluster.from_dict(plan.cluster)), len(plan.stages))


def _count(plan: Plan, captured: Captured) -> int:
    """Into how many micro-batches a batch is cut: the plan's, or for a batch of another size as many as keep them at
    most as large as the plan's and divide it, over the data axis too if there is such a number."""
    if plan.num_micro_batches == 1:
        return 1
    batch, dp = max(rows(captured).values(), default=1), plan.degrees["dp"]
    least = math.ceil(batch / (plan.micro_batch_size * dp))
    counts = [count for count in range(least, batch + 1) if batch % count == 0]
    return next((count for count in counts if batch % (count * dp) == 0), counts[0])


def _split_inputs(captured: Captured, mesh: Mesh) -> dict[fx.Node, Layout]:
    """Every tensor of the batch split along dim 0 over the axes of the batch."""
    axes = {axis: 0 for axis in BATCH_AXES if degree(mesh, axis) > 1}
    dims = {node: node.meta["val"].dim() for node in captured.inputs}
    return {node: Layout.shard(ndim, axes) for node, ndim in dims.items() if ndim > 0 and axes}


def _length_dims(captured: Captured) -> tuple[frozenset[int], ...]:
    """For every output its dims that carry dim 1 of the inputs, the sequence."""
    dims = read(captured, 1).batch_dims
    return tuple(dims[value_of(output.node)] for output in captured.outputs)


def makers(compiles: bool) -> Makers:
    """How a `ParallelModule` comes to its programs, where it ``compiles`` their graphs or not."""
    return Makers(
        partial(specialize, compiles=compiles), partial(specialize_step, compiles=compiles), specialize_cached
    )
