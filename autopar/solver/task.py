"""What every candidate of a search is solved for: the fastest assignment on its mesh that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cost_model.communication import collective_seconds
from autopar.garbage import collecting_later
from autopar.schedule import stage_ranks
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.rule import layouts
from autopar.solver.held import in_flight
from autopar.solver.pins import Pins
from autopar.solver.pipeline import Pipeline
from autopar.solver.program import Floats, Program, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Space
from autopar.solver.spmd import Solved, account, make_program
from autopar.solver.staged import Stages, crossing, located

#: Seconds that a byte is worth where the fewest are looked for: a second less for a megabyte more is not taken, but of
#: ways that keep the same bytes the faster one, which has fewer copies in passing.
BYTE_PRICE = 1e-6


@dataclass(frozen=True)
class Task:
    """What a candidate is solved for: a ``mesh`` and what is decided already; ``pipeline`` is the one of which the mesh
    is a stage."""

    setting: Setting
    mesh: Mesh
    pins: Pins
    pipeline: Pipeline | None = None

    def solve(self, budget: float) -> Solved | None:
        """The fastest assignment that keeps at most ``budget`` bytes a device, or None.

        The program counts a saved view as the solver expects it to be read, and of a pipeline the whole model; where
        the account of the answer comes out higher, the answer's own memory less what is too much is what the next one
        may have.
        """
        times = 1 if self.pipeline is None else self.pipeline.pp
        limit = np.inf if np.isinf(budget) else budget * times
        space, program = self._program
        while True:
            solution = solve(replace(program, budget=limit))
            if solution is None:
                return None
            stages = self._stages(space.assignment(solution.options))
            needed = sum(stages.fullest.values())
            if needed <= budget:
                return account(stages)
            limit = min(limit, solution.memory) - times * (needed - budget)

    def least_memory(self) -> tuple[float, Solved | None]:
        """Bytes a device for which `solve` finds an assignment, about the fewest, and that assignment; inf and None if
        there is none."""
        space, program = self._program
        pairs = zip(program.seconds, program.memory, strict=True)
        seconds = [s + BYTE_PRICE * m for s, m in pairs]
        solution = solve(replace(program, seconds=seconds))
        if solution is None:
            return float("inf"), None
        solved = account(self._stages(space.assignment(solution.options)))
        if self.pipeline is not None:
            return solved.peak_memory, solved
        return max(solution.memory, solved.peak_memory), solved

    @cached_property
    def _program(self) -> tuple[Space, Program]:
        """The program, which counts as many micro-batches in flight as the fullest rank of a pipeline holds, and what
        its stages send one another."""
        line, schedule, pp, chunks = self.pipeline, None, 1, 1
        if line is not None:
            schedule, pp, chunks = line.schedule, line.pp, len(line.stages) // line.pp
        first = self.setting.forwards_first
        held = float(in_flight(schedule, pp, chunks, self.pins.micro_batches, first).max())
        space, program = make_program(self.setting, self.mesh, self.pins, in_flight=held)
        if line is None:
            return space, program
        return space, replace(program, seconds=self._with_sends(line, space, program.seconds))

    def _with_sends(self, line: Pipeline, space: Space, seconds: Sequence[Floats]) -> list[Floats]:
        """The seconds of all options with those in which what they make is sent on to other ranks of the pipeline, and
        its gradient back: every rank of a stage sends its own piece, and what is whole on all of them, all of it."""
        setting, operators = self.setting, self.setting.operators
        group, micro_batches = setting.cluster.group(self.mesh.size, line.pp), self.pins.micro_batches
        ranks = stage_ranks(line.schedule, line.pp, len(line.stages))
        at, found = located(setting.captured, operators, line.stages), [s.copy() for s in seconds]
        for value, (first, last) in crossing(setting.captured, operators, at).items():
            times = 2 * micro_batches * sum(ranks[s] != ranks[s + 1] for s in range(first, last))
            d, strategies = space.of_node[value.node]
            for k, strategy in enumerate(strategies):
                layout = layouts(operators.by_node[value.node].rule, strategy, self.mesh)[1][value.index]
                sent = layout.local_bytes(self.mesh, operators.specs[value]) / micro_batches
                found[d][k] += times * float(collective_seconds("p2p", sent, group, setting.cluster.device))
        return found

    def _stages(self, assignment: Assignment) -> Stages:
        """The stages of an assignment, of a whole step on a mesh or of a pipeline of such meshes."""
        with collecting_later():
            return Stages(self.setting, assignment, self.pins.micro_batches, self.pipeline)
