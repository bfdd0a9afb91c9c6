"""The program of a rank for one set of shapes, with what is needed to feed it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import fx, nn

from autopar.capture.graph import Captured
from autopar.passes import recompute, zero
from autopar.passes.cached import in_place
from autopar.passes.partition import Program, partition
from autopar.passes.phases import Phases
from autopar.passes.pipeline import Stage
from autopar.passes.shard import Sharded, shard
from autopar.plan import Plan
from autopar.runtime.batches import Fallback
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, eq=False)
class Specialization:
    """A captured graph, what was decided for it, and the program that was emitted; ``fallbacks`` are what the plan
    splits and these shapes do not divide, ``length_dims`` the dims of every output that carry dim 1 of inputs, known
    only where batches are padded; ``units`` the modules of every pipeline stage."""

    captured: Captured
    operators: Operators
    assignment: Assignment
    sharded: Sharded
    program: Program
    fallbacks: tuple[Fallback, ...] = ()
    length_dims: tuple[frozenset[int], ...] = ()
    units: tuple[tuple[str, ...], ...] = ()

    def input_name(self, placeholder: fx.Node) -> str:
        """The name under which a captured placeholder enters the program."""
        return self.sharded.inputs[placeholder].name

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the results of `whole` among the captured outputs: all."""
        return tuple(range(len(self.captured.outputs)))

    @cached_property
    def reached(self) -> dict[str, frozenset[int]]:
        """For every parameter with a gradient the places of the outputs from which gradients flow into it."""
        places = {o.tangent: frozenset([i]) for i, o in enumerate(self.captured.outputs) if o.tangent is not None}
        found: dict[fx.Node, frozenset[int]] = {}
        for node in self.captured.graph.nodes:
            found[node] = places.get(node, frozenset()).union(*(found[arg] for arg in node.all_input_nodes))
        return {p.name: found[p.gradient] for p in self.captured.parameters if p.gradient is not None}

    def whole(self) -> Program:
        """Forward and backward, with all results."""
        return self.program

    def evaluation(self) -> Program:
        """The forward alone, without anything kept for a backward."""
        return partition(self.sharded, gradients=False)

    def generation(self) -> Program:
        """The forward of a step of a generation, which writes keys and values over those that it is given."""
        program = self.evaluation()
        in_place(program.forward)
        return program

    def loss_only(self) -> Program:
        """The program that returns what carries a gradient, and leaves the other tensors of the model's result out."""
        outputs = enumerate(self.captured.outputs)
        return partition(self.sharded, results=[i for i, o in outputs if o.tangent is not None or o.buffer is not None])


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What runs a whole training step: ``phases`` over ``count`` micro-batches. ``assignment`` is on the mesh with the
    micro-batch axis where there are several; ``split`` are the captured inputs that every micro-batch has a part of,
    ``places`` those of the results among the captured outputs, ``loss`` is the one of the loss. In a pipeline the
    phases are cut into ``stages``, which ``pp`` ranks (times those of a stage) run by ``schedule``."""

    captured: Captured
    operators: Operators
    assignment: Assignment
    sharded: Sharded
    phases: Phases
    count: int
    split: frozenset[fx.Node]
    places: tuple[int, ...]
    loss: int
    stages: tuple[Stage, ...] = ()
    schedule: str = ""
    pp: int = 1

    def hash(self) -> str:
        """SHA-256 of the text of all graphs, those of all stages in a pipeline: equal on every rank."""
        every = [stage.hash() for stage in self.stages] or [self.phases.hash()]
        return hashlib.sha256("".join(every).encode()).hexdigest()

    def input_name(self, placeholder: fx.Node) -> str:
        """The name under which a captured placeholder enters the phases."""
        return self.sharded.inputs[placeholder].name


#: What a rank runs: a forward with its backward, or a whole step.
Emitted = Specialization | StepProgram


class Maker(Protocol[T]):
    """Makes a program for a batch's shapes: ``make(model, plan, args, kwargs, training=, inputs=)``."""

    def __call__(
        self,
        model: nn.Module,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        training: bool | None = None,
        inputs: str = "global",
    ) -> T: ...


@dataclass(frozen=True)
class Makers:
    """How programs are made, of a forward with its backward, of a whole step, and of a forward with a cache. The
    runtime is handed them: it knows how to run programs and not how they are decided."""

    forward: Maker[Specialization]
    step: Maker[StepProgram]
    cached: Maker[Specialization]


def emit(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    mode: str = "none",
    copies: Mapping[str, str] | None = None,
    compiles: bool = False,
) -> Specialization:
    """Shard, tag by ``mode`` of recomputation, keep ``copies`` of parameters (`passes.zero`), and partition; with
    ``compiles`` for a run that compiles the graphs."""
    sharded = shard(captured, operators, assignment)
    recompute.tag(sharded, operators, mode, compiles)
    zero.keep(sharded.module.graph, copies or {})
    return Specialization(captured, operators, assignment, sharded, partition(sharded))
