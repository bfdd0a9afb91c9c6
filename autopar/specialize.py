"""From a plan and a batch's shapes to the program of a rank: capture, carry the plan over, emit."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from autopar.capture import capture
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.fallback import fallbacks
from autopar.plan import Plan
from autopar.runtime.batches import input_names, widened
from autopar.runtime.program import Specialization, emit
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.operators import value_of
from autopar.solver.carry import plan_pins
from autopar.solver.program import solve
from autopar.solver.space import DATA_AXIS
from autopar.solver.spmd import make_program, read
from autopar.workload import Workload


def capture_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool | None = None
) -> Captured:
    """`capture`, with transformers' warnings about tracing kept quiet.

    Raises InputError if the batch does not fit ``forward``, and what `capture` raises.
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
        return capture(model, args, kwargs, training=training)


def specialize(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    captured: Captured | None = None,
    inputs: str = "global",
) -> Specialization:
    """The program that ``plan`` gives for one batch's shapes.

    What the plan decides is kept: where parameters rest and what heavy operators split; the rest is solved again for
    these shapes. For the batch that the plan was made for the answer is the plan's own; what does not divide another
    takes the nearest valid layout and is listed in ``fallbacks``. ``captured`` saves a trace. With "local" ``inputs``
    the batch is one rank's part, cut along dim 0 over dp, and so are the tensors that the program takes; InputError if
    they differ in dim 0.
    """
    local = inputs == "local"
    if local:
        args, kwargs = widened(args, kwargs, plan.mesh.degree(DATA_AXIS))
    captured = captured or capture_batch(model, args, kwargs, training)
    operators = read(captured)
    workload = Workload.from_dict(plan.workload)
    pins = replace(plan_pins(captured, operators, plan), inputs=_split_inputs(captured, plan.mesh) if local else {})
    cluster = Cluster.from_dict(plan.cluster)
    space, program = make_program(captured, operators, plan.mesh, cluster, workload.optimizer, pins, float("inf"))
    solution = solve(program)
    assert solution is not None  # without a budget every space has an answer
    assignment = space.assignment(solution.options)
    lost = fallbacks(captured, operators, assignment, plan, input_names(args, kwargs))
    lengths = _length_dims(captured) if workload.pad_to else ()
    return replace(emit(captured, operators, assignment), fallbacks=lost, length_dims=lengths)


def _split_inputs(captured: Captured, mesh: Mesh) -> dict[fx.Node, Layout]:
    """Every tensor of the batch split along dim 0 over the data axis."""
    if mesh.degree(DATA_AXIS) == 1:
        return {}
    dims = {node: node.meta["val"].dim() for node in captured.inputs}
    return {node: Layout.shard(ndim, {DATA_AXIS: 0}) for node, ndim in dims.items() if ndim > 0}


def _length_dims(captured: Captured) -> tuple[frozenset[int], ...]:
    """For every output its dims that carry dim 1 of the inputs, the sequence."""
    dims = read(captured, 1).batch_dims
    return tuple(dims[value_of(output.node)] for output in captured.outputs)
