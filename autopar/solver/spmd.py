"""One graph on one mesh: build the space, price it, solve it, and account for the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.capture.blocks import first_of
from autopar.capture.graph import Captured
from autopar.cost_model.step import Timing
from autopar.garbage import collecting_later
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operators, read_operators
from autopar.sharding.recompute import Kept
from autopar.sharding.rule import work_share
from autopar.solver.costs import Prices, price
from autopar.solver.pins import Pins
from autopar.solver.program import Program
from autopar.solver.setting import Setting, is_sharded
from autopar.solver.space import Space, build_space
from autopar.solver.staged import Stages


@dataclass(frozen=True)
class Solved:
    """An assignment with its account: seconds by part, bytes by kind, collectives of a step, the largest
    share of the FLOPs that a rank does, the kind of ``zero`` (0 where no parameter rests sharded), the ``timing`` that
    seconds are simulated from, and what the backward takes over (``held``)."""

    mesh: Mesh
    assignment: Assignment
    breakdown: dict[str, float]
    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    flops_share: float
    zero: int
    timing: Timing
    held: Kept

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return sum(self.breakdown.values())

    @property
    def peak_memory(self) -> int:
        """Bytes a device."""
        return sum(self.memory.values())


@collecting_later()
def read(captured: Captured, dim: int = 0, imbalance: float = 1.0) -> Operators:
    """The operators of a captured graph; the batch is dim 0 of every input that has dims. With another ``dim`` its
    factors and dims are those that carry that dim of the inputs instead. ``imbalance`` is that of experts
    (`Workload.expert_imbalance`), by which their work and memory is priced."""
    return read_operators(
        captured.graph,
        {node: dim for node in captured.inputs if node.meta["val"].dim() > dim},
        {o.tangent: o.node for o in captured.outputs if o.tangent is not None},
        first_of(captured.blocks),
        imbalance,
    )


@collecting_later()
def make_program(
    setting: Setting, mesh: Mesh, pins: Pins, in_flight: float = 1.0
) -> tuple[Space, Program]:
    """The space of one mesh and its integer program, with the activations of so many micro-batches ``in_flight``."""
    captured, operators = setting.captured, setting.operators
    space, prices = build_space(captured, operators, mesh, pins), Prices(setting.cluster, mesh)
    program = price(
        space, captured, operators, prices, setting.optimizer, math.inf, setting.recompute, pins.micro_batches,
        setting.compiled, in_flight,
    )  # fmt: skip
    return space, program


@collecting_later()
def account(stages: Stages) -> Solved:
    """Price an assignment by what the passes emit for a step of its ``stages``."""
    setting, assignment = stages.setting, stages.assignment
    operators, mesh = setting.operators, assignment.mesh
    priced = stages.priced()
    flops = sum(op.flops for op in operators)
    local = sum(op.flops * work_share(op.rule, assignment.strategies[op.node], mesh) for op in operators)
    breakdown = priced.simulated.breakdown
    sharded = any(is_sharded(p, operators, assignment) for p in setting.captured.parameters)
    return Solved(
        mesh,
        assignment,
        breakdown,
        priced.memory,
        priced.collectives,
        (local / flops if flops else 1.0) * priced.share,
        (setting.zero.stage or 3) if sharded else 0,
        priced.timing,
        stages.held,
    )
