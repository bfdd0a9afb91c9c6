"""One graph on one mesh: build the space, price it, solve it, and account for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture.blocks import first_of
from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Cluster
from autopar.garbage import collecting_later
from autopar.plan import Collective
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, read_operators
from autopar.sharding.recompute import Kept, kept, made_again
from autopar.sharding.rule import work_share
from autopar.sharding.zero import Keeping, Zero
from autopar.solver.collectives import collectives
from autopar.solver.costs import Prices, local_work, price, state_bytes
from autopar.solver.program import Floats, Program, Solution, solve
from autopar.solver.space import DATA_AXIS, Pins, Space, build_space


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
    captured: Captured,
    operators: Operators,
    mesh: Mesh,
    cluster: Cluster,
    optimizer: str,
    pins: Pins,
    budget: float,
    recompute: str = "none",
) -> tuple[Space, Program]:
    """The space of one mesh and its integer program."""
    space = build_space(captured, operators, mesh, pins)
    return space, price(space, captured, operators, Prices(cluster, mesh), optimizer, budget, recompute)


def solve_mesh(
    captured: Captured,
    operators: Operators,
    mesh: Mesh,
    cluster: Cluster,
    optimizer: str,
    pins: Pins,
    budget: float = float("inf"),
    recompute: str = "none",
) -> Solved | None:
    """The fastest assignment on ``mesh`` within ``budget`` bytes a device, or None if there is none."""
    space, program = make_program(captured, operators, mesh, cluster, optimizer, pins, budget, recompute)
    solution = solve(program)
    if solution is None:
        return None
    return account(captured, operators, space.assignment(solution.options), cluster, optimizer, solution, recompute)


@collecting_later()
def account(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    cluster: Cluster,
    optimizer: str,
    solution: Solution,
    recompute: str = "none",
    zero: Zero = Zero(),  # noqa: B008  frozen
    micro_batches: int = 1,
) -> Solved:
    """Price an assignment by what the shard pass will emit for it, by what ``recompute`` makes again, and by how long
    ``zero`` keeps copies and how often it reduces gradients over ``micro_batches``."""
    mesh = assignment.mesh
    prices = Prices(cluster, mesh)
    held = kept(operators, assignment, made_again(operators, recompute))
    calls = [*operators, *(operators.by_node[node] for node in held.operators)]
    keep = keepings(captured, assignment, zero)
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
        memory_of(captured, operators, assignment, optimizer, held, keep, micro_batches),
        issued,
        min(solution.bound, sum(breakdown.values())),
        local / flops if flops else 1.0,
        (zero.stage or 3) if any(_is_sharded(p, assignment) for p in captured.parameters) else 0,
    )


def keepings(captured: Captured, assignment: Assignment, zero: Zero) -> dict[str, Keeping]:
    """How long copies of every parameter live and how often its gradient is reduced, by name."""
    return {p.name: zero.keeping(_is_sharded(p, assignment), p.master is not None) for p in captured.parameters}


def _is_sharded(p: Parameter, assignment: Assignment) -> bool:
    """Whether a parameter rests sharded over the data axis."""
    return DATA_AXIS in assignment.sources[p.placeholder].split_axes


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


def memory_of(
    captured: Captured,
    operators: Operators,
    assignment: Assignment,
    optimizer: str,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int,
) -> dict[str, int]:
    """Bytes a device by kind; ``copies`` are those of parameters that live longer than one use."""
    totals: dict[str, float] = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    copies = 0
    for p in captured.parameters:
        local = assignment.sources[p.placeholder].local_bytes(assignment.mesh, p.spec) // p.spec.dtype.itemsize
        for kind, nbytes in state_bytes(local, p.storage_dtype, optimizer, p.gradient is not None).items():
            totals[kind] += nbytes
        ranks = assignment.mesh.degree(DATA_AXIS) if _is_sharded(p, assignment) else 1
        if keep[p.name].copy != "use":
            copies += local * ranks * p.spec.dtype.itemsize
        if keep[p.name].gradient == "step" and micro_batches > 1 and p.gradient is not None and optimizer != "none":
            totals["gradients"] += local * (ranks - 1) * p.gradient.meta["val"].dtype.itemsize
    if copies:
        totals["copies"] = copies
    for value, layout in held.saved:
        totals["activations"] += layout.local_bytes(assignment.mesh, operators.specs[value])
    return {kind: int(nbytes) for kind, nbytes in totals.items()}
