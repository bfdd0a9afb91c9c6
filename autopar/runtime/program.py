"""The program of a rank for one set of shapes, with what is needed to feed it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.graph import Captured
from autopar.passes import recompute
from autopar.passes.partition import Program, partition
from autopar.passes.shard import Sharded, shard
from autopar.runtime.batches import Fallback
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators


@dataclass(frozen=True)
class Specialization:
    """A captured graph, what was decided for it, and the program that was emitted; ``fallbacks`` are what the plan
    splits and these shapes do not divide."""

    captured: Captured
    operators: Operators
    assignment: Assignment
    sharded: Sharded
    program: Program
    fallbacks: tuple[Fallback, ...] = ()

    def input_name(self, placeholder: fx.Node) -> str:
        """The name under which a captured placeholder enters the program."""
        return self.sharded.inputs[placeholder].name


def emit(captured: Captured, operators: Operators, assignment: Assignment) -> Specialization:
    """Shard, tag and partition."""
    sharded = shard(captured, operators, assignment)
    recompute.tag(sharded.module.graph)
    return Specialization(captured, operators, assignment, sharded, partition(sharded))
