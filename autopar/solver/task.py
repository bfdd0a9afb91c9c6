"""What every candidate of a search is solved for: the fastest assignment on its mesh that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.garbage import collecting_later
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.solver.estimate import in_flight
from autopar.solver.pipeline import Pipeline
from autopar.solver.program import Program, solve
from autopar.solver.setting import Setting
from autopar.solver.space import Pins, Space
from autopar.solver.spmd import Solved, account, make_program
from autopar.solver.staged import Stages


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
        # Only bytes count; where there is no way between two layouts there still is none.
        pairs = zip(program.seconds, program.memory, strict=True)
        seconds = [np.where(np.isfinite(s), m * 1e-9, s) for s, m in pairs]
        edges = [replace(e, cost=np.where(np.isfinite(e.cost), 0.0, np.inf)) for e in program.edges]
        solution = solve(replace(program, seconds=seconds, edges=edges))
        if solution is None:
            return float("inf"), None
        solved = account(self._stages(space.assignment(solution.options)))
        if self.pipeline is not None:
            return solved.peak_memory, solved
        return max(solution.memory, solved.peak_memory), solved

    @cached_property
    def _program(self) -> tuple[Space, Program]:
        """The program, which counts as many micro-batches in flight as the fullest rank of a pipeline holds."""
        line, held = self.pipeline, 1.0
        if line is not None:
            chunks = len(line.stages) // line.pp
            held = float(in_flight(line.schedule, line.pp, chunks, self.pins.micro_batches).max())
        return make_program(self.setting, self.mesh, self.pins, in_flight=held)

    def _stages(self, assignment: Assignment) -> Stages:
        """The stages of an assignment, of a whole step on a mesh or of a pipeline of such meshes."""
        with collecting_later():
            return Stages(self.setting, assignment, self.pins.micro_batches, self.pipeline)
