"""From a plan and a batch's shapes to the program of a rank: capture, carry the plan over, emit, bind."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx, nn

from autopar.capture import capture
from autopar.capture.graph import Captured
from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.passes import recompute
from autopar.passes.partition import Program, partition
from autopar.passes.shard import Sharded, shard
from autopar.plan import Plan
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators
from autopar.solver.carry import plan_pins
from autopar.solver.program import solve
from autopar.solver.spmd import make_program, read
from autopar.workload import Workload


@dataclass(frozen=True)
class Specialization:
    """The program of a rank for one set of shapes, with what is needed to feed it."""

    captured: Captured
    operators: Operators
    assignment: Assignment
    sharded: Sharded
    program: Program

    def input_name(self, placeholder: fx.Node) -> str:
        """The name under which a captured placeholder enters the program."""
        return self.sharded.inputs[placeholder].name


def choose(captured: Captured, operators: Operators, plan: Plan) -> tuple[Any, np.ndarray]:
    """The space of a graph and the options that carry ``plan`` to it."""
    optimizer = Workload.from_dict(plan.workload).optimizer
    space, program = make_program(
        captured,
        operators,
        plan.mesh,
        Cluster.from_dict(plan.cluster),
        optimizer,
        plan_pins(captured, operators, plan),
        float("inf"),
    )
    solution = solve(program)
    assert solution is not None  # without a budget the space is never empty
    return space, solution.options


def emit(captured: Captured, operators: Operators, assignment: Assignment) -> Specialization:
    """Shard, tag and partition."""
    sharded = shard(captured, operators, assignment)
    recompute.tag(sharded.module.graph)
    return Specialization(captured, operators, assignment, sharded, partition(sharded))


def capture_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool | None = None
) -> Captured:
    """`capture`, with transformers' warnings about tracing kept quiet.

    Raises InputError if the batch does not fit ``forward``, and what `capture` raises.
    """
    import inspect

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
    model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool | None = None
) -> Specialization:
    """The program that ``plan`` gives for one batch's shapes, in this process alone."""
    captured = capture_batch(model, args, kwargs, training)
    operators = read(captured)
    space, options = choose(captured, operators, plan)
    return emit(captured, operators, space.assignment(options))
