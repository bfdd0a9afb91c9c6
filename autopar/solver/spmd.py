"""One graph on one mesh: build the space, price it, solve it, and account for the answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.capture.blocks import first_of
from autopar.capture.graph import Captured
from autopar.garbage import collecting_later
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, read_operators
from autopar.sharding.recompute import kept, made_again
from autopar.sharding.rule import work_share
from autopar.solver.collectives import collectives
from autopar.solver.costs import Prices, local_work, price
from autopar.solver.memory import memory_of
from autopar.solver.program import Floats, Program, Solution
from autopar.solver.setting import Setting, is_sharded, keepings
from autopar.solver.space import Pins, Space, build_space


@dataclass(frozen=True)
class Solved:
    """An assignment with its account: seconds by part, bytes by kind, collectives of a step, the proved lower bound on
    seconds over the space, the largest share of the FLOPs that a rank does, and ``zero``: 3 if some parameter rests
    sharded over the data axis, else 0."""

    mesh: Mesh
    assignment: Assignment
    breakdown: dict[str, float]
    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    bound: float
    flops_share: float
    zero: int

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return sum(self.breakdown.values())

    @property
    def peak_memory(self) -> int:
        """Bytes a device."""
        return sum(self.memory.values())


@collecting_later()
def read(captured: Captured, dim: int = 0) -> Operators:
    """The operators of a captured graph; the batch is dim 0 of every input that has dims. With another ``dim`` its
    factors and dims are those that carry that dim of the inputs instead."""
    return read_operators(
        captured.graph,
        {node: dim for node in captured.inputs if node.meta["val"].dim() > dim},
        {o.tangent: o.node for o in captured.outputs if o.tangent is not None},
        first_of(captured.blocks),
    )


@collecting_later()
def make_program(
    setting: Setting, mesh: Mesh, pins: Pins, budget: float = float("inf")
) -> tuple[Space, Program]:
    """The space of one mesh and its integer program, for at most ``budget`` bytes a device."""
    captured, operators = setting.captured, setting.operators
    space, prices = build_space(captured, operators, mesh, pins), Prices(setting.cluster, mesh)
    return space, price(space, captured, operators, prices, setting.optimizer, budget, setting.recompute)


@collecting_later()
def account(setting: Setting, assignment: Assignment, solution: Solution, micro_batches: int = 1) -> Solved:
    """Price an assignment by what the passes emit for a step of so many ``micro_batches``."""
    captured, operators, mesh = setting.captured, setting.operators, assignment.mesh
    prices = Prices(setting.cluster, mesh)
    held = kept(operators, assignment, made_again(operators, setting.recompute))
    calls = [*operators, *(operators.by_node[node] for node in held.operators)]
    keep = keepings(captured, assignment, setting.zero)
    issued = collectives(captured, operators, assignment, prices, held, keep, micro_batches)
    breakdown = {
        "compute": float(seconds_of(calls, operators, assignment, prices).sum()),
        "exposed communication": sum(c.seconds for c in issued),
        "bubble": 0.0,
    }
    flops = sum(op.flops for op in operators)
    local = sum(op.flops * work_share(op.rule, assignment.strategies[op.node], mesh) for op in operators)
    return Solved(
        mesh,
        assignment,
        breakdown,
        memory_of(setting, assignment, held, keep, micro_batches),
        issued,
        min(solution.bound, sum(breakdown.values())),
        local / flops if flops else 1.0,
        (setting.zero.stage or 3) if any(is_sharded(p, assignment) for p in captured.parameters) else 0,
    )


def seconds_of(calls: list[Operator], operators: Operators, assignment: Assignment, prices: Prices) -> Floats:
    """Seconds of every call. Counterparts in equal blocks share their call and their strategy: each is priced once."""
    work: list[tuple[float, float, torch.dtype]] = []
    places: dict[tuple[int, int], int] = {}
    found = []
    for op in calls:
        strategy = assignment.strategies[op.node]
        key = (id(op.call), id(strategy))
        if key not in places:
            places[key] = len(work)
            work.append(local_work(op, operators, assignment.mesh, strategy))
        found.append(places[key])
    return prices.work_seconds(work)[found]
