"""The program of a rank for one set of shapes, with what is needed to feed it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.capture.graph import Captured
from autopar.passes import recompute
from autopar.passes.partition import Program, partition
from autopar.passes.shard import Sharded, shard
from autopar.runtime.batches import Fallback
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators


@dataclass(frozen=True, eq=False)
class Specialization:
    """A captured graph, what was decided for it, and the program that was emitted; ``fallbacks`` are what the plan
    splits and these shapes do not divide, ``length_dims`` the dims of every output that carry dim 1 of inputs, known
    only where batches are padded."""

    captured: Captured
    operators: Operators
    assignment: Assignment
    sharded: Sharded
    program: Program
    fallbacks: tuple[Fallback, ...] = ()
    length_dims: tuple[frozenset[int], ...] = ()

    def input_name(self, placeholder: fx.Node) -> str:
        """The name under which a captured placeholder enters the program."""
        return self.sharded.inputs[placeholder].name

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

    def loss_only(self) -> Program:
        """The program that returns what carries a gradient, and leaves the other tensors of the model's result out."""
        outputs = enumerate(self.captured.outputs)
        return partition(self.sharded, results=[i for i, o in outputs if o.tangent is not None or o.buffer is not None])


def emit(captured: Captured, operators: Operators, assignment: Assignment) -> Specialization:
    """Shard, tag and partition."""
    sharded = shard(captured, operators, assignment)
    recompute.tag(sharded.module.graph)
    return Specialization(captured, operators, assignment, sharded, partition(sharded))
